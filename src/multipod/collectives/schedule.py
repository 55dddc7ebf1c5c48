"""The `Schedule`: what a collective does, step by step, as plain data.

A vector is cut into pieces; a step is a set of sends that all read the state before the step and
happen at once. Four readers: `verify` proves it, `simulate` prices it, `execute` runs it, the command
line draws it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from multipod import notebook
from multipod.errors import ScheduleError
from multipod.topology.topology import Topology

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast"]
COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")

OPS = ("add", "copy", "adasum")
ADD, COPY, ADASUM = range(3)


DRAWN_STEPS = 4096
"""The most steps whose messages a notebook draws: each is made to be counted."""


class Step(NamedTuple):
    """The sends of one step, as five equally long arrays of int32.

    Send k is one message from chip `src[k]` to chip `dst[k]`. It carries the pieces `first[k]` to
    `stop[k] - 1`, and the receiver adds them, copies them, or combines them (`OPS[op[k]]`).
    """

    src: np.ndarray
    dst: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    op: np.ndarray


def make_step(src: object, dst: object, first: object, stop: object = None, op: object = ADD) -> Step:
    """A `Step` from anything that broadcasts to one length; one piece for each send if `stop` is None."""
    starts = np.asarray(first)
    columns = src, dst, starts, starts + 1 if stop is None else stop, op
    long = np.broadcast_arrays(*(np.atleast_1d(np.asarray(column)) for column in columns))
    return Step(*(np.ascontiguousarray(column, np.int32) for column in long))


def join(steps: Sequence[Step]) -> Step:
    """One step with the sends of all `steps`, in their order."""
    return Step(*(np.concatenate(columns) for columns in zip(*steps, strict=True)))


class Steps(Sequence[Step]):
    """Steps that are made when they are asked for: a ring of 4,096 chips has 33 million sends.

    `make` is a pure function of the step's number.
    """

    def __init__(self, count: int, make: Callable[[int], Step]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, k: int) -> Step: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[Step]: ...
    def __getitem__(self, k: int | slice) -> Step | Sequence[Step]:
        if isinstance(k, slice):
            chosen = range(self._count)[k]
            return Steps(len(chosen), lambda i: self._make(chosen[i]))
        if not -self._count <= k < self._count:
            raise IndexError(k)
        return self._make(k % self._count)

    def __iter__(self) -> Iterator[Step]:
        return map(self._make, range(self._count))


def chain(parts: Sequence[Sequence[Step]]) -> Steps:
    """The steps of all `parts`, one part after the other."""
    ends = np.cumsum([len(part) for part in parts])

    def make(k: int) -> Step:
        part = int(np.searchsorted(ends, k, side="right"))
        return parts[part][k - (int(ends[part - 1]) if part else 0)]

    return Steps(int(ends[-1]) if parts else 0, make)


def side_by_side(parts: Sequence[Sequence[Step]]) -> Steps:
    """Step k of all `parts` at once; the shorter ones end earlier."""
    return Steps(
        max((len(part) for part in parts), default=0),
        lambda k: join([part[k] for part in parts if k < len(part)]),
    )


def peers(topology: Topology, tile: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """The live chips at the same place of their model-parallel tiles, in groups; all in one group without a tile."""
    if not tile:
        return (topology.chips,)
    places: dict[tuple[int, ...], list[int]] = {}
    for chip in topology.chips:
        place = tuple(c % t for c, t in zip(topology.coordinates(chip), tile, strict=True))
        places.setdefault(place, []).append(chip)
    return tuple(tuple(chips) for chips in places.values())


@dataclass(frozen=True, eq=False)
class Schedule:
    """A collective on a topology, as steps of sends.

    The vector is cut into pieces: piece k is the fraction `bounds[k] / denominator` to
    `bounds[k + 1] / denominator` of it, so a schedule fits vectors of any length.

    What a schedule must do, for p live chips in order of their number (`verify` proves it):

    - `all-reduce`: every chip ends with the sum over all chips.
    - `reduce-scatter`: the chip of rank i ends with the sum, in the part from i/p to (i+1)/p of the vector.
    - `all-gather`: the chip of rank i begins with that part right, and every chip ends with all of it.
    - `broadcast`: every chip ends with what one chip, the root, began with.

    Attributes:
      collective: which of those.
      algorithm: the name of what built it.
      topology: the machine it was built for.
      denominator: of the pieces' ends.
      bounds: int64 [pieces + 1], rising from 0 to `denominator`.
      steps: a sequence of `Step`; may be made lazily.
      tile: (all-reduce only) the shape of a model-parallel tile, or (); chips at the same place of their
        tiles are summed, and those at other places are not among their peers.
      notes: what the builder wants its user to know, such as a two-hop edge in a ring.
      origin: what the builder made the steps from, for `repair`; no part of what the schedule says.

    Raises:
      ScheduleError: pieces that do not tile the vector, an unknown collective.
    """

    collective: Collective
    algorithm: str
    topology: Topology
    denominator: int
    bounds: np.ndarray
    steps: Sequence[Step]
    tile: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    origin: Any = None

    def __post_init__(self) -> None:
        bounds = np.asarray(self.bounds, np.int64)
        object.__setattr__(self, "bounds", bounds)
        if self.collective not in COLLECTIVES:
            raise ScheduleError(f"{self.collective!r} is no collective. Known: {', '.join(COLLECTIVES)}.")
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != self.denominator or (np.diff(bounds) < 0).any():
            raise ScheduleError(
                f"{self}: the pieces do not cover the vector from 0 to {self.denominator} in order, once. "
                "Let each begin where the one before it ends."
            )

    def __str__(self) -> str:
        return f"{self.algorithm} {self.collective} on {self.topology}"

    def _repr_html_(self) -> str:
        """What it does, and how many messages each step has, in a notebook."""
        drawn = len(self.steps) <= DRAWN_STEPS
        messages = [len(step.first) for step in self.steps] if drawn else []
        even = len({*messages}) == 1
        rows = [
            ("collective", self.collective),
            ("algorithm", self.algorithm),
            ("machine", f"{self.topology}, {len(self.topology.chips):,} chips"),
            ("steps", f"{len(self.steps):,}" + (f", of {messages[0]:,} messages each" if even else "")),
            ("pieces", f"{self.pieces:,}"),
            ("tile", "x".join(map(str, self.tile)) or None),
            *(("note", note) for note in self.notes),
        ]
        chart = "" if even else notebook.bars(messages, "messages of each step")
        return notebook.card("schedule", str(self), rows, chart)

    @property
    def pieces(self) -> int:
        """How many pieces the vector is cut into."""
        return len(self.bounds) - 1

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The live chips that are summed with each other: one group, unless a tile is skipped."""
        return peers(self.topology, self.tile)

    def elements(self, count: int) -> np.ndarray:
        """int64 [pieces + 1]: where each piece begins and the last ends in a vector of `count` elements.

        Piece ends are rounded down, so pieces of a short vector may be empty.
        """
        if count * self.denominator < 2**63:
            return self.bounds * count // self.denominator
        return np.array([int(bound) * count // self.denominator for bound in self.bounds], np.int64)

    def sent(self, count: int) -> int:
        """Elements of all messages of all chips together, for a vector of `count` elements."""
        places = self.elements(count)
        return sum(int((places[step.stop] - places[step.first]).sum()) for step in self.steps)


def even_bounds(pieces: int) -> np.ndarray:
    """The bounds of `pieces` equal pieces, over the denominator `pieces`."""
    return np.arange(pieces + 1, dtype=np.int64)
