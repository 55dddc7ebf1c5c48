"""Algorithms that go one dimension, tier or power of two after the other."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from multipod.collectives.checks import check_whole, tile_peers
from multipod.collectives.detour_rings import fold_order, is_closed
from multipod.collectives.rings import Both, assemble, ring_steps
from multipod.collectives.schedule import (
    ADD,
    COPY,
    Collective,
    Schedule,
    Step,
    chain,
    even_bounds,
    make_step,
    side_by_side,
)
from multipod.errors import ScheduleError
from multipod.topology.topology import Number, Topology

Lane = tuple[np.ndarray, bool]
"""Of a dimension: the order in which its rings visit the places, and whether they go both ways at once."""


def sweep(
    grid: np.ndarray,
    order: Sequence[int],
    strides: Sequence[int],
    lanes: Sequence[Lane],
    *,
    base: int = 0,
    width: int = 1,
) -> list[Both]:
    """The phases of a reduce-scatter over a grid, one dimension after the other; each a `Both`.

    The chip at place x of the grid ends with the `width` pieces from `base + sum(x[d] * strides[d])`.

    Args:
      grid: int [copies, sizes...]: chip numbers; the copies work at once, each for itself.
      order: dimensions, the first phase's first. A message is one run of pieces if strides fall in this order.
      strides: for each dimension, the pieces from one place's to the next's.
      lanes: for each dimension.
      base: the first piece.
      width: pieces that belong to a place; even if a lane goes both ways.
    """
    sizes = grid.shape[1:]
    place = np.indices(sizes)
    fixed = np.full(sizes, base)
    phases, left = [], list(order)
    for d in order:
        left.remove(d)
        offsets, run = _runs([(strides[e], sizes[e]) for e in left], width)
        fixed = fixed + place[d] * strides[d]
        visits, both = lanes[d]
        chips = np.moveaxis(grid, d + 1, -1)[..., visits].reshape(-1, sizes[d])
        first = np.moveaxis(np.broadcast_to(fixed, grid.shape), d + 1, -1)[..., visits].reshape(-1, sizes[d])
        first = first[:, :, None] + offsets
        phases.append(ring_steps(chips, first, first + run, both))
    return phases


def _runs(dims: Sequence[tuple[int, int]], run: int) -> tuple[np.ndarray, int]:
    """Where the runs of pieces of all places of `dims` (stride, size) begin, and how long each run is."""
    offsets = np.zeros(1, np.int64)
    for stride, size in sorted(dims):
        if len(offsets) == 1 and stride == run:
            run *= size
        else:
            offsets = (np.arange(size)[:, None] * stride + offsets).ravel()
    return offsets, run


def _strides(sizes: Sequence[int], order: Sequence[int], unit: int) -> list[int]:
    """Strides that number the places with the first of `order` the most significant digit."""
    strides = [unit] * len(sizes)
    for d in reversed(order):
        strides[d] = unit
        unit *= sizes[d]
    return strides


def _tiled(topology: Topology, tile: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """The chips as [places in the tile, tiles along kept dimensions...]; kept are those of more than one tile."""
    tile = tuple(tile) or (1,) * len(topology.shape)
    counts = [n // t for n, t in zip(topology.shape, tile, strict=True)]
    kept = [d for d, count in enumerate(counts) if count > 1]
    grid = np.arange(topology.size).reshape([n for pair in zip(counts, tile, strict=True) for n in pair])
    grid = np.moveaxis(grid, [2 * d + 1 for d in range(len(tile))], range(len(tile)))
    return grid.reshape(math.prod(tile), *(counts[d] for d in kept)), kept


def _lane(topology: Topology, dim: int, size: int, folded: bool) -> Lane:
    """Closed dimensions go round, wired ones both ways; open ones are folded, or closed by a long hop."""
    visits = fold_order(size) if folded and not is_closed(topology, dim) else np.arange(size)
    return visits, topology.wrap[dim] and size > 2


def torus_2d(
    topology: Topology, collective: Collective = "all-reduce", *, tile: Sequence[int] = (), folded: bool = True
) -> Schedule:
    """Reduce-scatter along one dimension after the other, closed and fast ones first; all-gather back.

    All-reduce takes `2 sum(d - 1)` steps over the dimensions d, and for dimensions in their order
    `2 sum((d - 1) (alpha + w n beta / (d * dimensions before)))`, where w is 1/2 on closed
    dimensions, which go both ways at once with half of every chunk, and 1 on open ones. On a whole
    32 x 128 multipod the long dimension carries 1/32 of the vector only. Reduce-scatter and
    all-gather take half, and go through the dimensions in row-major order, so that a chip's part
    is one run of the vector. Any number of dimensions; every chip must live.

    Args:
      topology: the machine.
      collective: all-reduce, reduce-scatter or all-gather.
      tile: (all-reduce) the shape of a model-parallel tile: rings skip the chips at other places of it.
      folded: visit an open dimension as 0, 2, 4, ..., 5, 3, 1, so that no hop takes more than two
        (tile) places; else in order, closed by one long hop. The loads of the links are the same.

    Source: Kumar et al., 2020, arXiv:2011.03641; Ying et al., 2018, arXiv:1811.06992.

    Raises:
      ScheduleError: chips have failed, or the tile does not fit.
    """
    notes = check_whole("torus-2d", topology)
    tile_peers("torus-2d", topology, collective, tile)
    grid, kept = _tiled(topology, tile)
    sizes = grid.shape[1:]
    lanes = [_lane(topology, d, n, folded) for d, n in zip(kept, sizes, strict=True)]
    order = list(range(len(kept)))
    if collective == "all-reduce":
        order.sort(key=lambda k: (not lanes[k][1], -topology.bytes_per_s[kept[k]], k))
    unit = 2 if any(both for _, both in lanes) else 1
    steps = assemble(collective, sweep(grid, order, _strides(sizes, order, unit), lanes, width=unit))
    pieces = unit * math.prod(sizes)
    return Schedule(collective, "torus-2d", topology, pieces, even_bounds(pieces), steps, tuple(tile), notes)


def row_column(
    topology: Topology,
    collective: Collective = "all-reduce",
    *,
    shares: Sequence[Number] = (),
    folded: bool = True,
    tile: Sequence[int] = (),
) -> Schedule:
    """Two halves of the vector at once, one along rows first, the other along columns first.

    On k dimensions, k slices, each beginning with another dimension (the first slice with the last). A phase
    begins when that before has ended for all slices, so all-reduce takes `2 k (max(d) - 1)` steps. On
    a square mesh `4 (r - 1) alpha + (p - 1)/p n beta`: like the bidirectional ring, in many fewer steps. On
    dimensions that differ the longer one holds up the shorter, unless shares differ too. On a torus
    rings go both ways at once, and `n beta` is halved. Every chip must live.

    Args:
      topology: the machine.
      collective: all-reduce.
      shares: of the vector, for each slice; in any unit; equal if not given.
      folded: as in `torus_2d`.
      tile: as in `torus_2d`.

    Source: Kumar et al., 2019, arXiv:1909.09756.

    Raises:
      ScheduleError: chips have failed, or an option does not fit.
    """
    notes = check_whole("row-column", topology)
    tile_peers("row-column", topology, collective, tile)
    grid, kept = _tiled(topology, tile)
    sizes, colours = grid.shape[1:], max(1, len(kept))
    parts = [Fraction(share) for share in shares or (1,) * colours]
    if len(parts) != colours or any(part <= 0 for part in parts):
        raise ScheduleError(
            f"row-column: shares={tuple(shares)} does not fit {topology}. Give {colours} numbers above 0, one a slice."
        )
    lanes = [_lane(topology, d, n, folded) for d, n in zip(kept, sizes, strict=True)]
    unit = 2 if any(both for _, both in lanes) else 1
    pieces = unit * math.prod(sizes)
    # Rows first is the slice whose first dimension is the last one.
    orders = [[(j - 1 + k) % colours for k in range(len(kept))] for j in range(colours)]
    slices = [
        sweep(grid, order, _strides(sizes, order, unit), lanes, base=j * pieces, width=unit)
        for j, order in enumerate(orders)
    ]
    phases = [
        (side_by_side([scatter for scatter, _ in together]), side_by_side([gather for _, gather in together]))
        for together in zip(*slices, strict=True)
    ]
    scale = math.lcm(*(part.denominator for part in parts))
    widths = np.repeat([int(part * scale) for part in parts], pieces)
    bounds = np.concatenate([[0], np.cumsum(widths)])
    steps = assemble(collective, phases)
    return Schedule(collective, "row-column", topology, int(bounds[-1]), bounds, steps, tuple(tile), notes)


def row_pairs(topology: Topology, collective: Collective = "all-reduce", *, folded: bool = True) -> Schedule:
    """Reduce-scatter around pairs of rows both ways at once, then along the columns over the pairs; all-gather back.

    On r rows (an even number; else the columns are paired) of c chips all-reduce takes
    `2 ((2c - 1) + (r/2 - 1))` steps, and `2 ((2c - 1)/(4c) + (r - 2)/(rc)) n beta` beside the latencies:
    hops of one link in the pairs, and of two to four in the columns (two to r - 2 if not folded).
    Every chip must live; two dimensions at most.

    Args:
      topology: the machine.
      collective: all-reduce.
      folded: visit the pairs of an open column as 0, 2, 4, ..., 5, 3, 1; else in order, closed by one long hop.

    Source: the fault-free scheme of Kumar and Jouppi, 2020, arXiv:2011.03605.

    Raises:
      ScheduleError: chips have failed, both sizes are odd, or there are three dimensions.
    """
    notes = check_whole("row-pairs", topology)
    kept = [d for d, n in enumerate(topology.shape) if n > 1]
    even_dims = [d for d in kept if topology.shape[d] % 2 == 0]
    if len(kept) > 2 or (kept and not even_dims):
        raise ScheduleError(
            f"row-pairs needs one or two dimensions, one of them even, and {topology} is {topology.shape}. "
            "Use torus-2d, row-column or bidirectional-ring."
        )
    if not kept:
        return Schedule(collective, "row-pairs", topology, 1, even_bounds(1), chain([]), notes=notes)
    down = even_dims[0]
    grid = np.moveaxis(np.arange(topology.size).reshape(topology.shape), down, 0).reshape(topology.shape[down], -1)
    rows, columns = grid.shape
    pairs = np.concatenate([grid[0::2], grid[1::2, ::-1]], axis=1)
    # The chunk of position i in a pair is the pieces from rows * i; that of pair q in it, the two from 2 q.
    start = np.broadcast_to(np.arange(2 * columns) * rows, pairs.shape)
    visits, _ = _lane(topology, down, rows // 2, folded)
    mine = start.T[:, visits] + 2 * visits
    phases = [ring_steps(pairs, start, start + rows, both=True), ring_steps(pairs.T[:, visits], mine, mine + 2)]
    pieces = 2 * columns * rows
    return Schedule(
        collective, "row-pairs", topology, pieces, even_bounds(pieces), assemble(collective, phases), notes=notes
    )


def multi_ring(
    topology: Topology, collective: Collective = "all-reduce", *, tiers: Sequence[int] = (), rings: int = 1
) -> Schedule:
    """Reduce-scatter around rings in each tier, fastest tier first; all-gather back.

    With tiers d1 x d2 x ..., chips that differ only in digit i of their rank form rings of di (digit 1
    changes fastest). All-reduce takes `2 sum(di - 1)` steps and
    `sum_i 2 (di - 1) (alpha_i + s_i n beta_i / (d1 ... di))`, where s_i chips share a link of tier i; every
    chip sends `2 (p - 1)/p` of the vector. Any number of rings at once, on slices of the vector: each
    takes the tiers in another order, and later ones the other way round, so that all kinds of links are busy
    at all times. One tier is a flat ring. In reduce-scatter and all-gather, half as long, a message of an
    inner tier is p / (d1 ... di) runs of the vector.

    Args:
      topology: the machine; chips may have failed.
      collective: all-reduce, reduce-scatter or all-gather.
      tiers: sizes, fastest (innermost) first; the sizes of the machine's dimensions, last first, if not given.
      rings: how many at once, on equal slices of the vector.

    Source: Cho et al., 2017, arXiv:1708.02188 (PowerAI DDL).

    Raises:
      ScheduleError: tiers that do not multiply to the number of live chips.
    """
    p = len(topology.chips)
    sizes = tuple(tiers) or tuple(n for n in reversed(topology.shape) if n > 1)
    if not all(isinstance(n, int) and n > 0 for n in sizes) or math.prod(sizes) != p:
        given = f"tiers={sizes}" if tiers else f"tiers={sizes}, the machine's sizes,"
        raise ScheduleError(
            f"multi-ring: {given} multiply to {math.prod(sizes)}, and {topology} has {p} live chips. "
            f"Give tiers that multiply to {p}, fastest first; {_factors(p)} do."
        )
    if not isinstance(rings, int) or rings < 1:
        raise ScheduleError(f"multi-ring: rings={rings} is no number of rings. Give a whole number of 1 or more.")
    # Digit 1 changes fastest, so it is the last axis of the grid.
    sizes = sizes[::-1]
    inner_first = list(reversed(range(len(sizes))))
    grid = np.asarray(topology.chips).reshape(1, *sizes)
    slices = []
    for k in range(rings):
        turn, back = k % max(1, len(sizes)), k // max(1, len(sizes)) % 2
        order = inner_first[turn:] + inner_first[:turn]
        lanes: list[Lane] = [(np.arange(n)[:: -1 if back else 1], False) for n in sizes]
        if collective == "all-reduce":
            slices.append(sweep(grid, order, _strides(sizes, order, 1), lanes, base=k * p))
        else:
            # Every chip's part has a piece for each slice.
            slices.append(sweep(grid, order, _strides(sizes, range(len(sizes)), rings), lanes, base=k))
    steps = side_by_side([assemble(collective, phases) for phases in slices])
    return Schedule(collective, "multi-ring", topology, p * rings, even_bounds(p * rings), steps)


def _factors(p: int) -> str:
    """The prime factors of p, or (p,), as tiers for a message."""
    factors, left, n = [], p, 2
    while n * n <= left:
        while left % n == 0:
            factors.append(n)
            left //= n
        n += 1
    return str(tuple([*factors, left] if left > 1 or not factors else factors))


def halving_doubling(topology: Topology, collective: Collective = "all-reduce") -> Schedule:
    """Exchange halves with partners at distances of powers of two, and back.

    All-reduce takes `2 log2(p)` steps and `2 log2(p) alpha + 2 (p - 1)/p n beta` where no two messages
    share a link, as on a switch; on a mesh, partners of the largest messages are next to each other.
    Reduce-scatter and all-gather take half, with the largest messages going farthest. When p is not
    a power of two, `p - 2^floor(log2 p)` chips first give all they have to a neighbour and get the
    result from it at the end: two steps and `2 n beta` more for all-reduce. Works on any connected machine.

    Source: Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521.
    """
    chips = np.asarray(topology.chips)
    p = len(chips)
    bits = p.bit_length() - 1
    q = 1 << bits
    extra = p - q
    # Worker v stands for chips 2v and 2v + 1 as long as there are extra ones, then for one chip each.
    workers = np.concatenate([chips[1 : 2 * extra : 2], chips[2 * extra :]])
    idle, helper = chips[0 : 2 * extra : 2], chips[1 : 2 * extra : 2]
    v = np.arange(q)
    if collective == "all-reduce":
        # Next chips first; the bit that is settled first is the highest of a worker's block number.
        block = sum((((v >> k) & 1) << (bits - 1 - k) for k in range(bits)), np.zeros_like(v))
        pieces, ends, partner_bits = q, np.arange(q + 1), range(bits)
    else:
        block, pieces, partner_bits = v, p, range(bits - 1, -1, -1)
        ends = np.append(np.where(v < extra, 2 * v, v + extra), p)
    halving, doubling = [], []
    for k, bit in enumerate(partner_bits):
        half = q >> (k + 1)
        partner = v ^ (1 << bit)
        mine, theirs = block // half * half, block[partner] // half * half
        halving.append(make_step(workers, workers[partner], ends[theirs], ends[theirs + half], ADD))
        doubling.append(make_step(workers, workers[partner], ends[mine], ends[mine + half], COPY))
    steps: list[Step] = []
    own = 2 * np.arange(extra)  # reduce-scatter and all-gather: the idle chips' own parts
    if collective != "all-gather":
        steps += [make_step(idle, helper, 0, pieces, ADD)] if extra else []
        steps += halving
        if extra and collective == "reduce-scatter":
            steps.append(make_step(helper, idle, own, own + 1, COPY))
    if collective != "reduce-scatter":
        if extra and collective == "all-gather":
            steps.append(make_step(idle, helper, own, own + 1, COPY))
        steps += doubling[::-1]
        steps += [make_step(helper, idle, 0, pieces, COPY)] if extra else []
    return Schedule(collective, "halving-doubling", topology, pieces, even_bounds(pieces), tuple(steps))
