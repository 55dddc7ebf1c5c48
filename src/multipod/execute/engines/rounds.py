"""The steps of a schedule as rounds, for engines in which a device sends and receives one message at a time.

A round is a partial permutation: each chip sends at most one message and receives at most one. All
rounds of a step read the state before the step. No engine is imported here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from multipod.collectives.schedule import ADASUM, Schedule, Step
from multipod.errors import ScheduleError

RankPair = tuple[int, int]
"""Ranks of a sender and a receiver."""

SHORT = 4096
"""Elements. A step of no more costs its messages, not its bytes: only their number counts when shapes are shared."""


INDEXES = 2**31
"""Vectors of so many elements and more have places that int32, in which JAX counts, cannot tell."""


class RoundMessage(NamedTuple):
    """The elements `begin` to `end` - 1 of the vector, from rank `src` to rank `dst`."""

    src: int
    dst: int
    begin: int
    end: int
    op: int

    @property
    def pair(self) -> RankPair:
        """Who sends to whom."""
        return self.src, self.dst

    @property
    def length(self) -> int:
        """Elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class RoundShape:
    """What steps have in common that share a piece of program.

    Attributes:
      pairs: of each round, who sends to whom.
      lengths: of each round, the elements of its longest message.
      ops: of each round, the operations that its messages use.
      full: of each round, whether every chip receives a message of that length in every step.
      independent: whether no round reads what an earlier round of its step writes.
    """

    pairs: tuple[tuple[RankPair, ...], ...]
    lengths: tuple[int, ...]
    ops: tuple[frozenset[int], ...]
    full: tuple[bool, ...]
    independent: bool


@dataclass(frozen=True)
class Rounds:
    """A schedule for vectors of one length: few shapes, and one table for each step.

    Attributes:
      shapes: the distinct ones.
      shape_of: of each step, the number of its shape.
      tables: of each step, int32 [rounds, chips, 4]: where the message begins that the chip sends; then begin,
        end and operation of the one that it receives (begin = end if there is none). Chips by rank.
    """

    shapes: tuple[RoundShape, ...]
    shape_of: tuple[int, ...]
    tables: tuple[np.ndarray, ...]

    @property
    def count(self) -> int:
        """Rounds, over all steps."""
        return sum(map(len, self.tables))

    @property
    def elements(self) -> int:
        """Elements of the longest messages of all rounds: what a device sends at most."""
        return sum(sum(self.shapes[number].lengths) for number in self.shape_of)


@lru_cache(maxsize=64)
def build_rounds(schedule: Schedule, elements: int, share: bool, most: int = INDEXES) -> Rounds:
    """The schedule as rounds, for a vector of so many elements. Steps that send nothing are left out.

    A step with messages longer than `most` becomes several steps, where no part reads what an earlier part
    writes: for engines in which short messages pay.

    With `share`, a step whose pairs are among those of another one takes its shape, and sends what
    nobody reads on the pairs that it does not need, where that at most doubles its rounds and bytes: a
    pipeline that fills or drains then runs the program of a full one. Without, each step has the
    fewest rounds it can.

    Raises:
      ScheduleError: an operation that is no sum or copy, or more elements than int32 counts.
    """
    if elements >= INDEXES:
        raise ScheduleError(
            f"{schedule}: a vector of {elements:,} elements has places beyond 2^31 - 1, where JAX's indexes end. "
            "Sum it in parts, for example one tensor at a time."
        )
    sending = (sent for step in schedule.steps if (sent := collect_messages(schedule, step, elements)))
    steps = [part for step in sending for part in _cut_step(step, most)]
    chips = len(schedule.topology.chips)
    placed = _share_shapes(steps) if share else [(k, _spread_over_rounds(step)) for k, step in enumerate(steps)]
    members: dict[int, list[list[list[RoundMessage]]]] = {}
    for number, step_rounds in placed:
        members.setdefault(number, []).append(step_rounds)
    order = {number: place for place, number in enumerate(members)}
    return Rounds(
        shapes=tuple(_build_shape(steps_of_it, chips) for steps_of_it in members.values()),
        shape_of=tuple(order[number] for number, _ in placed),
        tables=tuple(_build_table(step_rounds, chips) for _, step_rounds in placed),
    )


def collect_messages(schedule: Schedule, step: Step, elements: int) -> list[RoundMessage]:
    """The messages of a step, by rank, without empty ones; touching ones of one pair and operation are joined."""
    if (step.op == ADASUM).any():
        raise ScheduleError(f"{schedule} combines by Adasum, which this engine cannot. Run it on NumPy.")
    places = schedule.elements(elements)
    rank = np.full(schedule.topology.size, -1)
    rank[list(schedule.topology.chips)] = np.arange(len(schedule.topology.chips))
    columns = rank[step.src], rank[step.dst], places[step.first], places[step.stop], step.op
    joined: list[RoundMessage] = []
    for src, dst, op, begin, end in sorted(
        (src, dst, op, begin, end)
        for src, dst, begin, end, op in zip(*(column.tolist() for column in columns), strict=True)
        if begin < end
    ):
        last = joined[-1] if joined else None
        if last is not None and (last.src, last.dst, last.op, last.end) == (src, dst, op, begin):
            joined[-1] = last._replace(end=end)
        else:
            joined.append(RoundMessage(src, dst, begin, end, op))
    return joined


def _cut_step(step: list[RoundMessage], most: int) -> list[list[RoundMessage]]:
    """The step, or if it has messages longer than `most`, its parts, where one after the other does the same."""
    count = -(-max(message.length for message in step) // most)
    parts = [
        [m._replace(begin=m.begin + low, end=min(m.begin + low + most, m.end)) for m in step if low < m.length]
        for low in range(0, count * most, most)
    ]
    return parts if count > 1 and _is_independent(parts) else [step]


def colour_pairs(pairs: Sequence[RankPair]) -> list[int]:
    """A colour for each pair such that no chip sends two of one colour, or receives two; as few as possible.

    That is the largest number of messages that one chip sends or receives (König, 1916): where a pair
    finds no colour free at both its ends, two colours are exchanged along the path that is in the way.
    """
    most = max(*Counter(src for src, _ in pairs).values(), *Counter(dst for _, dst in pairs).values(), 0, 0)
    out: dict[tuple[int, int], int] = {}  # (chip, colour) to the message it sends in that colour
    into: dict[tuple[int, int], int] = {}
    colours = [-1] * len(pairs)

    def paint(message: int, colour: int) -> None:
        src, dst = pairs[message]
        out[src, colour] = into[dst, colour] = message
        colours[message] = colour

    for message, (src, dst) in enumerate(pairs):
        free_src = [c for c in range(most) if (src, c) not in out]
        free_dst = [c for c in range(most) if (dst, c) not in into]
        both = set(free_src) & set(free_dst)
        if both:
            paint(message, min(both))
            continue
        a, b = free_src[0], free_dst[0]
        path, chip, arriving, colour = [], dst, True, a
        while (hit := (into if arriving else out).get((chip, colour))) is not None:
            path.append(hit)
            chip = pairs[hit][0 if arriving else 1]
            arriving, colour = not arriving, b if colour == a else a
        for hit in path:
            del out[pairs[hit][0], colours[hit]], into[pairs[hit][1], colours[hit]]
        for hit in path:
            paint(hit, b if colours[hit] == a else a)
        paint(message, a)
    return colours


def _spread_over_rounds(step: Sequence[RoundMessage]) -> list[list[RoundMessage]]:
    """The step's messages in rounds; long ones are placed first, so that they tend to travel together."""
    ordered = sorted(step, key=lambda message: (-message.length, message))
    colours = colour_pairs([message.pair for message in ordered])
    return [[m for m, c in zip(ordered, colours, strict=True) if c == colour] for colour in range(max(colours) + 1)]


class _Family:
    """Steps that share a shape, begun by the costliest of them."""

    def __init__(self, founder: list[list[RoundMessage]]) -> None:
        self.lengths = [max(message.length for message in members) for members in founder]
        self.rounds_of: dict[RankPair, list[int]] = {}
        for number in sorted(range(len(founder)), key=lambda k: -self.lengths[k]):
            for message in founder[number]:
                self.rounds_of.setdefault(message.pair, []).append(number)
        self.count = len(founder)
        self.ops = {message.op for members in founder for message in members}

    def place(self, step: Sequence[RoundMessage], most: int) -> list[list[RoundMessage]] | None:
        """The step in this family's rounds, or None where it does not fit or costs more than `most` elements."""
        if not {message.op for message in step} <= self.ops:
            return None
        taken: Counter[RankPair] = Counter()
        placed: list[list[RoundMessage]] = [[] for _ in range(self.count)]
        lengths = list(self.lengths)
        for message in sorted(step, key=lambda message: (-message.length, message)):
            numbers = self.rounds_of.get(message.pair, [])
            if taken[message.pair] == len(numbers):
                return None
            number = numbers[taken[message.pair]]
            taken[message.pair] += 1
            placed[number].append(message)
            lengths[number] = max(lengths[number], message.length)
        if sum(lengths) > most:
            return None
        self.lengths = lengths
        return placed


def _share_shapes(steps: Sequence[Sequence[RoundMessage]]) -> list[tuple[int, list[list[RoundMessage]]]]:
    """Puts steps into families: for each step, the number of its family, and its messages in the family's rounds."""
    alone = [_spread_over_rounds(step) for step in steps]
    costs = [sum(max(message.length for message in members) for members in spread) for spread in alone]
    families: list[_Family] = []
    placed: list[tuple[int, list[list[RoundMessage]]]] = [(0, [])] * len(steps)
    for k in sorted(range(len(steps)), key=lambda k: (-costs[k], -len(steps[k]), k)):
        for number, family in enumerate(families):
            few = family.count <= 2 * len(alone[k]) + 2
            fitted = family.place(steps[k], max(2 * costs[k], SHORT)) if few else None
            if fitted is not None:
                placed[k] = number, fitted
                break
        else:
            placed[k] = len(families), alone[k]
            families.append(_Family(alone[k]))
    return placed


def _build_shape(steps: Sequence[Sequence[Sequence[RoundMessage]]], chips: int) -> RoundShape:
    """The shape of steps that have the same rounds."""
    together = list(zip(*steps, strict=True))  # of each round, its messages in each step
    lengths = tuple(max(message.length for step in steps for message in step) for steps in together)
    return RoundShape(
        pairs=tuple(tuple(sorted({message.pair for step in steps for message in step})) for steps in together),
        lengths=lengths,
        ops=tuple(frozenset(message.op for step in steps for message in step) for steps in together),
        full=tuple(
            all(len(step) == chips and all(m.length == length for m in step) for step in steps)
            for steps, length in zip(together, lengths, strict=True)
        ),
        independent=all(map(_is_independent, steps)),
    )


def _is_independent(step: Sequence[Sequence[RoundMessage]]) -> bool:
    """Whether no message of a round begins at a chip, and in a place, where one of an earlier round ends."""
    written: dict[int, list[tuple[int, int]]] = {}
    for members in step:
        if any(m.begin < end and begin < m.end for m in members for begin, end in written.get(m.src, ())):
            return False
        for message in members:
            written.setdefault(message.dst, []).append((message.begin, message.end))
    return True


def _build_table(step_rounds: Iterable[Sequence[RoundMessage]], chips: int) -> np.ndarray:
    """Builds one step's table of `Rounds.tables`."""
    rows = []
    for members in step_rounds:
        row = np.zeros((chips, 4), np.int32)
        for message in members:
            row[message.src, 0] = message.begin
            row[message.dst, 1:] = message.begin, message.end, message.op
        rows.append(row)
    return np.stack(rows)
