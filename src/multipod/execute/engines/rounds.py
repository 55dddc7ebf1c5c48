"""The steps of a schedule as a program for devices that exchange permutations: loops over rounds of equal messages.

A round is a partial permutation: each chip sends at most one message and receives at most one, all of one
length. All rounds of a step read the state before the step. Steps that repeat, alone or in a period, become one
loop; the places of their messages are tables. No engine is imported here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from multipod.collectives.schedule import Schedule
from multipod.errors import ScheduleError
from multipod.execute.engines.permutations import INDEXES, RankPair, SplitStep, Splitter
from multipod.execute.engines.repeats import StepSpan, find_spans

MOST_STEPS = 4096
"""Steps one after the other. Each takes a start and a hop, some 2 to 5 us on a pod: more cost 10 ms before a byte."""

MOST_WRITTEN = 1024
"""Rounds in the text of a program. XLA takes some 20 ms for each, and a 32x256 machine's pairs are 100 KB a round."""

MOST_ENTRIES = 40_000_000
"""Numbers in the tables of a program, which every device holds: 160 MB. Rings both ways of 2,048 chips need 34 M."""

SPARE = 0.03
"""The share of its bytes that a schedule may send for nobody, where a pipeline that fills or drains then runs the loop
of a full one."""

SPARE_ELEMENTS = 4096
"""What each device may send so in any case: a short vector costs its messages, not its bytes."""


@dataclass(frozen=True)
class RoundShape:
    """What steps have in common that share a piece of program.

    Attributes:
      pairs: of each round, who sends to whom.
      lengths: of each round, the elements of a message.
      ops: of each round, the operations that its messages use.
      full: of each round, whether every chip receives a message of just that length, in every step.
      independent: whether no round reads what an earlier round of its step writes; False if that was not asked.
    """

    pairs: tuple[tuple[RankPair, ...], ...]
    lengths: tuple[int, ...]
    ops: tuple[frozenset[int], ...]
    full: tuple[bool, ...]
    independent: bool

    @property
    def elements(self) -> int:
        """What all devices together send in a step."""
        return sum(len(pairs) * length for pairs, length in zip(self.pairs, self.lengths, strict=True))


class Column(NamedTuple):
    """A number for each chip, trip and round, as `base[chip] + pattern[kind[chip]]`: chips at the same place of
    different rings go through the same pieces, but for where these begin.

    base is [chips, rounds], pattern [kinds, times, rounds], kind [chips], all int32.
    """

    base: np.ndarray
    pattern: np.ndarray
    kind: np.ndarray

    @property
    def entries(self) -> int:
        """Numbers held."""
        return self.base.size + self.pattern.size + self.kind.size


class Columns(NamedTuple):
    """The tables of a phase.

    `send` and `receive` are the first pieces of the messages, `received` how many pieces arrive (0 if none), `op` what
    is done with them, `low` where in its pieces a message begins, in elements.
    """

    send: Column
    receive: Column
    received: Column
    op: Column
    low: Column


@dataclass(frozen=True, eq=False)
class Phase:
    """Steps that run one after the other, `times` times over; chips by rank."""

    shapes: tuple[RoundShape, ...]
    times: int
    columns: Columns

    def write_table(self, places: np.ndarray) -> np.ndarray:
        """int32 [times, rounds, chips, 4]: the element where each chip's message begins that it sends; then begin, end
        and operation of the one that it receives (begin = end if there is none)."""
        send, receive, count, op, low = (
            (column.base[:, None] + column.pattern[column.kind]).transpose(1, 2, 0) for column in self.columns
        )
        lengths = np.array([length for shape in self.shapes for length in shape.lengths])[:, None]
        begin = places[receive] + low
        end = np.where(count == 0, begin, np.minimum(begin + lengths, places[receive + count]))
        return np.stack([places[send] + low, begin, end, op], axis=-1).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Rounds:
    """A schedule for vectors of one length.

    Attributes:
      phases: one after the other.
      places: int32 [pieces + 1]: where each piece begins and the last ends.
    """

    phases: tuple[Phase, ...]
    places: np.ndarray

    @property
    def steps(self) -> int:
        """Steps that wait for each other."""
        return sum(phase.times * len(phase.shapes) for phase in self.phases)

    @property
    def count(self) -> int:
        """Rounds, over all steps."""
        return sum(phase.times * len(shape.pairs) for phase in self.phases for shape in phase.shapes)

    @property
    def written(self) -> int:
        """Rounds in the text of the program."""
        return sum(len(shape.pairs) for phase in self.phases for shape in phase.shapes)

    @property
    def elements(self) -> int:
        """What all devices send together, in elements."""
        return sum(phase.times * shape.elements for phase in self.phases for shape in phase.shapes)

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of the longest first round of a step, of the longest second one, and so on."""
        lengths = (shape.lengths for phase in self.phases for shape in phase.shapes)
        return tuple(max(column) for column in zip_longest(*lengths, fillvalue=0))

    @property
    def entries(self) -> int:
        """Numbers in the tables."""
        return len(self.places) + sum(column.entries for phase in self.phases for column in phase.columns)


@lru_cache(maxsize=64)
def build_rounds(schedule: Schedule, elements: int, most: int = INDEXES) -> Rounds:
    """The schedule as rounds, for a vector of so many elements. Steps that send nothing are left out.

    A round holds messages of one length, to an element. Equal steps one after the other, and steps that
    come again in a period, become one loop. Steps before and after that send part of what the loop sends run in it
    too, with messages that nobody reads, as long as all of those are below `SPARE` of the schedule's bytes.

    A step with messages longer than `most` becomes several steps, where no part reads what an earlier part
    writes: for engines in which short messages pay.

    Raises:
      ScheduleError: an operation that is no sum or copy, more elements than int32 counts, or a schedule whose program
        would be too long.
    """
    if elements >= INDEXES:
        raise ScheduleError(
            f"{schedule}: a vector of {elements:,} elements has places beyond 2^31 - 1, where JAX's indexes end. "
            "Sum it in parts, for example one tensor at a time."
        )
    if len(schedule.steps) > MOST_STEPS:
        raise _refusal(schedule, f"{len(schedule.steps):,} steps wait for each other, the most are {MOST_STEPS:,}")
    splitter = Splitter(schedule, elements, most)
    steps = [part for step in schedule.steps for part in splitter.read(step)]
    total = sum(step.split.elements for step in steps)
    spare = max(SPARE * total, SPARE_ELEMENTS * len(schedule.topology.chips))
    spans = list(find_spans(steps, spare))
    written = sum(len(step.split.pairs) for span in spans for step in span.steps[: span.period])
    if written > MOST_WRITTEN:
        raise _refusal(schedule, f"few steps repeat each other, and {written:,} rounds would be written out")
    chips = len(schedule.topology.chips)
    phases = tuple(_build_phase(span, splitter, chips, most < INDEXES) for span in spans)
    rounds = Rounds(phases, schedule.elements(elements).astype(np.int32))
    if rounds.entries > MOST_ENTRIES:
        raise _refusal(schedule, f"its tables hold {rounds.entries:,} numbers, the most are {MOST_ENTRIES:,}")
    return rounds


def _build_phase(span: StepSpan, splitter: Splitter, chips: int, ask: bool) -> Phase:
    """The loop of a span; `ask` whether the rounds of a step are independent."""
    times = len(span.steps) // span.period
    shapes = tuple(_build_shape(span.steps[k :: span.period], splitter, ask) for k in range(span.period))
    count = sum(len(shape.pairs) for shape in shapes)
    tables = np.zeros((5, chips, times * count), np.int32)
    rounds = ((step, number) for step in span.steps for number in range(len(step.chosen)))
    for place, (step, number) in enumerate(rounds):
        sends = step.sends.take(step.chosen[number])
        tables[0, sends.src, place] = sends.first
        tables[1, sends.dst, place] = sends.first
        tables[2, sends.dst, place] = sends.stop - sends.first
        tables[3, sends.dst, place] = sends.op
        tables[4, :, place] = step.part * step.split.lengths[number]
    return Phase(shapes, times, Columns(*(_build_column(table.reshape(chips, times, count)) for table in tables)))


def _build_shape(steps: Sequence[SplitStep], splitter: Splitter, ask: bool) -> RoundShape:
    """The shape of steps with the same rounds."""
    split = steps[0].split
    return RoundShape(
        pairs=split.pairs,
        lengths=split.lengths,
        ops=tuple(frozenset().union(*ops) for ops in zip(*(step.split.ops for step in steps), strict=True)),
        full=tuple(all(splitter.is_full(step, number) for step in steps) for number in range(len(split.pairs))),
        independent=ask and all(splitter.independent([step]) for step in steps),
    )


def _build_column(table: np.ndarray) -> Column:
    """A column from a table [chips, times, rounds]."""
    base = table[:, 0]
    known: dict[bytes, int] = {}
    kind = np.zeros(len(table), np.int32)
    patterns = []
    for chip, rows in enumerate(table - base[:, None]):
        name = rows.tobytes()
        if name not in known:
            known[name] = len(known)
            patterns.append(rows)
        kind[chip] = known[name]
    return Column(base, np.stack(patterns), kind)


def _refusal(schedule: Schedule, reason: str) -> ScheduleError:
    return ScheduleError(
        f"{schedule} is too long a program for the devices: {reason}. Use xla, torus-2d or halving-doubling, "
        "or an option for fewer steps (rounds, segments, tiers)."
    )
