"""Two binary trees at once, so arranged that a chip which is busy in one is a leaf of the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from multipod.collectives.checks import check_no_root, check_segments, find_root
from multipod.collectives.schedule import ADD, COPY, Collective, Schedule, Step, Steps, even_bounds, make_step
from multipod.topology.topology import ChipName, Topology

Tree = Mapping[int, int]
"""The parent of each place; the place that has none is the root."""
Edge = tuple[int, int]
"""An edge by its tree (0 or 1) and its lower end."""


def double_tree(
    topology: Topology, collective: Collective = "all-reduce", *, segments: int = 16, root: ChipName | None = None
) -> Schedule:
    """Reduce up and broadcast down two binary trees, each on half of the vector, in pipelined segments.

    Every chip has children in one of the trees at most, and in no step gets, or gives, more than one message on
    the way up, or more than one on the way down. With h about `log2(p)` the height, all-reduce takes at most
    `2 segments + 4 h + 2` steps of `alpha + n beta / (2 segments)` where links are not shared and a chip
    sends two messages at once, one up, one down: `n beta` for large vectors; twice that where it
    sends one at a time. Broadcast takes at most `2 segments + 2 h + 2` steps, `n beta`. Works on any connected machine;
    on a mesh many hops are longer than one link.

    Args:
      topology: the machine.
      collective: all-reduce or broadcast.
      segments: how many pieces each tree's half is cut in.
      root: (broadcast) the chip that has the vector; the first live one if None.

    Source: Sanders, Speck and Traff, 2009, doi:10.1016/j.parco.2009.09.001. The colouring of edges is
    theirs; we let the way down begin as soon as a segment has come up.

    Raises:
      ScheduleError: an option that does not fit.
    """
    check_segments("double-tree", segments)
    if collective == "broadcast":
        start = find_root("double-tree", topology, root)
        others = [chip for chip in topology.chips if chip != start]
        # The root stands above both trees of the others.
        places, top = [*others, start], len(others)
    else:
        check_no_root("double-tree", collective, root)
        places, top = list(topology.chips), None
    trees = two_trees(len(places) - (top is not None))
    if top is not None and top > 0:
        one, two = trees
        trees = {**one, _root(one, top): top}, {**two, _root(two, top): top}
    if len(places) == 1:
        trees = ({}, {})
    plan = _plan(trees, collective == "all-reduce")
    chips = np.asarray(places)
    src, dst, base = chips[plan.src], chips[plan.dst], plan.tree * segments

    def make(t: int) -> Step:
        # A hop that first fires at step s carries segment k at step s + 2 k.
        segment, idle = np.divmod(t - plan.start, 2)
        now = (idle == 0) & (segment >= 0) & (segment < segments)
        return make_step(src[now], dst[now], (base + segment)[now], op=plan.op[now])

    count = int(plan.start.max()) + 2 * (segments - 1) + 1 if len(plan.start) else 0
    pieces = 2 * segments
    return Schedule(collective, "double-tree", topology, pieces, even_bounds(pieces), Steps(count, make))


def two_trees(places: int) -> tuple[Tree, Tree]:
    """Two binary trees over 0, 1, ..., `places` - 1 in which no place has children in both; of height about log2.

    Numbered from the left, leaves of the first are the even places. The second is its mirror image if the
    number is even, so that its leaves are the odd places, and else the first shifted by one place.
    """
    first = _grow(places)

    def other(place: int) -> int:
        return places - 1 - place if places % 2 == 0 else (place + 1) % places

    return first, {other(child): other(parent) for child, parent in first.items()}


def _grow(places: int) -> dict[int, int]:
    parent: dict[int, int] = {}

    def grow(low: int, high: int) -> int:
        """The root of a tree over the places low to high - 1, low even, whose leaves are its even places."""
        size = high - low
        if size <= 2:
            if size == 2:
                parent[low] = low + 1
            return high - 1
        left = size // 2 - (size // 2 + 1) % 2  # odd, so that the root is at an odd place
        root = low + left
        parent[grow(low, root)] = root
        parent[grow(root + 1, high)] = root
        return root

    if places:
        grow(0, places)
    return parent


def _root(tree: Tree, places: int) -> int:
    return next(place for place in range(places) if place not in tree)


@dataclass(frozen=True)
class _Plan:
    """Hops of both trees, as arrays of one length: who sends to whom, in which tree, from which step, and what for."""

    src: np.ndarray
    dst: np.ndarray
    tree: np.ndarray
    start: np.ndarray
    op: np.ndarray


def _plan(trees: Sequence[Tree], reduce: bool) -> _Plan:
    """When each hop first fires: as early as its colour, and what it waits for, allow."""
    colour = _colours(trees)
    rows: list[tuple[int, int, int, int, int]] = []
    for number, tree in enumerate(trees):
        children: dict[int, list[int]] = {}
        for child, parent in tree.items():
            children.setdefault(parent, []).append(child)
        roots = [place for place in children if place not in tree]
        from_top = list(roots)
        for place in from_top:
            from_top += children.get(place, [])
        ready = dict.fromkeys(from_top, 0)  # the first step at which a place may send what it has gathered

        def fire(number: int, child: int, since: int) -> int:
            return since + (since + colour[number, child]) % 2

        if reduce:
            for place in reversed(from_top):
                if place in tree:
                    start = fire(number, place, ready[place])
                    rows.append((place, tree[place], number, start, ADD))
                    ready[tree[place]] = max(ready[tree[place]], start + 1)
        for place in from_top:
            if place in tree:
                start = fire(number, place, ready[tree[place]])
                rows.append((tree[place], place, number, start, COPY))
                ready[place] = start + 1
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return _Plan(*columns)


def _colours(trees: Sequence[Tree]) -> dict[Edge, int]:
    """0 or 1 for each edge: edges to a place's parents differ, and so do those to its children.

    An edge has one partner at most at either end, and partners of the two kinds take turns, so they
    form paths and even cycles, and two colours do.
    """
    below: dict[int, list[Edge]] = {}
    for number, tree in enumerate(trees):
        for child, parent in tree.items():
            below.setdefault(parent, []).append((number, child))
    partners: dict[Edge, list[Edge]] = {(number, child): [] for number, tree in enumerate(trees) for child in tree}
    for edge in partners:
        twin = (1 - edge[0], edge[1])
        if twin in partners:
            partners[edge].append(twin)
    for pair in below.values():
        if len(pair) == 2:
            partners[pair[0]].append(pair[1])
            partners[pair[1]].append(pair[0])
    colour: dict[Edge, int] = {}
    for edge in partners:
        stack = [(edge, 0)] if edge not in colour else []
        while stack:
            here, shade = stack.pop()
            if here not in colour:
                colour[here] = shade
                stack += [(other, 1 - shade) for other in partners[here]]
    return colour
