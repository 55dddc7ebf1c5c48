"""The steps of a schedule as permutations: rounds in which each chip sends one message and receives one, of one length.

All rounds of a step read the state before the step.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from multipod.collectives.schedule import ADASUM, Schedule, Step
from multipod.errors import ScheduleError

RankPair = tuple[int, int]
"""Ranks of a sender and a receiver."""

INDEXES = 2**31
"""Vectors of so many elements and more have places that int32, in which JAX counts, cannot tell."""


class Sends(NamedTuple):
    """The messages of a round or step, by rank, as equally long int32 arrays: pieces `first` to `stop` - 1.

    `weight` is a message's share of the vector, in units of the schedule's denominator.
    """

    src: np.ndarray
    dst: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    op: np.ndarray
    weight: np.ndarray

    def take(self, chosen: np.ndarray) -> "Sends":
        """The messages at the places `chosen`."""
        return Sends(*(column[chosen] for column in self))


def collect_sends(schedule: Schedule, step: Step) -> Sends:
    """The messages of a step, by rank, in the order of pairs; touching ones of one pair and operation are joined."""
    if (step.op == ADASUM).any():
        raise ScheduleError(f"{schedule} combines by Adasum, which this engine cannot. Run it on NumPy.")
    rank = np.full(schedule.topology.size, -1, np.int32)
    rank[list(schedule.topology.chips)] = np.arange(len(schedule.topology.chips))
    order = np.lexsort((step.first, step.op, rank[step.dst], rank[step.src]))
    src, dst, first, stop, op = rank[step.src][order], rank[step.dst][order], *(c[order] for c in step[2:])
    touching = (src[1:] == src[:-1]) & (dst[1:] == dst[:-1]) & (op[1:] == op[:-1]) & (first[1:] == stop[:-1])
    begin = np.flatnonzero(np.append(True, ~touching)[: len(src)])
    end = np.append(begin[1:], len(src)) - 1 if len(src) else begin
    weight = schedule.bounds[stop[end]] - schedule.bounds[first[begin]]
    return Sends(src[begin], dst[begin], first[begin], stop[end], op[begin], weight)


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


class Split(NamedTuple):
    """Rounds that steps share which send messages of the same lengths between the same pairs.

    Attributes:
      key: a number; equal splits have the same.
      pairs: of each round, who sends to whom.
      lengths: of each round, the elements of a message.
      weights: of each round, what the pieces of a message weigh.
      ops: of each round, the operations that its messages use.
      chosen: of each round, which of a step's messages.
    """

    key: int
    pairs: tuple[tuple[RankPair, ...], ...]
    lengths: tuple[int, ...]
    weights: tuple[int, ...]
    ops: tuple[frozenset[int], ...]
    chosen: tuple[np.ndarray, ...]

    @property
    def elements(self) -> int:
        """What all devices together send."""
        return sum(len(pairs) * length for pairs, length in zip(self.pairs, self.lengths, strict=True))


class SplitStep(NamedTuple):
    """A step and its rounds. Of long messages it sends the elements from `part * length` on, by the round's length."""

    sends: Sends
    split: Split
    chosen: tuple[np.ndarray, ...]
    part: int = 0

    def fit(self, split: Split) -> "SplitStep | None":
        """This step in the rounds of another one that sends all of its messages and more; None if it does not."""
        rounds: dict[tuple[RankPair, int, int], list[int]] = {}
        for number, pairs in enumerate(split.pairs):
            for pair in pairs:
                rounds.setdefault((pair, split.lengths[number], split.weights[number]), []).append(number)
        placed: list[list[int]] = [[] for _ in split.pairs]
        for number, chosen in enumerate(self.chosen):
            length, weight = self.split.lengths[number], self.split.weights[number]
            for message in chosen.tolist():
                pair = int(self.sends.src[message]), int(self.sends.dst[message])
                free = rounds.get((pair, length, weight))
                if not free or int(self.sends.op[message]) not in split.ops[free[0]]:
                    return None
                placed[free.pop(0)].append(message)
        return self._replace(split=split, chosen=tuple(np.array(messages, np.int64) for messages in placed))


class Splitter:
    """Splits steps into rounds, equal ones once."""

    def __init__(self, schedule: Schedule, elements: int, most: int) -> None:
        self._schedule, self._elements, self._most = schedule, elements, most
        self._places = schedule.elements(elements)
        self._known: dict[tuple[bytes, ...], Split] = {}
        self._keys: dict[tuple[object, ...], int] = {}

    def read(self, step: Step) -> list[SplitStep]:
        """The step in rounds; in several parts if it has messages longer than `most` and none reads what one before
        it writes; none if it sends nothing."""
        sends = collect_sends(self._schedule, step)
        weights, number = np.unique(sends.weight, return_inverse=True)
        longest = np.array([self._length(weight) for weight in weights.tolist()], np.int64)
        if (longest == 0).any():
            sends = sends.take(np.flatnonzero(longest[number] > 0))
        if not len(sends.src):
            return []
        count = -(-int(longest.max()) // self._most)
        whole = SplitStep(sends, split := self._split(sends, 1), split.chosen)
        parts = [self._part(sends, count, part) for part in range(count)] if count > 1 else [whole]
        return parts if self.independent(parts) else [whole]

    def _part(self, sends: Sends, count: int, part: int) -> SplitStep:
        split = self._split(sends, count)
        left = [k for k, weight in enumerate(split.weights) if part * split.lengths[k] < self._length(weight)]
        if len(left) < len(split.pairs):
            columns = (tuple(column[k] for k in left) for column in split[1:])
            split = self._number(Split(-1, *columns))  # type: ignore[arg-type]
        return SplitStep(sends, split, split.chosen, part)

    def _length(self, weight: int) -> int:
        """Elements of the longest message of pieces of this weight."""
        return -(-weight * self._elements // self._schedule.denominator)

    def _split(self, sends: Sends, count: int) -> Split:
        name = (*(column.tobytes() for column in (sends.src, sends.dst, sends.op, sends.weight)), bytes([count]))
        if name not in self._known:
            self._known[name] = self._number(self._new_split(sends, count))
        return self._known[name]

    def _new_split(self, sends: Sends, count: int) -> Split:
        rounds = [
            (weight, same[colour])
            for weight in sorted(set(sends.weight.tolist()), reverse=True)
            for same in [np.flatnonzero(sends.weight == weight)]
            for colour in _colour_rounds(sends.src[same], sends.dst[same])
        ]
        return Split(
            -1,
            pairs=tuple(tuple(zip(sends.src[m].tolist(), sends.dst[m].tolist(), strict=True)) for _, m in rounds),
            lengths=tuple(-(-self._length(weight) // count) for weight, _ in rounds),
            weights=tuple(weight for weight, _ in rounds),
            ops=tuple(frozenset(sends.op[m].tolist()) for _, m in rounds),
            chosen=tuple(m for _, m in rounds),
        )

    def _number(self, split: Split) -> Split:
        key = self._keys.setdefault((split.pairs, split.lengths, split.weights), len(self._keys))
        return split._replace(key=key)

    def ends(self, step: SplitStep, number: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [messages], twice: the elements where the messages of round `number` begin and end."""
        sends, low = step.sends.take(step.chosen[number]), step.part * step.split.lengths[number]
        begin = self._places[sends.first] + low
        return begin, np.minimum(begin + step.split.lengths[number], self._places[sends.stop])

    def is_full(self, step: SplitStep, number: int) -> bool:
        """Whether every chip receives a message of just the round's length."""
        begin, end = self.ends(step, number)
        length = step.split.lengths[number]
        return len(begin) == len(self._schedule.topology.chips) and bool((end - begin == length).all())

    def independent(self, steps: Sequence[SplitStep]) -> bool:
        """Whether no message begins at a chip, and in a place, where one of an earlier round ends."""
        chips = len(self._schedule.topology.chips)
        written: list[np.ndarray] = []
        rounds = [(step, number) for step in steps for number in range(len(step.chosen))]
        for step, number in rounds if len(rounds) > 1 else ():
            sends = step.sends.take(step.chosen[number])
            begin, end = self.ends(step, number)
            read, write = np.zeros((2, 2, chips), np.int64)
            read[:, sends.src] = write[:, sends.dst] = begin, end
            if any(((read[0] < end_) & (begin_ < read[1])).any() for begin_, end_ in written):
                return False
            written.append(write)
        return True


def _colour_rounds(src: np.ndarray, dst: np.ndarray) -> list[np.ndarray]:
    """The places of the messages of each round."""
    if len(set(src.tolist())) == len(src) == len(set(dst.tolist())):
        return [np.arange(len(src))]
    colours = np.array(colour_pairs(list(zip(src.tolist(), dst.tolist(), strict=True))))
    return [np.flatnonzero(colours == colour) for colour in range(int(colours.max()) + 1)]
