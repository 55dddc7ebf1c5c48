"""Adasum as a `Schedule`: recursive vector halving for any number of chips, and what a step that combines needs.

A step of `adasum` sends combines two vectors by the formula in `execute.adasum.operator`, whose coefficients hold for
whole tensors while each chip has only a slice of them. So the chips that share the two vectors add up their parts of
the dot products first. Who they are follows from the schedule: `combinations` finds them, and refuses a
schedule in which a dot product would not be over the whole vector.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from multipod.collectives.schedule import ADASUM, ADD, COPY, Schedule, Step, join, make_step
from multipod.errors import ScheduleError
from multipod.topology.topology import Topology

UNEVEN = 1 << 30
"""The vector's parts where it does not halve evenly. Shares are then equal to a part in a billion."""

Part = tuple[int, int, int]
"""From, to (of the denominator), and the chip that holds this part of a node's vector."""

Sent = tuple[int, int, int, int]
"""The chips that send and receive, and the part of the vector that travels: from, to."""


def halving(topology: Topology, node: int = 1) -> Schedule:
    """Adasum over all live chips, by recursive halving up a binary tree of their numbers, and back down.

    The node k levels up holds the chips whose numbers agree but for their last k bits, so a chip that fails takes its
    leaf out and leaves the rest of the tree as it was. Where two nodes of m_1 and m_2 chips meet, each place of the
    vector is held by one chip of either; the first m_1 / (m_1 + m_2) of what two chips both hold goes to the one of
    the left node, the rest to the other. So all chips of a node hold equal shares, for any m_1 and m_2, and none sends
    more than (p - 1) / p of the vector on the way up. On the way down they are copied back.

    Costs 2 ceil(log2 c) steps, c being the largest chip number + 1, and 2 (p - 1) / p of the vector sent by each of
    p = 2^k chips. The sums of dots (`dot_sums`) come on top.

    Args:
      topology: the machine.
      node: so many chips with consecutive numbers are a node, within which vectors are added: first a direct
        reduce-scatter, then Adasum between the nodes with all their chips at work, then the copies back. For the mean
        in each node divide each vector by the number of live chips of its node before (`node_chips`).

    Raises:
      ScheduleError: a node of no chips.
      TopologyError: the machine is cut in parts.

    Source: Maleki et al. 2021, arXiv:2006.02924, for powers of two; other numbers and weights are ours.
    """
    topology.check_connected()
    whole = _denominator(topology)
    nodes: dict[int, list[Part]] = {}
    chips: dict[int, int] = {}
    levels: list[list[Sent]] = []
    within: list[list[Sent]] = []
    for name, members in node_chips(topology, node).items():
        ends = [whole * k // len(members) for k in range(len(members) + 1)]
        nodes[name] = [(begin, end, chip) for (begin, end), chip in zip(pairwise(ends), members, strict=True)]
        chips[name] = len(members)
        for turn in range(1, len(members)):
            within += [[]] * (turn - len(within))
            within[turn - 1] = within[turn - 1] + [
                (members[(k + turn) % len(members)], keeper, begin, end)
                for k, (begin, end, keeper) in enumerate(nodes[name])
            ]
    while len(nodes) > 1:
        sends: list[Sent] = []
        above: dict[int, list[Part]] = {}
        numbers: dict[int, int] = {}
        for name in sorted(nodes):
            parent = name >> 1
            if parent not in above:
                above[parent], numbers[parent] = nodes[name], chips[name]
            else:
                shares = numbers[parent], chips[name]
                above[parent] = _meet(above[parent], nodes[name], shares, sends)
                numbers[parent] = sum(shares)
        nodes, chips = above, numbers
        if sends:
            levels.append(sends)
    bounds = np.unique([0, whole, *(end for sends in (*within, *levels) for send in sends for end in send[2:])])
    up = [_step(sends, bounds, ADD) for sends in within] + [_step(sends, bounds, ADASUM) for sends in levels]
    # What a chip gave away comes back from the one that it gave it to.
    back = [[(dst, src, begin, end) for src, dst, begin, end in sends] for sends in (*within, *levels)]
    down = [_step(sends, bounds, COPY) for sends in reversed(back)]
    return Schedule("all-reduce", "adasum", topology, whole, bounds, [*up, *down])


def node_chips(topology: Topology, node: int) -> dict[int, list[int]]:
    """The live chips of each node of `node` chips with consecutive numbers; nodes without any are left out.

    Raises:
      ScheduleError: a node of no chips.
    """
    if not isinstance(node, int) or node < 1:
        raise ScheduleError(f"adasum: node={node} holds no chip. Give the number of chips of a node, 1 or more.")
    found: dict[int, list[int]] = {}
    for chip in topology.chips:
        found.setdefault(chip // node, []).append(chip)
    return found


def _denominator(topology: Topology) -> int:
    count = len(topology.chips)
    return count if count & (count - 1) == 0 and topology.chips[-1] == count - 1 else UNEVEN


def _meet(left: Sequence[Part], right: Sequence[Part], chips: tuple[int, int], sends: list[Sent]) -> list[Part]:
    """The parts of two nodes' vectors combined, in order; the sends that this takes are added to `sends`."""
    found: list[Part] = []
    ours, theirs = iter(left), iter(right)
    (_, end_a, a), (_, end_b, b) = next(ours), next(theirs)
    start, last = left[0][0], left[-1][1]
    while start < last:
        stop = min(end_a, end_b)
        cut = start + (stop - start) * chips[0] // sum(chips)
        for begin, end, keeper, giver in ((start, cut, a, b), (cut, stop, b, a)):
            if begin < end:
                sends.append((giver, keeper, begin, end))
                found.append((begin, end, keeper))
        start = stop
        if start < last and end_a == start:
            _, end_a, a = next(ours)
        if start < last and end_b == start:
            _, end_b, b = next(theirs)
    return found


def _step(sends: Iterable[Sent], bounds: np.ndarray, op: int) -> Step:
    src, dst, begin, end = np.array(sorted(sends)).T
    return make_step(src, dst, np.searchsorted(bounds, begin), np.searchsorted(bounds, end), op)


class Combination(NamedTuple):
    """Two vectors that become one in a step: `left` and `right` are the ranks that each is over and spread over.

    The one with the smallest rank is on the left. Each rank of either holds slices of the result.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks, in order."""
        return tuple(sorted(self.left + self.right))


@lru_cache(maxsize=64)
def combinations(schedule: Schedule) -> tuple[tuple[Combination, ...], ...]:
    """The combinations of each step; none in steps that do not combine.

    Raises:
      ScheduleError: a step adds and combines, or combines slices that do not make up two whole vectors, each place
        once; then no chip could know the dot products. Names the step and the chip.
    """
    chips = schedule.topology.chips
    rank = np.full(schedule.topology.size, -1)
    rank[list(chips)] = np.arange(len(chips))
    sets: dict[frozenset[int], int] = {frozenset((r,)): r for r in range(len(chips))}
    wide = np.flatnonzero(np.diff(schedule.bounds) > 0)
    held = np.repeat(np.arange(len(chips))[:, None], len(wide), axis=1)  # of each cell, the number of its set
    found: list[tuple[Combination, ...]] = []
    for number, step in enumerate(schedule.steps):
        send, place = _cells(step, wide)
        source, target = held[rank[step.src[send]], place], held[rank[step.dst[send]], place]
        copies = step.op[send] == COPY
        met = np.where(copies, source, _unions(source, target, copies, sets))
        which = (step.op == ADASUM).any()
        if which:
            if (step.op != ADASUM).any():
                raise ScheduleError(f"{schedule}: step {number} combines and does something else. Make it two steps.")
            found.append(_checked(schedule, number, np.stack([source, target, met, rank[step.dst[send]], place]), sets))
        else:
            found.append(())
        held[rank[step.dst[send]], place] = met
    return tuple(found)


def _cells(step: Step, wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(send, place among `wide`) of each piece with a width that the step sends."""
    begin, end = np.searchsorted(wide, step.first), np.searchsorted(wide, step.stop)
    count = end - begin
    return np.repeat(np.arange(len(count)), count), np.arange(count.sum()) + np.repeat(
        begin - np.cumsum(count) + count, count
    )


def _unions(source: np.ndarray, target: np.ndarray, copies: np.ndarray, sets: dict[frozenset[int], int]) -> np.ndarray:
    """The numbers of the unions of sets, which are added to `sets` where they are new."""
    names = list(sets)
    code = np.where(copies, -1, source * (1 << 31) + target)
    distinct, where = np.unique(code, return_inverse=True)
    numbers = [
        0 if one < 0 else sets.setdefault(names[one >> 31] | names[one & (1 << 31) - 1], len(sets))
        for one in distinct.tolist()
    ]
    return np.array(numbers, np.int64)[where]


def _checked(
    schedule: Schedule, number: int, cells: np.ndarray, sets: dict[frozenset[int], int]
) -> tuple[Combination, ...]:
    """The combinations of a step; `cells` has rows (set sent, set held, set of both, rank that receives, place)."""
    names, chips = list(sets), schedule.topology.chips
    places = int((np.diff(schedule.bounds) > 0).sum())
    found = []
    for met in np.unique(cells[2]).tolist():
        sent, own, _, receiver, place = cells[:, cells[2] == met]
        pairs = {frozenset(pair) for pair in zip(sent.tolist(), own.tolist(), strict=True)}
        both = [names[one] for one in sorted(next(iter(pairs)))]
        left, right = (tuple(sorted(one)) for one in sorted(both * 2 if len(both) == 1 else both, key=min))
        where = f"{schedule}: step {number}: the combination of chips {_some(chips, left)} with {_some(chips, right)}"
        if len(pairs) > 1:
            raise ScheduleError(f"{where} is of other sets in other places. Combine the same two vectors everywhere.")
        if set(left) & set(right):
            raise ScheduleError(
                f"{where} holds contributions twice, which would count twice. Leave this send out, or let it copy."
            )
        strangers = set(receiver.tolist()) - set(left) - set(right)
        if strangers:
            raise ScheduleError(
                f"{where} is received by chips {_some(chips, sorted(strangers))}, which are in neither. "
                "Combine on the chips that the vectors come from."
            )
        times = np.bincount(place, minlength=places)
        if (times != 1).any():
            at = int(np.argmax(times != 1))
            raise ScheduleError(
                f"{where} combines place {at} of {places} {int(times[at])} times, and dot products need each place of "
                "the vector once. Let the receivers' slices make up the whole vector."
            )
        found.append(Combination(left, right))
    seen: set[int] = set()
    for combination in found:
        if seen & set(combination.members):
            raise ScheduleError(
                f"{schedule}: step {number}: chips {_some(chips, sorted(seen & set(combination.members)))} are in two "
                "combinations at once. Make it two steps."
            )
        seen |= set(combination.members)
    return tuple(found)


def _some(chips: Sequence[int], ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(str(chips[r]) for r in ranks[:8]) + more


def group_sum(members: Sequence[int]) -> list[Step]:
    """The steps of a sum over the chips `members` of a vector of one piece, which stays whole: ceil(log2 m) steps.

    Blocks of 1, 2, 4, ... members exchange their sums with their neighbours' block. In the last, shorter block each
    chip answers for several. Both sides add the same two numbers, so all members end with the same bits.
    """
    steps = []
    size = 1
    while size < len(members):
        sends = []
        for begin in range(0, len(members), 2 * size):
            one, other = members[begin : begin + size], members[begin + size : begin + 2 * size]
            for near, far in ((one, other), (other, one)):
                sends += [(far[k % len(far)], chip) for k, chip in enumerate(near) if far]
        if sends:
            src, dst = zip(*sends, strict=True)
            steps.append(make_step(src, dst, 0))
        size *= 2
    return steps


@lru_cache(maxsize=64)
def dot_sums(schedule: Schedule) -> tuple[Schedule | None, ...]:
    """For each step that combines, the schedule that sums the dots over the members of each combination; else None.

    It is an all-reduce within each combination, on vectors of any length: three numbers a tensor.
    """
    found: list[Schedule | None] = []
    chips = schedule.topology.chips
    for number, step in enumerate(combinations(schedule)):
        groups = [group_sum([chips[r] for r in one.members]) for one in step]
        steps = [join([g[k] for g in groups if k < len(g)]) for k in range(max(map(len, groups), default=0))]
        name = f"dots of step {number} of {schedule.algorithm}"
        found.append(Schedule("all-reduce", name, schedule.topology, 1, np.arange(2), steps) if step else None)
    return tuple(found)


@lru_cache(maxsize=64)
def split(schedule: Schedule) -> tuple[tuple[int, Schedule | None], ...]:
    """The schedule as parts, for engines that do the two differently: (number, None) is a step that combines,
    (number, steps) are steps from there on that do not.
    """
    parts: list[tuple[int, Schedule | None]] = []
    begin = 0
    ends = [k for k, step in enumerate(schedule.steps) if (step.op == ADASUM).any()]
    for end in (*ends, len(schedule.steps)):
        if begin < end:
            steps = schedule.steps[begin:end]
            parts.append((begin, replace(schedule, collective="broadcast", steps=steps, origin=None)))
        if end < len(schedule.steps):
            parts.append((end, None))
        begin = end + 1
    return tuple(parts)


def leaves(topology: Topology) -> tuple[int, ...]:
    """The leaves of `halving`'s tree: for each chip number up to a power of two the rank of that chip, or -1."""
    found = [-1] * (1 << topology.chips[-1].bit_length())
    for rank, chip in enumerate(topology.chips):
        found[chip] = rank
    return tuple(found)
