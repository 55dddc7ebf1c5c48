"""Timetables of spanning trees: which send leaves when, so that trees in every round share the links without waiting.

The trees repeat in rounds; a round's sends are laid into a period in which every link serves all of its
trees once (a modulo schedule).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from multipod.collectives.packing import Edge, Tree, edge
from multipod.collectives.schedule import ADD, COPY, Schedule, Step, Steps, even_bounds
from multipod.topology.topology import Topology


@dataclass(frozen=True)
class Period:
    """A period, in ticks, and what the links can do in it.

    Attributes:
      ticks: the length of the period.
      cost: ticks that each link takes for a piece, in one direction; the fastest take the fewest.
      trees: how many spanning trees fit.
    """

    ticks: int
    cost: dict[Edge, int]
    trees: int

    @property
    def slot(self) -> int:
        """Ticks that the fastest links take for a piece."""
        return min(self.cost.values())

    @cached_property
    def capacity(self) -> dict[Edge, int]:
        """How many pieces each link can carry in a period, in one direction."""
        return {link: self.ticks // ticks for link, ticks in self.cost.items()}


@dataclass(frozen=True, eq=False)
class TreeTimetable:
    """Spanning trees with the time of every send of a round: what a schedule is made of, and mended from.

    Attributes:
      topology: the machine.
      beat: the period.
      trees: spanning trees of the live chips.
      starts: for each tree, the tick at which each chip but the root gets the sum from its parent, counted
        from the tick at which the root has it. The same chip hands its own sum to its parent as long before.
      depth: ticks until the last of those sends has left.
      lag: ticks that are left for the latency of each hop.
    """

    topology: Topology
    beat: Period
    trees: tuple[Tree, ...]
    starts: tuple[dict[int, int], ...]
    depth: int
    lag: int

    def ticks(self, rounds: int) -> int:
        """The length of a schedule of `rounds` rounds, until the last send has left."""
        return (rounds - 1) * self.beat.ticks + 2 * self.depth + self.lag


def time_trees(topology: Topology, beat: Period, trees: Sequence[Tree], lag: int) -> TreeTimetable:
    """A time for every send of a round, such that no link serves two trees at once, in any round.

    What a chip is sent it can send on `lag` ticks after it has left. Without that, latencies shorter than
    a piece would still add up: a link that serves in order stands still for what comes late.

    Only the way down is timed. The way up is its mirror image: what reaches a chip from its parent t
    ticks after the root had it leaves that chip for its parent t ticks before. So the slot of a link
    that a tree takes on the way down fixes the slot of the other direction that it takes on the way up,
    and a link is full when each of its slots is taken once.

    Long ways first: a send that waits delays all that come after it, so the ways to the farthest chips
    choose their slots while most are free, and the leaves near the root take what is left.
    """
    free = {link: set(range(most)) for link, most in beat.capacity.items()}
    starts: list[dict[int, int]] = [{} for _ in trees]
    arrivals: list[dict[int, int]] = [{tree.root: 0} for tree in trees]
    busy: list[set[tuple[int, int]]] = [set() for _ in trees]  # a chip is handed one sum at a time
    for k, way in _ways(trees):
        tree = trees[k]
        for chip in way:
            parent = tree.parent[chip]
            link, cost = edge(chip, parent), beat.cost[edge(chip, parent)]
            earliest = arrivals[k][parent]
            start, slot = min(
                (_next(earliest, slot * cost if parent < chip else -lag - cost - slot * cost, beat.ticks), slot)
                for slot in free[link]
            )
            while (parent, start + cost) in busy[k]:
                start, slot = min(
                    (_next(start + 1, other * cost if parent < chip else -lag - cost - other * cost, beat.ticks), other)
                    for other in free[link]
                )
            free[link].discard(slot)
            busy[k].add((parent, start + cost))
            starts[k][chip], arrivals[k][chip] = start, start + cost + lag
    depth = max(max(times.values()) for times in arrivals) - lag
    return TreeTimetable(topology, beat, tuple(trees), tuple(starts), depth, lag)


def _next(earliest: int, phase: int, period: int) -> int:
    """The first tick from `earliest` on that is `phase` after a multiple of the period."""
    return earliest + (phase - earliest) % period


def _ways(trees: Sequence[Tree]) -> list[tuple[int, list[int]]]:
    """(tree, chips from the top down): every chip but the roots once, in ways to the farthest chips; longest first."""
    ways = []
    for k, tree in enumerate(trees):
        height, depth = tree.heights(), tree.depths()
        for parent in tree.below(tree.root):
            children = sorted(tree.children.get(parent, ()), key=lambda chip: (-height[chip], chip))
            # The farthest child goes on with its parent's way; each other one begins its own.
            for child in children if parent == tree.root else children[1:]:
                way = [child]
                while below := tree.children.get(way[-1]):
                    way.append(min(below, key=lambda chip: (-height[chip], chip)))
                ways.append((-(depth[child] + height[child]), -len(way), k, way))
    return [(k, way) for *_, k, way in sorted(ways)]


def lay_out(packing: TreeTimetable, rounds: int) -> Schedule:
    """The schedule of a packing: `rounds` rounds, each a period after the one before, each with its own pieces."""
    count, period = len(packing.trees), packing.beat.ticks
    sends = _sends(packing)
    order = np.lexsort((sends[4], sends[3], sends[1], sends[0]))
    start, src, dst, tree, op = (column[order] for column in sends)
    by_phase = [np.flatnonzero(start % period == phase) for phase in range(period)]
    ticks = np.zeros(packing.ticks(rounds), bool)
    for tick in np.unique(start):
        ticks[tick : tick + (rounds - 1) * period + 1 : period] = True
    ticks = np.flatnonzero(ticks)

    def make(step: int) -> Step:
        tick = int(ticks[step])
        mine = by_phase[tick % period]
        # Round r sends `start` at tick start + r * period.
        low, high = np.searchsorted(start[mine], (tick - (rounds - 1) * period, tick + 1))
        mine = mine[low:high]
        piece = (tick - start[mine]) // period * count + tree[mine]
        return Step(*(np.asarray(c, np.int32) for c in (src[mine], dst[mine], piece, piece + 1, op[mine])))

    pieces = rounds * count
    return Schedule(
        "all-reduce",
        "tree-packing",
        packing.topology,
        pieces,
        even_bounds(pieces),
        Steps(len(ticks), make),
        origin=packing,
    )


def _sends(packing: TreeTimetable) -> np.ndarray:
    """int64 [5, sends of a round]: start, src, dst, tree, op; the first tick is 0."""
    rows = []
    for k, (tree, starts) in enumerate(zip(packing.trees, packing.starts, strict=True)):
        for chip, start in starts.items():
            parent = tree.parent[chip]
            cost = packing.beat.cost[edge(chip, parent)]
            rows.append((packing.depth - start - cost, chip, parent, k, ADD))
            rows.append((packing.depth + packing.lag + start, parent, chip, k, COPY))
    return np.array(rows, np.int64).T
