"""Packs spanning trees: as many as the links' capacities allow, and shallow ones.

Three passes, each a function: trees grown one by one along the links used least (`_light_tree`);
exchanges that relieve the links used too often (`relieve`); exchanges that make deep trees shallower
(`flatten`). All of it is plain combinatorics on chips and links; times and pieces come in
`tree_packing.py`.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Edge = tuple[int, int]


def edge(a: int, b: int) -> Edge:
    """The link between two chips, the smaller number first."""
    return (a, b) if a < b else (b, a)


@dataclass
class Tree:
    """A spanning tree that is being built or changed: the parent of every chip but the root."""

    root: int
    parent: dict[int, int] = field(default_factory=dict)
    children: dict[int, set[int]] = field(default_factory=dict)

    def attach(self, chip: int, parent: int) -> None:
        """Hangs `chip`, with all below it, under `parent`."""
        self.parent[chip] = parent
        self.children.setdefault(parent, set()).add(chip)

    def edges(self) -> Iterator[Edge]:
        """The tree's links."""
        return (edge(chip, parent) for chip, parent in self.parent.items())

    def has(self, link: Edge) -> bool:
        """Whether the tree uses `link`."""
        a, b = link
        return self.parent.get(a) == b or self.parent.get(b) == a

    def below(self, chip: int) -> list[int]:
        """`chip` and all chips below it, from the top."""
        found = [chip]
        for one in found:
            found += self.children.get(one, ())
        return found

    def is_below(self, chip: int, top: int) -> bool:
        """Whether `top` is `chip` or above it."""
        while chip not in (top, self.root):
            chip = self.parent[chip]
        return chip == top

    def depths(self) -> dict[int, int]:
        """Links between each chip and the root."""
        links = {self.root: 0}
        for chip in (below := [self.root]):
            for child in self.children.get(chip, ()):
                links[child] = links[chip] + 1
                below.append(child)
        return links

    def heights(self) -> dict[int, int]:
        """Links between each chip and the farthest chip below it."""
        links: dict[int, int] = {}
        for chip in reversed(self.below(self.root)):
            links[chip] = max((links[child] + 1 for child in self.children.get(chip, ())), default=0)
        return links

    def part_below(self, link: Edge) -> set[int]:
        """The part that does not hold the root when `link` is taken away."""
        return set(self.below(link[0] if self.parent.get(link[0]) == link[1] else link[1]))

    def exchange(self, out: Edge, new: Edge) -> bool:
        """Replaces the link `out` by `new`; False, and nothing is changed, if that would be no spanning tree."""
        if not self.has(out):
            return False
        below = self.part_below(out)
        if (new[0] in below) == (new[1] in below):
            return False
        top = out[0] if out[0] in below else out[1]
        chip, parent = new if new[0] in below else new[::-1]
        while True:  # turn the way from the new link up to the old one around
            above = self.parent[chip]
            self.children[above].discard(chip)
            self.attach(chip, parent)
            if chip == top:
                return True
            chip, parent = above, chip


def pack(near: Mapping[int, Sequence[int]], capacity: Mapping[Edge, int], count: int, root: int) -> list[Tree]:
    """`count` spanning trees that together use each link at most `capacity` times.

    Greedily first: each tree is a minimum spanning tree by the load so far, and among those a shallow one.
    That leaves a few links overloaded, which are then relieved by exchanges, along shortest chains as
    in matroid union. If the strength of the graph with these capacities is at least `count`, such
    trees exist (Tutte 1961, Nash-Williams 1961) and are found.

    Args:
      near: the neighbours of each chip.
      capacity: of each link, the smaller number first.
      count: trees wanted.
      root: of all trees; one in the middle keeps them shallow.

    Raises:
      ValueError: the capacities do not admit `count` trees.
    """
    load = dict.fromkeys(capacity, 0)
    trees = []
    for k in range(count):
        due = {link: (k + 1) * most / count for link, most in capacity.items()}
        trees.append(_light_tree(near, root, load, due))
        for link in trees[-1].edges():
            load[link] += 1
    relieve(trees, capacity)
    flatten(trees, near, capacity)
    return trees


def loads(trees: Iterable[Tree], capacity: Mapping[Edge, int]) -> dict[Edge, int]:
    """How many of the trees use each link."""
    load = dict.fromkeys(capacity, 0)
    for tree in trees:
        for link in tree.edges():
            load[link] += 1
    return load


def _light_tree(near: Mapping[int, Sequence[int]], root: int, load: dict[Edge, int], due: dict[Edge, float]) -> Tree:
    """The spanning tree of the links that are furthest behind their due load; of equal ones, the nearest the root."""
    tree = Tree(root)
    number = itertools.count()
    heap: list[tuple[int, int, int, int, int]] = []

    def offer(chip: int, depth: int) -> None:
        for other in near[chip]:
            if other not in tree.parent and other != root:
                link = edge(chip, other)
                over = max(0, load[link] + 1 - math.ceil(due[link]))
                heapq.heappush(heap, (over, depth, next(number), chip, other))

    offer(root, 1)
    while heap:
        _, depth, _, chip, other = heapq.heappop(heap)
        if other not in tree.parent:
            tree.attach(other, chip)
            offer(other, depth + 1)
    return tree


def relieve(trees: Sequence[Tree], capacity: Mapping[Edge, int]) -> None:
    """Exchanges links of the trees, in place, until none is used more than its capacity.

    Raises:
      ValueError: the capacities do not admit so many trees.
    """
    load = loads(trees, capacity)
    while over := [link for link, used in load.items() if used > capacity[link]]:
        givers = _givers(trees, load, capacity, set(over))
        if not any(link in givers for link in over):
            raise ValueError(f"{len(trees)} trees do not fit the capacities")
        for link in over:
            out: Edge | None = link
            while out in givers and load[out] > capacity[out]:
                tree, new = givers[out]
                # One chain may spoil another in the same tree. The trees stay whole; what has not been
                # relieved yet starts again in the next pass.
                if not tree.exchange(out, new):
                    break
                load[out] -= 1
                load[new] += 1
                out = new


def _givers(
    trees: Sequence[Tree], load: Mapping[Edge, int], capacity: Mapping[Edge, int], wanted: set[Edge]
) -> dict[Edge, tuple[Tree, Edge]]:
    """For each link that can be given up: a tree that has it, and what that tree can take for it.

    Ends when all `wanted` links are among them, or no more are.

    What it takes has room, or can itself be given up elsewhere. Breadth-first from the links with room, so
    the chains are shortest ones, which keeps them valid (matroid union). A link that would close a cycle
    in a tree can take the place of any link of that cycle. Each link is reached once; links reached
    already are jumped over, which makes the whole search about linear in trees times links.

    Source: Roskind and Tarjan 1985, doi:10.1287/moor.10.4.701, from the other end.
    """
    found: dict[Edge, tuple[Tree, Edge]] = {}
    queue = [link for link, used in load.items() if used < capacity[link]]
    reached = set(queue)
    depths = [tree.depths() for tree in trees]
    jumps: list[dict[int, int]] = [{} for _ in trees]

    def top(k: int, chip: int) -> int:
        """The first chip at or above `chip` whose link to its parent has not been reached."""
        parent, jump, passed = trees[k].parent, jumps[k], []
        while chip in jump or (chip in parent and edge(chip, parent[chip]) in reached):
            passed.append(chip)
            chip = jump.get(chip, parent[chip])
        for one in passed:
            jump[one] = chip
        return chip

    for new in queue:
        for k, tree in enumerate(trees):
            if tree.has(new):
                continue
            a, b = top(k, new[0]), top(k, new[1])
            while a != b:
                if depths[k][a] < depths[k][b]:
                    a, b = b, a
                link = edge(a, tree.parent[a])
                found[link] = tree, new
                wanted.discard(link)
                if not wanted:
                    return found
                reached.add(link)
                queue.append(link)
                a = top(k, a)
    return found


def flatten(trees: Sequence[Tree], near: Mapping[int, Sequence[int]], capacity: Mapping[Edge, int]) -> None:
    """Makes the deepest trees shallower, in place, while their links allow it.

    The farthest chip of a tree is lifted by hanging it, or a chip above it, from a neighbour nearer the
    root: over a link with room, or over one that another tree gives up for the link that comes free.
    """
    load = loads(trees, capacity)
    depths = [tree.depths() for tree in trees]
    deepest = [max(depth.values()) for depth in depths]
    left = set(range(len(trees)))
    while left:
        taker = max(left, key=deepest.__getitem__)
        lift = _lift(taker, trees, depths, near, load, capacity, deepest[taker] - 1)
        if lift is None:
            left.discard(taker)
            continue
        chip, parent, giver = lift
        old = trees[taker].parent[chip]
        _move(trees[taker], depths[taker], chip, parent)
        deepest[taker] = max(depths[taker].values())
        if giver is None:
            load[edge(chip, parent)] += 1
            load[edge(chip, old)] -= 1
        else:
            _move(trees[giver], depths[giver], chip, old)
            deepest[giver] = max(depths[giver].values())


def _lift(
    k: int,
    trees: Sequence[Tree],
    depths: Sequence[dict[int, int]],
    near: Mapping[int, Sequence[int]],
    load: Mapping[Edge, int],
    capacity: Mapping[Edge, int],
    most: int,
) -> tuple[int, int, int | None] | None:
    """(chip, its new parent, the tree that gives up the link or None) that lifts tree k's farthest chip the most."""
    tree, depth = trees[k], depths[k]
    chip = max(depth, key=depth.__getitem__)
    found: list[tuple[int, bool, int, int, int | None]] = []
    while chip != tree.root:
        for other in near[chip]:
            gain = depth[chip] - depth[other] - 1
            if gain <= 0:
                continue
            if load[edge(chip, other)] < capacity[edge(chip, other)]:
                found.append((gain, True, chip, other, None))
            elif not found or gain > max(found)[0]:
                giver = _giver(k, chip, other, tree.parent[chip], trees, depths, most)
                if giver is not None:
                    found.append((gain, False, chip, other, giver))
        chip = tree.parent[chip]
    return max(found, key=lambda one: one[:2])[2:] if found else None


def _giver(
    taker: int, chip: int, wanted: int, offered: int, trees: Sequence[Tree], depths: Sequence[dict[int, int]], most: int
) -> int | None:
    """A tree where `chip` can hang from `offered` in place of `wanted` without growing deeper than `most`."""
    for k, tree in enumerate(trees):
        if k == taker or tree.parent.get(chip) != wanted:
            continue
        if depths[k][offered] >= most:
            continue
        height = max(depths[k][one] for one in tree.below(chip)) - depths[k][chip]
        if depths[k][offered] + 1 + height <= most and not tree.is_below(offered, chip):
            return k
    return None


def _move(tree: Tree, depth: dict[int, int], chip: int, parent: int) -> None:
    tree.children[tree.parent[chip]].discard(chip)
    tree.attach(chip, parent)
    change = depth[parent] + 1 - depth[chip]
    for one in tree.below(chip):
        depth[one] += change
