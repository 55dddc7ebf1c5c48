"""Routes: which arcs a message takes from chip to chip, around failures too, and whether routes can deadlock."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from multipod.errors import TopologyError
from multipod.topology.topology import Number, Topology

NodeName = tuple[int | tuple[int, ...], ...]


class Arc(NamedTuple):
    """One direction of a wire or of a port, from node `tail` to node `head`.

    Nodes below `topology.size` are chips; switches and shared ports are numbered from there on.
    """

    tail: int
    head: int
    latency_s: Number
    bytes_per_s: Number


class Routes:
    """The live arcs of a topology, and the way of a message over them; made once by `routes(topology)`.

    - A wire is two arcs, one each way.
    - On a switched dimension d a hop takes two arcs, chip to switch and switch to chip. Each carries
      `bytes_per_s[d]`, and the first takes all of `latency_s[d]`.
    - Shared dimensions form a tree: chip, shared port furthest in, its switch, the shared port further
      out, ... A hop over dimension d passes the ports of d and of every shared dimension further in, out and
      in again, and pays the latency of each of them once. Arcs that only lead to a port are as wide as it and
      take no time, so that of all arcs the port itself is the one to be full.

    Attributes:
      topology: the machine.
      arcs: all live arcs; a route is a tuple of indexes into them. The wires come first, two for each of
        `topology.links`, in their order.
      nodes: how many nodes there are, failed chips included.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.nodes = topology.size
        self._strides = [prod(topology.shape[dim + 1 :]) for dim in range(len(topology.shape))]
        self._places = {chip: topology.coordinates(chip) for chip in topology.chips}
        self._switches: dict[NodeName, int] = {}
        self._index: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}
        self.arcs: tuple[Arc, ...] = tuple(self._numbered(self._all_arcs()))
        self._leaving: list[list[int]] = [[] for _ in range(self.nodes)]
        for number, arc in enumerate(self.arcs):
            self._leaving[arc.tail].append(number)

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """The arcs from chip `src` to chip `dst`, in travel order; none if they are the same.

        Dimension by dimension, from the first to the last, around a ring the shorter way (upwards if both
        are equally short); over shared ports straight to `dst`, as no chip forwards there. Where something has
        failed on that path, a way with the fewest arcs of all, always the same one.

        Raises:
          TopologyError: an end has failed, or the machine is cut between them.
        """
        found = self._known.get((src, dst))
        if found is None:
            for end in (src, dst):
                if end not in self._places:
                    self.topology.number(end)
                    raise TopologyError(
                        f"{self.topology}: chip {end} has failed, so there is no route {src}->{dst}. "
                        "Send between live chips only."
                    )
            in_order = self._in_order(src, dst)
            found = self._around(src, dst) if in_order is None else in_order
            self._known[src, dst] = found
        return found

    def nodes_on(self, way: Iterable[int]) -> tuple[int, ...]:
        """The nodes that a route passes, both ends included."""
        arcs = [self.arcs[number] for number in way]
        return (arcs[0].tail, *(arc.head for arc in arcs)) if arcs else ()

    def _numbered(self, arcs: Iterable[Arc]) -> Iterator[Arc]:
        for arc in arcs:
            if (arc.tail, arc.head) not in self._index:
                self._index[arc.tail, arc.head] = len(self._index)
                yield arc

    def _all_arcs(self) -> Iterator[Arc]:
        machine = self.topology
        for a, b, dim in machine.links:
            yield Arc(a, b, machine.latency_s[dim], machine.bytes_per_s[dim])
            yield Arc(b, a, machine.latency_s[dim], machine.bytes_per_s[dim])
        for dim, switched in enumerate(machine.switched):
            if switched and not machine.shared[dim] and machine.shape[dim] > 1:
                for chip in machine.chips:
                    yield from self._both_ways(chip, self._switch(chip, dim), dim, leads=False)
        if any(machine.shared):
            for chip in machine.chips:
                for dim, tail, head in self._climb(chip):
                    yield from self._both_ways(tail, head, dim, leads=head == self._port(chip, dim))

    def _both_ways(self, inner: int, outer: int, dim: int, leads: bool) -> Iterator[Arc]:
        latency_s, bytes_per_s = self.topology.latency_s[dim], self.topology.bytes_per_s[dim]
        yield Arc(inner, outer, 0 if leads else latency_s, bytes_per_s)
        yield Arc(outer, inner, 0, bytes_per_s)

    def _climb(self, chip: int) -> Iterator[tuple[int, int, int]]:
        """(dim, from node, to node) of each step up the tree of shared ports, from `chip` outwards."""
        here = chip
        for dim in reversed(range(len(self.topology.shape))):
            if self.topology.shared[dim]:
                for node in (self._port(chip, dim), self._tree(chip, dim)):
                    if node != here:
                        yield dim, here, node
                        here = node

    def _port(self, chip: int, dim: int) -> int:
        """The node in front of the port that `chip` has on shared dimension `dim`; itself if it shares with none."""
        return self._tree(chip, dim + 1)

    def _tree(self, chip: int, depth: int) -> int:
        """The node that belongs to all chips with the first `depth` coordinates of `chip`.

        It is the switch of dimension `depth`, and what the shared port of dimension `depth - 1` is plugged into.
        """
        place = self._places[chip]
        return chip if depth == len(place) else self._node((place[:depth],))

    def _switch(self, chip: int, dim: int) -> int:
        """The switch of `dim` that `chip` has a port of its own on."""
        place = self._places[chip]
        return self._node((dim, place[:dim], place[dim + 1 :]))

    def _node(self, name: NodeName) -> int:
        if name not in self._switches:
            self._switches[name] = self.nodes
            self.nodes += 1
        return self._switches[name]

    def _in_order(self, src: int, dst: int) -> tuple[int, ...] | None:
        """The route in dimension order; None if something on it has failed."""
        shape, shared, switched = self.topology.shape, self.topology.shared, self.topology.switched
        goal = self._places[dst]
        way: list[int | None] = []
        here = src
        for dim, c in enumerate(self._places[src]):
            if c == goal[dim]:
                continue
            if shared[dim]:
                return (*way, *self._over_tree(here, dst, dim))  # type: ignore[arg-type]
            if switched[dim]:
                there = here + (goal[dim] - c) * self._strides[dim]
                if there not in self._places:
                    return None
                switch = self._switch(here, dim)
                way += self._index[here, switch], self._index[switch, there]
                here = there
                continue
            for there in self._along(here, dim, c, goal[dim], shape[dim]):
                way.append(self._index.get((here, there)))
                if way[-1] is None:
                    return None
                here = there
        return tuple(way)  # type: ignore[arg-type]

    def _along(self, here: int, dim: int, c: int, goal: int, n: int) -> Iterator[int]:
        """The chips from `here`, at place `c` of dimension `dim`, to place `goal`, `here` left out."""
        stride = self._strides[dim]
        up = (goal - c) % n
        upwards = 2 * up <= n if self.topology.wrap[dim] and n > 2 else goal > c
        step = 1 if upwards else -1
        first = here - c * stride
        while c != goal:
            c = (c + step) % n
            yield first + c * stride

    def _over_tree(self, src: int, dst: int, dim: int) -> list[int]:
        """From `src` up to the switch of shared dimension `dim`, and down to `dst`."""
        top = self._tree(src, dim)
        way = []
        for chip, upwards in ((src, True), (dst, False)):
            half = []
            for _, tail, head in self._climb(chip):
                half.append(self._index[(tail, head) if upwards else (head, tail)])
                if head == top:
                    break
            way += half if upwards else half[::-1]
        return way

    def _around(self, src: int, dst: int) -> tuple[int, ...]:
        """A way with the fewest arcs; of several, the one that breadth-first search in arc order meets first."""
        came: dict[int, int] = {src: -1}
        edge = deque([src])
        while edge and dst not in came:
            here = edge.popleft()
            for number in self._leaving[here]:
                head = self.arcs[number].head
                if head not in came:
                    came[head] = number
                    edge.append(head)
        if dst not in came:
            self.topology.check_connected()
            raise TopologyError(f"{self.topology}: there is no way from chip {src} to chip {dst}. Mend a link between.")
        way = []
        node = dst
        while node != src:
            way.append(came[node])
            node = self.arcs[came[node]].tail
        return tuple(reversed(way))


@lru_cache(maxsize=16)
def routes(topology: Topology) -> Routes:
    """The `Routes` of a machine; the same object for equal machines, so that routes found once stay known."""
    return Routes(topology)


def dependency_cycle(ways: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    """A deadlock that these routes could end in, or None if they cannot.

    A message that holds one arc of its route while it waits for the next makes the first depend on the second.
    If no chain of such dependencies closes, some message can always move on. A returned cycle is the
    arcs in order, each waiting for the next and the last for the first. Routes of one arc depend on nothing.
    Assumes one buffer (virtual channel) for each arc; more of them may break a cycle that is found here.

    Source: Dally & Seitz, 1987, doi:10.1109/TC.1987.1676939.
    """
    waits: dict[int, list[int]] = {}
    for first, then in dict.fromkeys(pair for way in ways for pair in pairwise(way)):
        waits.setdefault(first, []).append(then)
    done: set[int] = set()
    for start in waits:
        if start in done:
            continue
        # `trail` is the chain of arcs being followed, `ahead` what is left to try from each of them.
        trail, ahead = {start: None}, [iter(waits[start])]
        while ahead:
            arc = next(ahead[-1], None)
            if arc is None:
                done.add(trail.popitem()[0])
                ahead.pop()
            elif arc in trail:
                chain = list(trail)
                return tuple(chain[chain.index(arc) :])
            elif arc not in done:
                trail[arc] = None
                ahead.append(iter(waits.get(arc, ())))
    return None
