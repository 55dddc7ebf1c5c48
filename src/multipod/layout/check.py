"""A layout held against a model, a batch and a number of devices: all that is wrong, before anything is compiled."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from multipod.errors import LayoutError, nearest
from multipod.layout.layout import DATA_AXES, Layout, default_shape
from multipod.layout.rules import Placement, Tensor, place

Tensors = Mapping[str, Tensor]
"""The parameters of a model by their path."""


def lay(layout: Layout, tensors: Tensors, input_dims: Collection[str] = ()) -> dict[str, Placement]:
    """How the axes inside the tiles split each tensor.

    `input_dims` are the names of dims that the model's inputs have, as `height`.

    Raises:
      LayoutError: all that is wrong, a line each.
    """
    placed = placements(layout, tensors)
    wrong = problems(layout, tensors, placed, input_dims)
    if wrong:
        raise LayoutError("\n".join(wrong))
    return placed


def check(
    layout: Layout, tensors: Tensors, batch: int, devices: int, input_dims: Collection[str] = ()
) -> tuple[str, ...]:
    """All that is wrong with `layout` for a model of these tensors, a batch and so many devices; () if nothing is."""
    wrong = [*_mesh_problems(layout, batch, devices)]
    wrong += problems(layout, tensors, placements(layout, tensors), input_dims)
    return tuple(wrong)


def placements(layout: Layout, tensors: Tensors) -> dict[str, Placement]:
    """How the axes inside the tiles split each tensor, problems and all."""
    return {path: place(path, tensor, layout.table, layout.tile_sizes) for path, tensor in tensors.items()}


def problems(
    layout: Layout, tensors: Tensors, placed: Mapping[str, Placement], input_dims: Collection[str] = ()
) -> list[str]:
    """What is wrong with how `layout` splits a model: dims that do not divide, rules and axes without any use."""
    wrong = [problem for placement in placed.values() for problem in placement.problems]
    known = {dim for tensor in tensors.values() for dim in tensor.dims if dim} | set(input_dims)
    for rule in layout.table[: len(layout.rules)]:
        if rule.is_path and not any(map(rule.fits, tensors)):
            wrong.append(f"layout.rules: no tensor's path fits {rule.text!r}. {nearest(rule.pattern, tensors)}")
        if not rule.is_path and rule.pattern not in known:
            wrong.append(
                f"layout.rules: no dim is called {rule.pattern!r}. {nearest(rule.pattern, known) if known else ''}"
            )
    used = {axis for placement in placed.values() for axes in placement.axes for axis in axes}
    used |= {axis for rule in layout.table if rule.pattern in input_dims for axis in rule.axes[0]}
    idle = [axis for axis in layout.tile_sizes if axis not in used and axis != "stage"]
    if idle and not any(placement.problems for placement in placed.values()):
        names = ", ".join(sorted(known)) or "no names: give rules by path"
        wrong += [
            f"layout.{axis}={layout.tile_sizes[axis]} splits nothing of this model, whose dims are {names}. "
            f"Set it to 1, or give a rule, as {next(iter(sorted(known)), 'blocks/*/kernel')}={axis}."
            for axis in idle
        ]
    return wrong


def whole(layout: Layout, tensors: Tensors, placed: Mapping[str, Placement]) -> dict[str, int]:
    """The tensors that every device of a tile holds whole, though the tile splits weights, and their bytes."""
    if not layout.tile_sizes.keys() & {"model", "expert"}:
        return {}
    return {path: tensors[path].nbytes for path, placement in placed.items() if not any(placement.axes)}


def uncovered(tensors: Tensors, placed: Mapping[str, Placement]) -> tuple[str, ...]:
    """The tensors of which no rule and no name speaks."""
    return tuple(path for path in tensors if not placed[path].covered)


def _mesh_problems(layout: Layout, batch: int, devices: int) -> list[str]:
    tile, wrong = layout.tile_devices, []
    needed = math.prod(layout.mesh or (1,)) * tile
    if layout.mesh and needed > devices:
        fitting = (
            replace(layout, mesh=default_shape(devices // tile)) if devices % tile == 0 and devices >= tile else None
        )
        move = f"mesh={fitting.mesh[0]}x{fitting.mesh[1]}" if fitting else "a smaller tile"
        data = "x".join(map(str, layout.mesh))
        wrong.append(
            f"data={data} of {layout.spelled_tile} needs {needed} devices, and there are {devices}. Take {move}, or "
            "leave the mesh out to fill it from the rest."
        )
    if not layout.mesh and devices % tile:
        wrong.append(
            f"{layout.spelled_tile} is {tile} devices, which do not divide the {devices} there are. Halve an axis, or "
            f"use {-(-devices // tile) * tile} devices."
        )
    rows, columns = layout.mesh or default_shape(max(1, devices // tile))
    shares = rows * columns * layout.tile_sizes.get("expert", 1) - len(set(layout.failed))
    if not layout.failed and batch % shares:
        near = " or ".join(str(b) for b in sorted({batch // shares * shares, -(-batch // shares) * shares} - {0}))
        wrong.append(
            f"batch={batch} does not divide over the {shares} devices of {' x '.join(DATA_AXES)}. Use batch={near}."
        )
    return wrong
