"""Mends a schedule of tree packing when chips or links die: only the trees they touched grow anew."""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from multipod.collectives.packing import Edge, Tree, edge, loads, relieve
from multipod.collectives.schedule import Schedule, even_bounds
from multipod.collectives.strength import link_weights, strength
from multipod.collectives.timetable import Period, TreeTimetable, lay_out, time_trees
from multipod.collectives.tree_packing import center, costs, excess
from multipod.errors import ScheduleError
from multipod.topology.topology import Topology

TREES = 20
"""As many trees at least are looked at: few trees fit few periods."""


def repair(schedule: Schedule, topology: Topology) -> Schedule:
    """The schedule for `topology`: that of `schedule`, with more chips or links failed.

    A tree keeps all that is left of it; its parts are joined again by the links that are used least, and
    a link that is then used too often is relieved as when packing. The period grows where the weaker
    machine needs it. All sends are timed anew, and the number of rounds is kept.

    Takes well under a second at 512 chips: nothing is packed from the start, no other packings are tried,
    and trees are not made shallow. So `build` comes a little nearer to the bound, and this comes sooner.

    Raises:
      ScheduleError: the schedule is not of tree packing, or not for the same machine with less failed.
      TopologyError: the machine is cut in parts.
    """
    packing = schedule.origin
    if not isinstance(packing, TreeTimetable):
        raise ScheduleError(
            f"{schedule} was not built here by tree-packing, so there are no trees to mend. "
            "Build one for the broken machine."
        )
    _check_weaker(schedule.topology, topology)
    topology.check_connected()
    if len(topology.chips) == 1:
        return Schedule("all-reduce", schedule.algorithm, topology, 1, even_bounds(1), ())
    root = packing.trees[0].root
    if root in topology.failed_chips:
        root, _ = center(topology.neighbours)
    beat = _beat(topology, packing.beat.trees)
    # More trees than before are the same ones again; fewer are the first ones.
    old = list(itertools.islice(itertools.cycle(packing.trees), beat.trees))
    load = {link: used for link, used in loads(old, packing.beat.cost).items() if link in beat.cost}
    trees = [_regrown(tree, root, topology.neighbours, load, beat.capacity) for tree in old]
    beat = _relieved(trees, beat)
    return lay_out(time_trees(topology, beat, trees, packing.lag), math.ceil(schedule.pieces / len(trees)))


def _check_weaker(before: Topology, now: Topology) -> None:
    """Refuses a machine that is not `before` with the same or more failures."""

    def whole(topology: Topology) -> Topology:
        return replace(topology, failed_chips=frozenset(), failed_links=frozenset(), name="")

    if whole(before) != whole(now):
        raise ScheduleError(f"A schedule for {before} can't be mended for {now}, another machine. Build one for it.")
    alive = before.failed_chips - now.failed_chips
    mended = {(a, b) for a, b in before.failed_links - now.failed_links if not {a, b} & now.failed_chips}
    if alive or mended:
        what = f"chips {sorted(alive)}" if alive else f"links {sorted(mended)}"
        raise ScheduleError(f"{now}: {what} had failed in {before}, and are back. Build a schedule anew to use them.")


def _beat(topology: Topology, trees: int) -> Period:
    """A period for the weaker machine: of those within 1 % of the best, that with about as many trees as before."""
    sigma = strength(topology).value
    cost = costs(link_weights(topology))
    slot = min(cost.values())
    counts = range(1, max(trees, TREES) + 1)
    beats = [Period(math.ceil(count * slot / sigma), cost, count) for count in counts]
    best = min(excess(beat, sigma) for beat in beats)
    return min((beat for beat in beats if excess(beat, sigma) <= best + 0.01), key=lambda beat: abs(beat.trees - trees))


def _regrown(
    tree: Tree, root: int, near: Mapping[int, Sequence[int]], load: dict[Edge, int], capacity: Mapping[Edge, int]
) -> Tree:
    """A spanning tree of the live chips that keeps every link of `tree` that is left.

    Whole parts are attached one by one, over the link that is least used for its capacity; of equal ones,
    that nearest to the root. Counts the new links in `load`.
    """
    kept: dict[int, list[int]] = {chip: [] for chip in near}
    for a, b in tree.edges():
        if (a, b) in load:
            kept[a].append(b)
            kept[b].append(a)
    grown = Tree(root)
    seen: set[int] = set()
    number = itertools.count()
    heap: list[tuple[float, int, int, int, int]] = []

    def join(chip: int, depth: int) -> None:
        """Takes in all that is left in one piece with `chip`, which is a root's or has just been attached."""
        seen.add(chip)
        part = [(chip, depth)]
        for one, links in part:
            for other in kept[one]:
                if other not in seen:
                    seen.add(other)
                    grown.attach(other, one)
                    part.append((other, links + 1))
        for one, links in part:
            for other in near[one]:
                if other not in seen:
                    link = edge(one, other)
                    heapq.heappush(heap, (load[link] / capacity[link], links + 1, next(number), one, other))

    join(root, 0)
    while len(seen) < len(near):
        _, depth, _, one, other = heapq.heappop(heap)
        if other not in seen:
            grown.attach(other, one)
            load[edge(one, other)] += 1
            join(other, depth)
    return grown


def _relieved(trees: Sequence[Tree], beat: Period) -> Period:
    """Relieves the overloaded links, in place, and returns the period in which that was possible."""
    while True:
        try:
            relieve(trees, beat.capacity)
        except ValueError:  # whole slots do not always fit where the strength alone would
            beat = replace(beat, ticks=beat.ticks + 1)
        else:
            return beat
