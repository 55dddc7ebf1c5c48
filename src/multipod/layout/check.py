"""A layout held against a model: all that is wrong with how it splits the tensors, before anything is compiled."""

from collections.abc import Collection, Mapping

from multipod.errors import LayoutError, nearest
from multipod.layout.axes import AXES
from multipod.layout.layout import Layout
from multipod.layout.rules import ParamTensor, Placement, place

Tensors = Mapping[str, ParamTensor]
"""The parameters of a model by their path."""


def place_tensors(layout: Layout, tensors: Tensors, input_dims: Collection[str] = ()) -> dict[str, Placement]:
    """How the axes inside a replica split each tensor.

    `input_dims` are the names of dims that the model's inputs have, as `height`.

    Raises:
      LayoutError: all that is wrong, a line each.
    """
    placed = placements(layout, tensors)
    wrong = problems(layout, tensors, placed, input_dims)
    if wrong:
        raise LayoutError("\n".join(wrong))
    return placed


def placements(layout: Layout, tensors: Tensors) -> dict[str, Placement]:
    """How the axes inside a replica split each tensor, problems and all."""
    return {path: place(path, tensor, layout.split.table, layout.replica_sizes) for path, tensor in tensors.items()}


def problems(
    layout: Layout, tensors: Tensors, placed: Mapping[str, Placement], input_dims: Collection[str] = ()
) -> list[str]:
    """What is wrong with how `layout` splits a model: dims that do not divide, rules and axes without any use."""
    wrong = [problem for placement in placed.values() for problem in placement.problems]
    known = {dim for tensor in tensors.values() for dim in tensor.dims if dim} | set(input_dims)
    for rule in layout.split.table[: len(layout.split.rules)]:
        if rule.is_path and not any(map(rule.fits, tensors)):
            wrong.append(f"layout.rules: no tensor's path fits {rule.text!r}. {nearest(rule.pattern, tensors)}")
        if not rule.is_path and rule.pattern not in known:
            wrong.append(
                f"layout.rules: no dim is called {rule.pattern!r}. {nearest(rule.pattern, known) if known else ''}"
            )
    used = {axis for placement in placed.values() for axes in placement.axes for axis in axes}
    used |= {axis for rule in layout.split.table if rule.pattern in input_dims for axis in rule.axes[0]}
    idle = [axis for axis in layout.replica_sizes if axis not in used and axis != "stage"]
    if idle and not any(placement.problems for placement in placed.values()):
        names = ", ".join(sorted(known)) or "no names: give rules by path"
        wrong += [
            f"layout.{axis}={layout.replica_sizes[axis]} splits nothing of this model, whose dims are {names}. "
            f"Set it to 1, or give a rule, as {next(iter(sorted(known)), 'blocks/*/kernel')}={axis}."
            for axis in idle
        ]
    return wrong


def unsplit_tensors(layout: Layout, tensors: Tensors, placed: Mapping[str, Placement]) -> dict[str, int]:
    """The tensors that every device of a replica holds whole, though it splits weights, and their bytes."""
    if not any(AXES[axis].weights for axis in layout.split.sizes):
        return {}
    return {path: tensors[path].nbytes for path, placement in placed.items() if not any(placement.axes)}


def tensors_without_rules(tensors: Tensors, placed: Mapping[str, Placement]) -> tuple[str, ...]:
    """The tensors of which no rule and no name speaks."""
    return tuple(path for path in tensors if not placed[path].covered)
