"""Which mesh axis splits which dim of which tensor: rules as text, and what comes of them as plain data."""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from multipod.errors import LayoutError
from multipod.layout.axes import DEFAULT_RULES

Dims = tuple[str | None, ...]
Axes = tuple[tuple[str, ...], ...]
"""For each dim of a tensor the mesh axes that split it, none if it is whole."""


@dataclass(frozen=True)
class ParamTensor:
    """What a layout needs to know of a tensor.

    Attributes:
      shape: its sizes.
      dims: a name for each dim (`multipod.nn.dims`), None for one without; empty if no dim has a name.
      itemsize: bytes of an element.
    """

    shape: tuple[int, ...]
    dims: Dims = ()
    itemsize: int = 4

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Rule:
    """A line of a rule table.

    `heads=model`: dims named `heads` are split over the axis `model`. `encoder/*/kernel=-,model`: in tensors whose path
    matches, the first dim is whole and the second split over `model`; such a rule goes before those of names. An axis
    may be several, as `y+x`; `heads=-` leaves such dims whole.
    """

    text: str
    pattern: str
    axes: Axes

    @property
    def is_path(self) -> bool:
        """Whether it names tensors by their path, not dims by their name."""
        return "/" in self.pattern or "*" in self.pattern

    def fits(self, path: str) -> bool:
        """Whether it is for the tensor at `path`."""
        return self.is_path and fnmatch.fnmatchcase(path, self.pattern)


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the mesh.

    Attributes:
      axes: what splits each dim.
      covered: whether a rule, or a name of a dim, spoke of it; otherwise it is whole because nobody said anything.
      problems: why it cannot lie so; empty if it can.
    """

    axes: Axes
    covered: bool
    problems: tuple[str, ...] = ()

    def shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """One device's part of a tensor of `shape`."""
        return tuple(-(-n // parts(axes, sizes)) for n, axes in zip(shape, self.axes, strict=True))


def parse_rule(text: str) -> Rule:
    """A rule from its text; see `Rule`.

    Raises:
      LayoutError: a text of another form.
    """
    pattern, equals, right = text.partition("=")
    axes = tuple(() if part.strip() in ("-", "") else tuple(part.strip().split("+")) for part in right.split(","))
    rule = Rule(text, pattern.strip(), axes)
    if not (equals and rule.pattern and right.strip()) or (len(axes) > 1 and not rule.is_path):
        raise LayoutError(
            f"layout.rules: {text!r} is no rule. Write DIM=AXIS, as heads=model, or PATH=AXIS,AXIS,... with an axis or "
            "- for each dim, as encoder/*/kernel=-,model."
        )
    return rule


DEFAULT_TABLE = tuple(map(parse_rule, DEFAULT_RULES))
"""`DEFAULT_RULES`, read."""


def parts(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """How many parts a dim is cut in over `axes`; an axis that the mesh has not has size 1."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def place(path: str, tensor: ParamTensor, rules: Sequence[Rule], sizes: Mapping[str, int]) -> Placement:
    """How the tensor at `path` lies on a mesh with axes of `sizes`: the first path rule that fits, or its dims' names.

    Axes of size 1 split nothing and are left out.
    """
    rank = len(tensor.shape)
    by_path = next((rule for rule in rules if rule.fits(path)), None)
    names = {rule.pattern: rule.axes[0] for rule in reversed(rules) if not rule.is_path}
    if by_path is not None:
        asked, covered = by_path.axes, True
        if len(asked) != rank:
            problem = (
                f"{path} {list(tensor.shape)}: rule {by_path.text!r} names {len(asked)} dims, and the tensor has "
                f"{rank}. Give an axis or - for each."
            )
            return Placement(((),) * rank, True, (problem,))
    else:
        dims = tensor.dims or (None,) * rank
        asked, covered = tuple(names.get(dim, ()) if dim else () for dim in dims), bool(tensor.dims)
    axes = tuple(tuple(axis for axis in dim if sizes.get(axis, 1) > 1) for dim in asked)
    return Placement(axes, covered, tuple(_problems(path, tensor, axes, sizes)))


def _problems(path: str, tensor: ParamTensor, axes: Axes, sizes: Mapping[str, int]) -> Iterable[str]:
    used = [axis for dim in axes for axis in dim]
    for axis in sorted({axis for axis in used if used.count(axis) > 1}):
        dims = [k for k, names in enumerate(axes) if axis in names]
        yield (
            f"{path} {list(tensor.shape)}: axis {axis} splits dims {dims}, and can split only one. "
            "Give one of them - in a rule for this path."
        )
    for k, names in enumerate(axes):
        size, count = tensor.shape[k], parts(names, sizes)
        if size % count:
            name = tensor.dims[k] if tensor.dims and tensor.dims[k] else f"dim {k}"
            padded = -(-size // count) * count
            yield (
                f"{path} {list(tensor.shape)}: {name} of {size} does not divide over {'+'.join(names)}={count}. "
                f"Pad it by {padded - size} to {padded}, or take {'+'.join(names)}={_best(size, count)}."
            )


def _best(size: int, count: int) -> int:
    """The largest number of parts below `count` that divides `size`."""
    return next(n for n in range(min(size, count), 0, -1) if size % n == 0)
