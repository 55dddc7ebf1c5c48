"""The `Topology`: a machine of chips and links, whole or broken, as plain data."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import index
from typing import NamedTuple, SupportsIndex

from multipod import notebook
from multipod.errors import TopologyError
from multipod.topology.chips import Chip

Number = int | float | Fraction
ChipName = int | tuple[int, ...]
"""A chip by its number or by its coordinates."""

LATENCY_S, BYTES_PER_S = 1e-6, 50e9
"""Of a link where neither the caller nor the chip says: about those of a TPU link."""


class Link(NamedTuple):
    """A working link between two live neighbours, a < b, along dimension `dim`; it carries both directions at once."""

    a: int
    b: int
    dim: int


@dataclass(frozen=True)
class Topology:
    """A machine: a grid of chips of any number of dimensions, its links, and what has failed.

    Chips are numbered row-major. Neighbours along a dimension are joined by a full-duplex link; `wrap[d]`
    joins the last chip of dimension d to the first (a dimension of 1 or 2 has nothing to close). On a
    switched dimension every chip has a port to a switch instead, and reaches any other in one hop.

    It is long because numbers, coordinates, neighbours and routes are one arithmetic, which readers find in one place.

    Attributes:
      shape: chips along each dimension.
      wrap: which dimensions are closed into rings; all are open if not given.
      failed_chips: by number or by coordinates; kept as numbers.
      failed_links: pairs of neighbours, either way round; kept as (smaller, larger) number.
      chip: what sits at each place, or None; gives latency and bandwidth if these are not given.
      latency_s: of a link, one for all or one for each dimension.
      bytes_per_s: of a link in one direction, one for all or one for each dimension.
      switched: dimensions whose chips hang on a switch.
      shared: switched dimensions on which the chips that differ only in later dimensions share one port
        (a host's network card); it is reached through the shared ports further in.
      name: what to call it in messages; made from the shape if empty.

    Numbers given as int or Fraction stay exact in exact simulations.

    Raises:
      TopologyError: sizes, failures or numbers that describe no machine.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...] = ()
    failed_chips: frozenset[int] = frozenset()
    failed_links: frozenset[tuple[int, int]] = frozenset()
    chip: Chip | None = None
    latency_s: tuple[Number, ...] = ()
    bytes_per_s: tuple[Number, ...] = ()
    switched: tuple[bool, ...] = ()
    shared: tuple[bool, ...] = ()
    name: str = ""

    def _repr_html_(self) -> str:
        """Draws the figures and, of up to two dimensions, the grid, in a notebook."""
        rows = [
            ("chips", f"{len(self.chips):,} of {'x'.join(map(str, self.shape))}"),
            ("failed", self._failures_text()),
            ("links", f"{len(self.links):,}, {self._dimensions_text()}"),
            ("chip", self.chip.name if self.chip else None),
        ]
        if len(self.shape) > 2:
            return notebook.card("topology", str(self), rows)
        height, width = (1, *self.shape)[-2:]
        failed = {divmod(chip, width) for chip in self.failed_chips}
        return notebook.card("topology", str(self), rows, notebook.grid(height, width, failed, "its chips"))

    def _failures_text(self) -> str | None:
        counts = {"chip": len(self.failed_chips), "link": len(self.failed_links)}
        return ", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items() if n) or None

    def _dimensions_text(self) -> str:
        """How each dimension is joined, and how fast; once where all are the same."""
        kinds = ["a switch" if on else "a ring" if closed else "a line"
                 for on, closed in zip(self.switched, self.wrap, strict=True)]  # fmt: skip
        texts = [f"{kind} at {float(b) / 1e9:.4g} GB/s" for kind, b in zip(kinds, self.bytes_per_s, strict=True)]
        return ", ".join(texts) if len({*texts}) > 1 or len(texts) == 1 else f"each dimension {texts[0]}"

    def __post_init__(self) -> None:
        shape = _shape(self.shape)
        chip = self.chip
        # A latency or bandwidth of plain 0 was given, and is for `_numbers` to judge; only () was not.
        latency_s: Number | Sequence[Number] = self.latency_s
        bytes_per_s: Number | Sequence[Number] = self.bytes_per_s
        if isinstance(latency_s, Sequence) and not latency_s:
            latency_s = LATENCY_S if chip is None else chip.link_latency_s
        if isinstance(bytes_per_s, Sequence) and not bytes_per_s:
            bytes_per_s = BYTES_PER_S if chip is None else chip.link_bytes_per_s
        values = {
            "shape": shape,
            "wrap": _flags(self.wrap, shape, "wrap"),
            "switched": _flags(self.switched, shape, "switched"),
            "shared": _flags(self.shared, shape, "shared"),
            "latency_s": _numbers(latency_s, shape, "latency_s", 0),
            "bytes_per_s": _numbers(bytes_per_s, shape, "bytes_per_s", None),
            "failed_chips": frozenset(),  # whole until each failure is checked: messages count them
            "failed_links": frozenset(),
        }
        failed_chips, failed_links = self.failed_chips, self.failed_links
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if any(s and not w for s, w in zip(self.shared, self.switched, strict=True)):
            raise TopologyError(f"{self}: only switched dimensions have shared ports. Set switched there too.")
        if any(s and w for s, w in zip(self.switched, self.wrap, strict=True)):
            raise TopologyError(f"{self}: a switched dimension is not closed by a link. Leave wrap False there.")
        object.__setattr__(self, "failed_chips", frozenset(self.number(chip) for chip in failed_chips))
        object.__setattr__(self, "failed_links", frozenset(self._pair(*link) for link in failed_links))
        if len(self.failed_chips) == self.size:
            raise TopologyError(f"{self}: all {self.size} chips have failed, so there is no machine left.")

    def __str__(self) -> str:
        return (self.name or _plain_name(self)) + _broken(self)

    @property
    def size(self) -> int:
        """The number of chips, failed ones included."""
        return math.prod(self.shape)

    @cached_property
    def chips(self) -> tuple[int, ...]:
        """The numbers of the live chips, in order. A chip's *rank* is its place here."""
        return tuple(chip for chip in range(self.size) if chip not in self.failed_chips)

    @cached_property
    def rank(self) -> dict[int, int]:
        """The rank of each live chip."""
        return {chip: rank for rank, chip in enumerate(self.chips)}

    def coordinates(self, chip: int) -> tuple[int, ...]:
        """Where chip number `chip` sits."""
        place = []
        for size in reversed(self.shape):
            chip, within = divmod(chip, size)
            place.append(within)
        return tuple(reversed(place))

    def number(self, chip: ChipName) -> int:
        """The number of a chip named by number or by coordinates.

        Raises:
          TopologyError: there is no such chip.
        """
        if not all(isinstance(c, SupportsIndex) for c in (chip if isinstance(chip, tuple) else (chip,))):
            raise TopologyError(
                f"{self}: {chip!r} does not name a chip. Give its number, or its coordinates as a tuple."
            )
        if isinstance(chip, tuple):
            inside = len(chip) == len(self.shape) and all(0 <= c < n for c, n in zip(chip, self.shape, strict=True))
            if not inside:
                raise TopologyError(
                    f"{self} has no chip {chip}. Coordinates go from 0 to {tuple(n - 1 for n in self.shape)}."
                )
            number = 0
            for c, n in zip(chip, self.shape, strict=True):
                number = number * n + index(c)
            return number
        if not 0 <= index(chip) < self.size:
            raise TopologyError(f"{self} has no chip {chip}. Chips are numbered 0 to {self.size - 1}.")
        return index(chip)

    def along(self, chip: int, dim: int) -> list[int]:
        """The chips that differ from `chip` in dimension `dim` alone, in order, itself and failed ones included."""
        stride = math.prod(self.shape[dim + 1 :])
        first = chip - self.coordinates(chip)[dim] * stride
        return [first + k * stride for k in range(self.shape[dim])]

    def wired(self, chip: int) -> Iterator[tuple[int, int]]:
        """(neighbour, dim) of each place that `chip` was wired to, whatever has failed since; switches are no wires."""
        place = self.coordinates(chip)
        for dim, n in enumerate(self.shape):
            if self.switched[dim] or n == 1:
                continue
            stride = math.prod(self.shape[dim + 1 :])
            closed = self.wrap[dim] and n > 2
            for c in sorted({place[dim] - 1, place[dim] + 1}):
                if closed or 0 <= c < n:
                    yield chip + (c % n - place[dim]) * stride, dim

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The working wires between live chips, ordered by (a, b). Ports to switches are not among them."""
        return tuple(
            Link(a, b, dim)
            for a in self.chips
            for b, dim in sorted(self.wired(a))
            if a < b and b not in self.failed_chips and (a, b) not in self.failed_links
        )

    @cached_property
    def neighbours(self) -> dict[int, tuple[int, ...]]:
        """The live chips that each live chip reaches without another chip in between, in order.

        Those are over a wire; through a switch, those that differ in its dimension alone; and through shared
        ports all that differ in a shared dimension first, since one port serves them all.
        """
        near: dict[int, set[int]] = {chip: set() for chip in self.chips}
        for a, b, _ in self.links:
            near[a].add(b)
            near[b].add(a)
        for dim in (d for d, yes in enumerate(self.switched) if yes):
            inside = math.prod(self.shape[dim + 1 :])
            for chip in self.chips:
                if self.shared[dim]:
                    first = chip - chip % (inside * self.shape[dim])
                    others = set(range(first, first + inside * self.shape[dim]))
                    others -= set(range(chip - chip % inside, chip - chip % inside + inside))
                else:
                    others = set(self.along(chip, dim)) - {chip}
                near[chip] |= others - self.failed_chips
        return {chip: tuple(sorted(others)) for chip, others in near.items()}

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The live chips in connected parts, largest first."""
        left, parts = set(self.chips), []
        while left:
            part, edge = set(), [min(left)]
            while edge:
                chip = edge.pop()
                if chip not in part:
                    part.add(chip)
                    edge += [other for other in self.neighbours[chip] if other not in part]
            left -= part
            parts.append(tuple(sorted(part)))
        return tuple(sorted(parts, key=lambda part: (-len(part), part)))

    def check_connected(self) -> None:
        """Refuses a machine whose live chips cannot all reach each other.

        Raises:
          TopologyError: naming the parts.
        """
        if len(self.parts) > 1:
            parts = "; ".join(f"{len(part)} chips {_abridged(part)}" for part in self.parts[:4])
            more = f"; and {len(self.parts) - 4} more" if len(self.parts) > 4 else ""
            raise TopologyError(
                f"{self} is cut into {len(self.parts)} parts that cannot reach each other: {parts}{more}. "
                "Give up all but one part (failed_chips), or mend a link between them."
            )

    def without(self, chips: Iterable[ChipName] = (), links: Iterable[Sequence[ChipName]] = ()) -> "Topology":
        """This machine with these chips and links failed too."""
        return replace(
            self,
            failed_chips=self.failed_chips | {self.number(chip) for chip in chips},
            failed_links=self.failed_links | {self._pair(*link) for link in links},
        )

    def _pair(self, *ends: ChipName) -> tuple[int, int]:
        if len(ends) != 2:
            raise TopologyError(f"{self}: failed link {ends} does not name two chips.")
        a, b = sorted(self.number(end) for end in ends)
        near = sorted(other for other, _ in self.wired(a))
        if b not in near:
            raise TopologyError(f"{self} has no link {a}-{b}: chip {a} is wired to {near}. Name one of those links.")
        return a, b


def _shape(given: Sequence[int]) -> tuple[int, ...]:
    try:
        shape = tuple(index(n) for n in given)
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise TopologyError(f"shape={given} is no grid of chips. Give positive whole numbers, as (8, 8).")
    return shape


def _flags(given: Sequence[bool] | bool, shape: Sequence[int], name: str) -> tuple[bool, ...]:
    flags = (given,) * len(shape) if isinstance(given, bool) else tuple(map(bool, given)) or (False,) * len(shape)
    if len(flags) != len(shape):
        raise TopologyError(f"{name}={given} does not fit shape={tuple(shape)}. Give one for each dimension.")
    return flags


def _numbers(
    given: Number | Sequence[Number], shape: Sequence[int], name: str, least: int | None
) -> tuple[Number, ...]:
    numbers = tuple(given) if isinstance(given, Sequence) else (given,) * len(shape)
    if len(numbers) != len(shape):
        raise TopologyError(f"{name}={given} does not fit shape={tuple(shape)}. Give one, or one for each dimension.")
    for number in numbers:
        if not isinstance(number, int | float | Fraction) or not (number > 0 or number == least) or number == math.inf:
            bound = "above 0" if least is None else f"{least} or more"
            raise TopologyError(f"{name}={given} is not possible. Give finite numbers {bound}.")
    return numbers


def _plain_name(topology: Topology) -> str:
    if all(topology.switched) and not any(topology.shared):
        kind = "switch"
    else:
        kind = "torus" if all(topology.wrap) else "grid" if any((*topology.wrap, *topology.switched)) else "mesh"
    return f"{kind}:{'x'.join(map(str, topology.shape))}"


def _broken(topology: Topology) -> str:
    failed = (topology.failed_chips, "chip"), (topology.failed_links, "link")
    broken = [f"{len(what)} {name}{'s' * (len(what) > 1)} failed" for what, name in failed if what]
    return f" ({', '.join(broken)})" if broken else ""


def _abridged(part: Sequence[int]) -> str:
    return ", ".join(map(str, part[:8])) + (", ..." if len(part) > 8 else "")
