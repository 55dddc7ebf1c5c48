"""Rings: reduce-scatter and all-gather around cycles of chips, the part that most algorithms here are made of."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from multipod.collectives.checks import check_no_root, check_segments, check_whole, find_root, tile_peers
from multipod.collectives.detour_rings import cycle, detour
from multipod.collectives.schedule import (
    ADD,
    COPY,
    Collective,
    Schedule,
    Step,
    Steps,
    chain,
    even_bounds,
    make_step,
    side_by_side,
)
from multipod.errors import ScheduleError
from multipod.topology.topology import ChipName, Topology

Both = tuple[Sequence[Step], Sequence[Step]]
"""The reduce-scatter and the all-gather of one phase."""


def ring_steps(chips: np.ndarray, first: np.ndarray, stop: np.ndarray, both: bool = False) -> Both:
    """Reduce-scatter and all-gather around many rings of m chips at once, m - 1 steps each.

    Ring g visits `chips[g, 0]`, `chips[g, 1]`, ... and closes. After the reduce-scatter the chip at
    position i holds the sum of the ring in the pieces `first[g, i]` to `stop[g, i] - 1`; the
    all-gather spreads them again. Each hop carries one such chunk a step.

    Args:
      chips: int [rings, m].
      first: int [rings, m], or [rings, m, runs] where a chunk is several runs of pieces.
      stop: like `first`.
      both: cut each chunk in two, of equal numbers of pieces, and send the second half the other way
        round. With two chips there is no other way, so nothing is cut.
    """
    if both and chips.shape[1] > 2:
        middle = (first + stop) // 2
        there = ring_steps(chips, first, middle)
        back = ring_steps(chips[:, ::-1], middle[:, ::-1], stop[:, ::-1])
        return side_by_side([there[0], back[0]]), side_by_side([there[1], back[1]])
    length = chips.shape[1]
    first, stop = (ends if ends.ndim == 3 else ends[:, :, None] for ends in (first, stop))
    src = np.broadcast_to(chips[:, :, None], first.shape).astype(np.int32).ravel()
    dst = np.broadcast_to(np.roll(chips, -1, axis=1)[:, :, None], first.shape).astype(np.int32).ravel()

    def hop(turn: int, op: int) -> Step:
        # Position i sends the chunk of position i - turn.
        return make_step(src, dst, np.roll(first, turn, axis=1).ravel(), np.roll(stop, turn, axis=1).ravel(), op)

    # Before step t position i holds the sum over positions i - t .. i in chunk i - t - 1: it is the chunk
    # that has travelled t hops and still has m - 1 - t to go before it is at home.
    return Steps(length - 1, lambda t: hop(t + 1, ADD)), Steps(length - 1, lambda t: hop(t, COPY))


def assemble(collective: Collective, phases: Sequence[Both]) -> Steps:
    """The steps of `collective` from phases in the order of the reduce-scatter; the all-gather goes them backwards."""
    scatters = [scatter for scatter, _ in phases]
    gathers = [gather for _, gather in reversed(phases)]
    if collective == "reduce-scatter":
        return chain(scatters)
    if collective == "all-gather":
        return chain(gathers)
    return chain(scatters + gathers)


def ring(
    topology: Topology,
    collective: Collective = "all-reduce",
    *,
    along: Literal["ranks", "cycle"] = "ranks",
    tile: Sequence[int] = (),
    root: ChipName | None = None,
    segments: int = 16,
) -> Schedule:
    """One ring over the live chips, one way round.

    All-reduce takes `2 (p - 1)` steps and `2 (p - 1) alpha + 2 (p - 1)/p n beta` where every hop is one
    link; reduce-scatter and all-gather half of each. Each chip sends `2 (p - 1)/p` of the vector, the
    least that any all-reduce can. Broadcast is a pipeline along the ring, `p - 2 + segments` steps of
    `alpha + n beta / segments`. Works on any connected machine.

    Args:
      topology: the machine.
      collective: any.
      along: "ranks" visits the chips in order of their number, so that on a mesh some hops and the
        closing one take several links; "cycle" visits them as `bidirectional-ring` does (or
        `detour-ring`, with failures).
      tile: (all-reduce) the shape of a model-parallel tile: one ring for each place in it, skipping the
        chips at other places.
      root: (broadcast) the chip that has the vector; the first live one if None.
      segments: (broadcast) how many pieces the vector is sent in.

    Source: Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002.

    Raises:
      ScheduleError: an option that does not fit.
    """
    if along not in ("ranks", "cycle"):
        raise ScheduleError(f"ring: along={along!r} is no order. Give 'ranks' or 'cycle'.")
    if along == "cycle" and tile:
        raise ScheduleError("ring: along='cycle' visits every chip, so no tile can be skipped. Leave one of them out.")
    order, notes = detour(topology) if along == "cycle" else (topology.chips, ())
    if collective == "broadcast":
        return _pipeline(topology, order, root, segments, notes)
    check_no_root("ring", collective, root)
    groups = tile_peers("ring", topology, collective, tile)
    if len(groups) == 1:
        groups = (tuple(order),)
    denominator, bounds = cut_bounds([len(group) for group in groups])
    phases = []
    for group in groups:
        # Where the group's own k-th part begins among the pieces, by rank within the group.
        ends = np.searchsorted(bounds * len(group), np.arange(len(group) + 1) * denominator)
        home = np.argsort(np.argsort(group))[None]
        phases.append(ring_steps(np.asarray(group)[None], ends[home], ends[home + 1]))
    together = [side_by_side([phase[half] for phase in phases]) for half in (0, 1)]
    steps = assemble(collective, [(together[0], together[1])])
    return Schedule(collective, "ring", topology, denominator, bounds, steps, tuple(tile), notes)


def bidirectional_ring(topology: Topology, collective: Collective = "all-reduce") -> Schedule:
    """Both ways at once around a Hamiltonian cycle of the whole mesh, half of every part each way.

    All-reduce takes `2 (p - 1)` steps and `2 (p - 1) alpha + (p - 1)/p n beta`; reduce-scatter and
    all-gather half of each. There is a cycle of single links when the number of chips is even or a
    dimension is closed, and there are two dimensions at least; else the ring has two-hop edges, and
    the notes say so.

    Source: the cycle is the boustrophedon of any textbook; the ring is that of Patarasuk and Yuan,
    2009, doi:10.1016/j.jpdc.2008.09.002.

    Raises:
      ScheduleError: chips have failed.
    """
    notes = check_whole("bidirectional-ring", topology)
    order, more = cycle(topology)
    return schedule_both_ways("bidirectional-ring", topology, collective, order, notes + more)


def detour_ring(topology: Topology, collective: Collective = "all-reduce") -> Schedule:
    """Both ways at once around a ring over whatever chips and links live, half of every part each way.

    With p live chips all-reduce takes `2 (p - 1)` steps and, where the ring is of single links,
    `2 (p - 1) alpha + (p - 1)/p n beta`; reduce-scatter and all-gather half of each. The ring is of
    single links around any holes made of aligned 2 x 2 blocks that leave the mesh of blocks connected,
    and mostly around others. A chip that fits into no cycle, as always some where one chip of a board
    has failed, is entered by a hop of two links: its board need not retire, and the notes name the
    hop. A link that a long hop shares with others is busier by as much. Works on any connected machine.

    Source: the walk around a spanning tree of 2 x 2 blocks is that of Gabriely and Rimon, 2001,
    doi:10.1023/A:1016610507833; see `detour_rings.detour` for where we depart from it.
    """
    order, notes = detour(topology)
    return schedule_both_ways("detour-ring", topology, collective, order, notes)


def schedule_both_ways(
    name: str, topology: Topology, collective: Collective, order: Sequence[int], notes: tuple[str, ...]
) -> Schedule:
    """The schedule that goes both ways at once around the ring `order` of all live chips."""
    p = len(order)
    home = 2 * np.array([[topology.rank[chip] for chip in order]])
    steps = assemble(collective, [ring_steps(np.array([order]), home, home + 2, both=True)])
    return Schedule(collective, name, topology, 2 * p, even_bounds(2 * p), steps, notes=notes)


def cut_bounds(sizes: Sequence[int]) -> tuple[int, np.ndarray]:
    """Denominator and bounds of the pieces for groups that cut the vector in `sizes` equal parts each.

    Where the common denominator would not fit, parts are cut on a grid of 64 pieces to the smallest part.
    """
    common = math.lcm(*sizes)
    if common < 2**40:
        ends = np.unique(np.concatenate([np.arange(n + 1, dtype=np.int64) * (common // n) for n in set(sizes)]))
        return common, ends
    return 64 * max(sizes), even_bounds(64 * max(sizes))


def _pipeline(
    topology: Topology, order: Sequence[int], root: ChipName | None, segments: int, notes: tuple[str, ...]
) -> Schedule:
    check_segments("ring", segments)
    start = list(order).index(find_root("ring", topology, root))
    path = np.roll(np.asarray(order), -start)
    hops = len(path) - 1

    def make(t: int) -> Step:
        # The hop at position i carries piece t - i.
        i = np.arange(max(0, t - segments + 1), min(hops, t + 1))
        return make_step(path[i], path[i + 1], t - i, op=COPY)

    steps = Steps(hops + segments - 1 if hops else 0, make)
    return Schedule("broadcast", "ring", topology, segments, even_bounds(segments), steps, notes=notes)
