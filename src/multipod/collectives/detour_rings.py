"""Rings over the chips of a grid, whole or with holes: in which order a ring algorithm visits them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, product

import numpy as np

from multipod.topology.topology import Topology

Order = tuple[tuple[int, ...], tuple[str, ...]]
"""The chips in the order of the ring, and notes on hops of more than one link."""

TURNS = 3000
"""How many exchanges of two hops `detour` tries to get rid of long hops: about 0.3 s at 1,024 chips (2 cores, 2026)."""

PATIENCE = 100
"""How many of them it tries on a ring that has as few links as can be, to make its longest hops shorter."""

LONG = 1000
"""What a link of a hop beyond its first weighs; see `_weight`."""


def is_closed(topology: Topology, dim: int) -> bool:
    """Whether the last chip along `dim` is one hop from the first."""
    return topology.wrap[dim] or topology.switched[dim] or topology.shape[dim] == 2


def fold_order(length: int) -> np.ndarray:
    """0, 2, 4, ..., 5, 3, 1: a ring over a line in which neighbours are at most two places apart."""
    return np.concatenate([np.arange(0, length, 2), np.arange(1, length, 2)[::-1]])


def cycle(topology: Topology) -> Order:
    """A ring over all chips of a whole grid with as few two-hop edges as there can be, and notes on those there are.

    One dimension is the *rails*, the others together are *layers* on a snake. The ring snakes through
    rails 1, 2, ... layer by layer, and comes home along rail 0.
    """
    kept = [d for d, n in enumerate(topology.shape) if n > 1]
    shape = [topology.shape[d] for d in kept]
    closed = [is_closed(topology, d) for d in kept]
    numbers = np.arange(topology.size).reshape(shape)
    if len(shape) == 0:
        return (0,), ()
    if len(shape) == 1:
        if closed[0]:
            return tuple(range(shape[0])), ()
        note = (
            f"a line of {shape[0]} chips has no cycle: the ring folds it, and {shape[0] - 2} of its hops take 2 links"
        )
        return tuple(fold_order(shape[0]).tolist()), (note,)
    odd = numbers.size % 2 == 1
    if odd:
        rails = closed.index(True) if any(closed) else 0
    else:
        rails = next(d for d in range(len(shape)) if numbers.size // shape[d] % 2 == 0)
    grid = np.moveaxis(numbers, rails, 0).reshape(shape[rails], -1)
    grid = grid[:, _snake([n for d, n in enumerate(shape) if d != rails])]
    if odd and not any(closed):
        ring = _odd_ring(grid)
        note = f"{numbers.size} chips on a chessboard have no cycle: the hop {ring[-1]}-{ring[0]} takes 2 links"
        return tuple(ring), (note,)
    # Even: the last layer runs back to rail 1. Odd: it ends at the last rail, which is closed to rail 0.
    there = [layer if k % 2 == 0 else layer[::-1] for k, layer in enumerate(grid[1:].T)]
    return tuple(int(chip) for chip in np.concatenate([*there, grid[0, ::-1]])), ()


def _odd_ring(grid: np.ndarray) -> list[int]:
    """A ring over an odd number of rails and of layers, both open; its closing hop is the diagonal, of two links."""
    layers = grid.shape[1]
    there = [grid[1:, k] if k % 2 == 0 else grid[:0:-1, k] for k in range(layers - 2)]
    zigzag = [
        grid[rail, [-2, -1]] if k % 2 == 0 else grid[rail, [-1, -2]]
        for k, rail in enumerate(range(len(grid) - 1, 0, -1))
    ]
    # The zigzag ends at rail 1 of the last layer but one; rail 0 of the last layer is two links away.
    return [int(chip) for chip in np.concatenate([grid[0, ::-1], *there, *zigzag])]


def _snake(shape: Sequence[int]) -> np.ndarray:
    """The row-major numbers of a grid in an order where neighbours are one link apart."""
    path = np.zeros(1, np.int64)
    for n in shape:
        # Each place met so far becomes a line of n, walked there and back in turn.
        lines = path[:, None] * n + np.arange(n)
        lines[1::2] = lines[1::2, ::-1].copy()
        path = lines.ravel()
    return path


def detour(topology: Topology) -> Order:
    """A ring over the live chips of any connected machine, with few hops of more than one link.

    A whole grid gets `cycle`. Otherwise the chips are covered by small rings, aligned 2 x 2 blocks
    first, then other squares, pairs, and single chips; and rings that lie side by side are joined, by
    exchanging a hop of each for two hops between them, until one is left. Where blocks and holes are
    aligned this walks around a spanning tree of the blocks, and every hop is one link. Joining a chip
    that has no such place makes a hop of two links; these are then moved along the ring by exchanges
    until pairs of them vanish. All four ways of laying the blocks are tried. It departs from the
    walk of Gabriely and Rimon in working on any graph.

    Joining two rings adds at most two links to the length of all, so the ring is at most three times
    as long as one over single links would be. Deterministic. At 1,024 chips it takes half a second.

    Source: Gabriely and Rimon, 2001, doi:10.1023/A:1016610507833.
    """
    if not topology.failed_chips and not topology.failed_links:
        return cycle(topology)
    if len(topology.chips) <= 3:
        return topology.chips, _long_hops(topology.chips, _distance(topology), 0)
    hops = _distance(topology)
    best: list[int] = []
    least = 0
    for rings, lacking in _tilings(topology, hops):
        ring, least = _join(topology, rings, hops), _least(topology, lacking)
        if not best or _excess(ring, hops) < _excess(best, hops):
            best = ring
        if _excess(best, hops) < LONG * (least + 1):
            break
    best = _straighten(topology, best, hops, least)
    start = best.index(topology.chips[0])
    order = tuple(best[start:] + best[:start])
    return order, _long_hops(order, hops, least)


def _distance(topology: Topology) -> Callable[[int, int], int]:
    """A function that counts the links between two live chips, by breadth-first search, remembering."""
    near = topology.neighbours

    @cache
    def found(chip: int) -> tuple[dict[int, int], Iterator[None]]:
        reached = {chip: 0}

        def search() -> Iterator[None]:
            edge = [chip]
            while edge:
                wider = []
                for here in edge:
                    for other in near[here]:
                        if other not in reached:
                            reached[other] = reached[here] + 1
                            wider.append(other)
                edge = wider
                yield

        return reached, search()

    def hops(a: int, b: int) -> int:
        reached, search = found(a)
        while b not in reached:
            next(search)
        return reached[b]

    return hops


def _tilings(topology: Topology, distance: Callable[[int, int], int]) -> Iterator[tuple[list[list[int]], int]]:
    """Covers as of `_cover`, for each way of laying the 2 x 2 blocks."""
    dims = [d for d, n in enumerate(topology.shape) if n > 1][-2:]
    place = {chip: topology.coordinates(chip) for chip in topology.chips}
    for offset in product((0, 1), repeat=len(dims)):
        at_corner = [c for c in topology.chips if all(place[c][d] % 2 == o for d, o in zip(dims, offset, strict=True))]
        yield _cover(topology, [*at_corner, *topology.chips], distance)


def _cover(
    topology: Topology, corners: Iterable[int], distance: Callable[[int, int], int]
) -> tuple[list[list[int]], int]:
    """Disjoint rings over all live chips, most of them squares whose least corner is in `corners`, in that order.

    And how many ends of hops are lacking when no more single links can be added: no ring can have them as such.
    """
    near = {chip: frozenset(others) for chip, others in topology.neighbours.items()}
    free = set(topology.chips)
    hops: dict[int, set[int]] = {chip: set() for chip in topology.chips}
    for a in corners:
        if a in free and (square := _square(a, near, free)):
            free.difference_update(square)
            for k in range(4):
                hops[square[k]] = {square[k - 1], square[(k + 1) % 4]}
    matching = _TwoMatching(topology, hops)
    matching.add_links()
    lacking = sum(matching.lacking.values())
    matching.add_long_hops()
    return _components(hops, distance), lacking


class _TwoMatching:
    """Hops that are exchanged along alternating paths until every chip has two.

    A path goes over links that are no hops and hops in turn: where it goes, the first become hops and the others none,
    so only its two ends have one more.

    Attributes:
      hops: the chips that each chip has hops to.
      black: the colour of each chip, as on a chessboard.
      near: the chips of the other colour that are one link away.
      links: the hops that are such links and may still be exchanged.
      lacking: how many hops each chip lacks; chips that have two are not in it.
    """

    def __init__(self, topology: Topology, hops: dict[int, set[int]]) -> None:
        black = {chip: sum(topology.coordinates(chip)) % 2 == 0 for chip in topology.chips}
        self.hops, self.black = hops, black
        self.near = {a: [b for b in others if black[a] != black[b]] for a, others in topology.neighbours.items()}
        self.links = {chip: set(others) for chip, others in hops.items()}
        self.lacking = {chip: 2 - len(others) for chip, others in hops.items() if len(others) < 2}

    def add_links(self) -> None:
        """Adds hops of one link, all that there can be: a maximum 2-matching of a bipartite graph."""
        for start in [chip for chip in self.lacking if self.black[chip]]:
            while start in self.lacking and (path := self._path_to_white(start)):
                self._exchange(path)
                self._give(start, path[0])

    def add_long_hops(self) -> None:
        """Joins chips of one colour two and two by hops of two links, at places that paths bring close together."""
        for start in list(self.lacking):
            while start in self.lacking and (found := self._path_to_mate(start)):
                path, mate = found
                self._exchange(path)
                self.hops[path[0]].add(mate)
                self.hops[mate].add(path[0])
                self._give(start, mate)

    def _path_to_white(self, start: int) -> list[int] | None:
        """The shortest path whose last link becomes a hop of a chip that lacks one, last chip first."""
        before: dict[int, int | None] = {start: None}
        for chip, by_hop in self._reach(start, before):
            if not by_hop and chip in self.lacking:
                return _path_back(chip, before)
        return None

    def _path_to_mate(self, start: int) -> tuple[list[int], int] | None:
        """The shortest path, last chip first, to a chip two links from one that lacks a hop, and this one."""
        before: dict[int, int | None] = {start: None}
        for chip, by_hop in self._reach(start, before):
            if by_hop and (mate := self._mate(chip, start)) is not None:
                return _path_back(chip, before), mate
        return None

    def _mate(self, chip: int, start: int) -> int | None:
        """The first chip two links from `chip`, and no hop away, that can take a hop; `start` must give one first."""
        second = {v for y in self.near[chip] for v in self.near[y]} - self.hops[chip] - {chip}
        return next((v for v in sorted(second) if self.lacking.get(v, 0) > (v == start)), None)

    def _reach(self, start: int, before: dict[int, int | None]) -> Iterator[tuple[int, bool]]:
        """The chips that paths from `start` reach, nearest first, and whether by a hop, as `start` itself is.

        `before` is told from which chip each was reached.
        """
        queue = [start]
        for x in queue:
            yield x, True
            for y in self.near[x]:
                if y in before or y in self.links[x]:
                    continue
                before[y] = x
                yield y, False
                onward = [z for z in sorted(self.links[y]) if z not in before]
                before.update(dict.fromkeys(onward, y))
                queue += onward

    def _exchange(self, path: Sequence[int]) -> None:
        for a, b in pairwise(path):
            for here, there in ((a, b), (b, a)):
                self.links[here] ^= {there}
                self.hops[here] ^= {there}

    def _give(self, *chips: int) -> None:
        """Notes that each of `chips` has one more hop."""
        for chip in chips:
            self.lacking[chip] -= 1
            if not self.lacking[chip]:
                del self.lacking[chip]


def _path_back(end: int | None, before: dict[int, int | None]) -> list[int]:
    path = []
    while end is not None:
        path.append(end)
        end = before[end]
    return path


def _components(hops: dict[int, set[int]], distance: Callable[[int, int], int]) -> list[list[int]]:
    """The rings that the hops make; a path is closed too."""
    rings, seen = [], set()
    for start in sorted(hops, key=lambda chip: (len(hops[chip]), chip)):
        ring, here = [], [start] if start not in seen else []
        while here:
            seen.add(here[0])
            ring.append(here[0])
            here = sorted(hops[here[0]] - seen)
        if ring:
            rings.append(_folded(ring, distance))
    return rings


def _folded(ring: list[int], distance: Callable[[int, int], int]) -> list[int]:
    """The path as a ring: closed, or, if that hop is longer, folded so that no hop takes more than two of its links."""
    folded = [ring[k] for k in fold_order(len(ring)).tolist()]
    return min(ring, folded, key=lambda order: _excess(order, distance))


def _square(a: int, near: dict[int, frozenset[int]], free: set[int]) -> list[int] | None:
    """A ring of four free chips of which `a` is the first, or None."""
    others = sorted(chip for chip in near[a] & free if chip > a)
    for i, b in enumerate(others):
        for d in others[i + 1 :]:
            for c in sorted((near[b] & near[d] & free) - {a}):
                return [a, b, c, d]
    return None


def _join(topology: Topology, rings: list[list[int]], hops: Callable[[int, int], int]) -> list[int]:
    """One ring out of many: joins cheapest first, where a join's cost is the links that it adds beyond one a chip.

    A ring is kept as the two neighbours in it of each chip; in a ring of two that is one twice, alone the chip itself.
    """
    beside = {ring[k]: [ring[k - 1], ring[(k + 1) % len(ring)]] for ring in rings for k in range(len(ring))}
    member = {chip: chip for chip in beside}
    for ring in rings:
        member.update(dict.fromkeys(ring, ring[0]))
    whole = {ring[0]: list(ring) for ring in rings}

    def merge(a: int, b: int) -> None:
        keep, drop = (a, b) if len(whole[a]) >= len(whole[b]) else (b, a)
        member.update(dict.fromkeys(whole[drop], keep))
        whole[keep] += whole.pop(drop)

    def join_one(u: int, most: int) -> bool:
        for v in topology.neighbours[u]:
            if member[u] == member[v]:
                continue
            for w, x in product(beside[u], beside[v]):
                if 1 + hops(w, x) - hops(u, w) - hops(v, x) <= most:
                    _replace(beside, u, w, v)
                    _replace(beside, w, u, x)
                    _replace(beside, v, x, u)
                    _replace(beside, x, v, w)
                    merge(member[u], member[v])
                    return True
        return False

    most = 0
    while len(whole) > 1:
        # By the triangle inequality a join costs 2 at most, and a connected machine always has one.
        joined = False
        for u in topology.chips:
            while join_one(u, most):
                joined = True
                if most:
                    break
            if joined and most:
                break
        most = 0 if joined else most + 1
    return _walk(beside)


def _replace(beside: dict[int, list[int]], chip: int, old: int, new: int) -> None:
    beside[chip][beside[chip].index(old)] = new


def _walk(beside: dict[int, list[int]]) -> list[int]:
    """The chips in the order in which the ring visits them."""
    start = min(beside)
    order, last, here = [start], start, beside[start][0]
    while here != start:
        order.append(here)
        a, b = beside[here]
        last, here = here, b if a == last else a
    return order


def _straighten(
    topology: Topology, ring: list[int], hops: Callable[[int, int], int], least: int, turns: int = TURNS
) -> list[int]:
    """The ring with fewer long hops, where exchanging two hops for two others finds the way.

    An exchange replaces a long hop (u, w) and a hop (b, c) by (u, b) and (w, c), where b is at most two links
    from u, and turns the stretch between around. One that gains nothing moves the long hop elsewhere, and
    is made too: long hops wander, deterministically, until two meet and vanish.
    """
    choose = random.Random(0)
    close = _within_two_links(topology)
    long = [pair for pair in zip(ring, [*ring[1:], ring[0]], strict=True) if hops(*pair) > 1]
    excess = least_excess = _excess(ring, hops)
    best, improved = list(ring), 0
    for turn in range(turns if len(ring) > 3 else 0):
        # Having reached the bound it only tries for a while to break up hops of three links and more.
        if least_excess <= LONG * least or (least_excess < LONG * (least + 1) and turn - improved > PATIENCE):
            break
        pair = choose.choice(long)
        u, w = pair if choose.random() < 0.5 else pair[::-1]  # either end of the hop may play u
        ring = _turned(ring, w, u)
        good = [(gain, k) for gain, k in _exchanges(ring, close[u], hops) if gain >= 0]
        if not good:
            continue
        gain, k = max(good, key=lambda exchange: (exchange[0], choose.random()))
        b, c = ring[k], ring[k + 1]
        long = [hop for hop in long if set(hop) not in ({u, w}, {b, c})]
        long += [hop for hop in ((u, b), (w, c)) if hops(*hop) > 1]
        ring[: k + 1] = ring[k::-1]
        excess -= gain
        if excess < least_excess:
            best, least_excess, improved = list(ring), excess, turn
    return best


def _within_two_links(topology: Topology) -> dict[int, list[int]]:
    """For each chip, the others that are one link or two away."""
    near = topology.neighbours
    return {a: sorted({a, *near[a]}.union(*(near[b] for b in near[a])) - {a}) for a in near}


def _turned(ring: list[int], first: int, last: int) -> list[int]:
    """The ring from `first` to its neighbour `last`, whichever way round that is."""
    start = ring.index(first)
    ring = ring[start:] + ring[:start]
    return ring if ring[-1] == last else ring[:1] + ring[:0:-1]


def _exchanges(ring: list[int], close: Sequence[int], hops: Callable[[int, int], int]) -> Iterator[tuple[int, int]]:
    """What is gained by exchanging the closing hop (u, w), and the place k of b, for each b in `close` to u.

    w ... b c ... u becomes b ... w c ... u: hops (u, w) and (b, c) go, (u, b) and (w, c) come.
    """
    w, u = ring[0], ring[-1]
    place = dict(zip(ring, range(len(ring)), strict=True))
    for b in close:
        k = place[b]
        if b == w or k + 1 >= len(ring) - 1:
            continue
        c = ring[k + 1]
        yield _weight(hops(u, w)) + _weight(hops(b, c)) - _weight(hops(u, b)) - _weight(hops(w, c)), k


def _weight(links: int) -> int:
    """What a hop costs: its links beyond the first, and, in a tie, many long hops rather than one very long."""
    return LONG * (links - 1) + (links - 1) * (links - 2)


def _excess(ring: Sequence[int], hops: Callable[[int, int], int]) -> int:
    """The weight of all hops of the ring: 0 where all are single links."""
    return sum(_weight(hops(ring[i - 1], ring[i])) for i in range(len(ring)))


def _least(topology: Topology, lacking: int) -> int:
    """A lower bound on the links of a ring beyond one a chip, when `lacking` ends of its hops cannot be single links.

    Links that join black to white only make the length of any ring even. 0 where they do not (odd closed
    dimensions, switches): there `lacking` proves nothing.
    """
    black = {chip: sum(topology.coordinates(chip)) % 2 for chip in topology.chips}
    if any(black[a] == black[b] for a, others in topology.neighbours.items() for b in others):
        return 0
    least = (lacking + 1) // 2
    return least + (least + len(topology.chips)) % 2


def _long_hops(order: Sequence[int], hops: Callable[[int, int], int], least: int) -> tuple[str, ...]:
    """A note that names the hops of more than one link, if there are any."""
    found = [(order[i - 1], order[i], hops(order[i - 1], order[i])) for i in range(len(order))]
    long = [hop for hop in found if hop[2] > 1]
    if not long or len(order) < 3:
        return ()
    shown = ", ".join(f"{a}-{b} ({n} links)" for a, b, n in long[:8]) + (", ..." if len(long) > 8 else "")
    why = f"; any ring of these chips takes {least} links more than chips" if least else ""
    return (f"{len(long)} of the {len(order)} hops of the ring take more than one link: {shown}{why}",)
