"""Tree packing: all-reduce at the speed that the network's strength allows, on any connected machine.

The vector is shared out to spanning trees that together load every link evenly. Each piece is summed up
its tree to the root and sent back down, while others are under way on the same links. Here the period,
the number of trees in it and the number of rounds are chosen; `packing.py` packs the trees, and
`timetable.py` lays out their sends.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from multipod.collectives.packing import Edge, pack
from multipod.collectives.schedule import Collective, Schedule, even_bounds
from multipod.collectives.strength import check_wired, link_weights, strength, weakest
from multipod.collectives.timetable import Period, TreeTimetable, lay_out, time_trees
from multipod.errors import ScheduleError, TopologyError
from multipod.topology.topology import Topology

PERIODS = range(1, 65)
"""How often links of one speed may serve in a period. Longer ones come nearer to the strength, and wait longer."""


EFFORT = 100_000
"""Chips times trees that are packed to compare periods: some seconds. One period is tried in any case."""

PIECES = 2**24
"""More pieces than this are refused: somebody mistook a number."""


def tree_packing(
    topology: Topology,
    collective: Collective = "all-reduce",
    nbytes: float | None = None,
    rounds: int | None = None,
    within: float = 0.045,
) -> Schedule:
    """Reduce up and broadcast down a packing of spanning trees, pipelined: time n beta / sigma for large n.

    With N trees in a period of M pieces' time on the fastest link, R rounds are (R - 1) M + 2 d steps, each of
    1 / (N R) of the time that the whole vector takes on that link, where d is about the depth of the
    trees plus M: M / N is close to 1 / sigma, and the rest vanishes as R grows. A step moves at most one
    piece over a link, and all pieces are of one size, so the bound holds with a barrier after every step
    too (where all links are equally fast).

    Args:
      topology: any connected machine of wires.
      collective: all-reduce only.
      nbytes: on each chip; chooses trees and rounds for vectors of that size. Without it they are for
        large vectors: within the bound as asked wherever a link takes longer for a piece than its latency.
      rounds: the number of rounds; the smallest that comes `within` that share of the bound if not given.
      within: 0.045 is 4.5 % above n / sigma.

    Raises:
      TopologyError: the machine is cut in parts.
      ScheduleError: the machine has switches, another collective, or numbers that make no schedule.

    Source: the packing number is the strength (Tutte 1961, Nash-Williams 1961); packings of trees for
    collectives: Blink, arXiv:1910.04940 (broadcast). Periods and mirrored times are our own.
    """
    if collective != "all-reduce":
        raise ScheduleError(f"tree-packing does not do {collective}. It does: all-reduce.")
    _check_options(nbytes, rounds, within)
    topology.check_connected()
    try:
        check_wired(topology)
    except TopologyError as error:
        raise ScheduleError(str(error)) from None
    if len(topology.chips) == 1:
        return Schedule("all-reduce", "tree-packing", topology, 1, even_bounds(1), ())
    sigma = strength(topology).value
    tried = list(_packings(topology, sigma, within, latency_counts=nbytes is not None))
    if rounds is None and nbytes is not None:
        most = [least_rounds(one, sigma, max(within, 1.5 * excess(one.beat, sigma))) for one in tried]
        sized = [_sized(one, count, nbytes) for one, count in zip(tried, most, strict=True)]
        (_, rounds, lag), best = min((size, k) for k, size in enumerate(sized))
        packing = time_trees(topology, tried[best].beat, tried[best].trees, lag)
    else:
        packing = min(tried, key=lambda one: least_rounds(one, sigma, within) * len(one.trees))
        rounds = rounds or least_rounds(packing, sigma, within)
    if rounds * len(packing.trees) > PIECES:
        raise ScheduleError(
            f"tree-packing on {topology}: {rounds} rounds of {len(packing.trees)} trees are more than {PIECES:,} "
            "pieces. Ask for fewer rounds, or come less near to the bound, such as within=0.1."
        )
    return lay_out(packing, rounds)


def _check_options(nbytes: object, rounds: object, within: object) -> None:
    number = (int, float, Fraction)
    if rounds is not None and (not isinstance(rounds, int) or rounds < 1):
        raise ScheduleError(f"tree-packing: rounds={rounds!r} is not possible. Give a whole number, 1 or more.")
    if not isinstance(within, number) or not 0 < within < math.inf:
        raise ScheduleError(f"tree-packing: within={within!r} is not possible. Give a number above 0, such as 0.045.")
    if nbytes is not None and (not isinstance(nbytes, number) or not 0 <= nbytes < math.inf):
        raise ScheduleError(f"tree-packing: nbytes={nbytes!r} is not possible. Give a number, 0 or more.")


def _packings(topology: Topology, sigma: Fraction, within: float, latency_counts: bool) -> Iterator[TreeTimetable]:
    """Packings of the few periods that look best beforehand; the shortest periods too where latency counts.

    Raises:
      ScheduleError: no period comes `within` the bound.
    """
    root, radius = center(topology.neighbours)
    cost = costs(link_weights(topology))
    beats = _likely_beats(topology, cost, sigma, radius, within)
    if not beats:
        raise ScheduleError(
            f"tree-packing on {topology}: no period of up to {PERIODS.stop - 1} pieces comes within {within:.2%} of "
            "the bound. Ask for less, such as within=0.1."
        )
    if latency_counts:
        beats += [beat for beat in _hoped(cost, sigma)[:2] if beat.trees <= weakest(topology.chips, beat.capacity)[0]]
    lag = min(cost.values()) if any(topology.latency_s[link.dim] for link in topology.links) else 0
    for beat in beats:
        trees = pack(topology.neighbours, beat.capacity, beat.trees, root)
        yield time_trees(topology, beat, trees, lag)


def _hoped(cost: dict[Edge, int], sigma: Fraction) -> list[Period]:
    """All periods, the shortest first, each with the most trees that the strength admits."""
    slot = min(cost.values())
    periods = sorted({times * one for one in set(cost.values()) for times in PERIODS})
    return [Period(ticks, cost, trees) for ticks in periods if (trees := math.floor(sigma * ticks / slot))]


def _likely_beats(
    topology: Topology, cost: dict[Edge, int], sigma: Fraction, radius: int, within: float
) -> list[Period]:
    """Up to three periods that come `within` the bound with few pieces and trees, as far as can be told beforehand."""
    chips, slot = len(topology.chips), min(cost.values())

    def price(beat: Period) -> float:
        # Trees come out about half as deep again as the machine, and the last sends wait about a period.
        spare = within - excess(beat, sigma)
        pieces = beat.trees * (5 * radius * slot + beat.ticks) / (beat.ticks * spare) if spare > 0 else math.inf
        return pieces * (1 + chips * beat.trees / EFFORT)

    found: list[tuple[float, int, Period]] = []
    hoped = sorted(((price(beat), beat.ticks, beat) for beat in _hoped(cost, sigma)), key=lambda one: one[:2])
    for least, ticks, beat in hoped:
        if least == math.inf or (len(found) == 3 and least >= found[-1][0]):
            break
        if len(set(cost.values())) > 1:  # whole slots may admit fewer than the strength, and then need more pieces
            beat = replace(beat, trees=math.floor(weakest(topology.chips, beat.capacity)[0]))
        if beat.trees and price(beat) < math.inf:
            found = sorted([*found, (price(beat), ticks, beat)], key=lambda one: one[:2])[:3]
    beats = [beat for *_, beat in found]
    effort = itertools.accumulate(chips * beat.trees for beat in beats)
    return [beat for k, (beat, spent) in enumerate(zip(beats, effort, strict=True)) if k == 0 or spent <= EFFORT]


def excess(beat: Period, sigma: Fraction) -> float:
    """By how much a period lasts longer than its pieces would need at the bound, as a share of that."""
    return float(sigma * beat.ticks / (beat.trees * beat.slot)) - 1


def least_rounds(packing: TreeTimetable, sigma: Fraction, within: float) -> int:
    """The least number of rounds whose whole length comes `within` the bound."""
    beat = packing.beat
    gain = beat.trees * beat.slot * (1 + within) / float(sigma) - beat.ticks
    return max(1, math.ceil((2 * packing.depth + packing.lag - beat.ticks) / gain))


def _sized(packing: TreeTimetable, most: int, nbytes: float) -> tuple[float, int, int]:
    """(seconds, rounds, lag): about the least time for a vector of `nbytes`, and the fewest rounds for it of `most`.

    More rounds make smaller pieces, which fill the machine sooner and on which the latency weighs more.
    """
    topology, beat = packing.topology, packing.beat
    latency_s = max(float(topology.latency_s[link.dim]) for link in topology.links)
    bytes_per_s = max(float(topology.bytes_per_s[link.dim]) for link in topology.links)
    hops = max(max(tree.depths().values()) for tree in packing.trees)
    if not nbytes:
        return 2 * hops * latency_s, 1, packing.lag

    def timing(rounds: int) -> tuple[float, int, int]:
        tick_s = float(nbytes) / (bytes_per_s * rounds * len(packing.trees) * beat.slot)
        lag = math.ceil(min(latency_s / tick_s, 2.0**20))
        depth = packing.depth + hops * (lag - packing.lag)
        return ((rounds - 1) * beat.ticks + 2 * depth + lag) * tick_s, rounds, lag

    timings = [timing(rounds) for rounds in {max(1, round(most * 2.0 ** (-k / 2))) for k in range(64)}]
    enough = 1.01 * min(timings)[0]
    return min((one for one in timings if one[0] <= enough), key=lambda one: one[1])


def costs(weights: dict[Edge, int]) -> dict[Edge, int]:
    """Ticks for a piece on each link, in small whole numbers: rounded up, by 1 % at most where 24 ticks allow that."""
    most = max(weights.values())

    def rounding(ticks: int) -> tuple[bool, float]:
        worst = max(math.ceil(Fraction(ticks * most, weight)) * weight / (ticks * most) for weight in weights.values())
        return worst > 1.01, worst if worst > 1.01 else ticks

    ticks = min(range(1, 25), key=rounding)
    return {link: math.ceil(Fraction(ticks * most, weight)) for link, weight in weights.items()}


def center(near: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    """(chip, distance): a chip in the middle, and how far its farthest chip is.

    A few sweeps: the next candidate is the chip nearest to all far ends found so far. Exact on grids.
    """
    far: list[dict[int, int]] = []
    best, candidate = (len(near), -1), min(near)
    for _ in range(8):
        distance = _distances(near, candidate)
        end = max(distance, key=distance.__getitem__)
        best = min(best, (distance[end], candidate))
        far.append(_distances(near, end))
        candidate = min(near, key=lambda chip: max(one[chip] for one in far))
    return best[1], best[0]


def _distances(near: Mapping[int, Sequence[int]], start: int) -> dict[int, int]:
    links = {start: 0}
    for chip in (reached := [start]):
        for other in near[chip]:
            if other not in links:
                links[other] = links[chip] + 1
                reached.append(other)
    return links
