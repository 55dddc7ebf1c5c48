"""What no schedule can beat on a machine, in the model of `simulate`: add and copy, full-duplex links."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from multipod.collectives.schedule import Collective, peers
from multipod.collectives.strength import strength
from multipod.topology.routes import Routes, routes
from multipod.topology.topology import Number, Topology


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the time of a collective, each exact for the machine's numbers.

    Attributes:
      latency_s: word must get from some chip to the one farthest from it.
      cut_s: what must cross the narrowest of these cuts does: each chip against the rest, and a straight cut
        between any two neighbouring places of a dimension. On shared ports also all chips behind one.
      strength_s: all traffic together, against the links between the parts of a partition. For all-reduce the
        best of all partitions, n / sigma: n bytes over the strength of the network; sigma counts
        both directions of a link, so half of that for a collective that does one half of the work.
    """

    latency_s: Fraction
    cut_s: Fraction
    strength_s: Fraction

    @property
    def seconds(self) -> Fraction:
        """The best of them."""
        return max(self.latency_s, self.cut_s, self.strength_s)


def bounds(
    topology: Topology, nbytes: Number, collective: Collective = "all-reduce", tile: Sequence[int] = ()
) -> Bounds:
    """The bounds for `nbytes` on each chip.

    With n bytes, and k parts of p chips:

    - all-reduce: each part must send n and receive n; 2 (k - 1) n leaves the parts in all.
    - reduce-scatter, all-gather: a part of q chips must receive (send) n q/p and send (receive) n (p - q)/p;
      (k - 1) n leaves the parts in all.
    - broadcast: each part must send or receive n; (k - 1) n leaves the parts in all. The latency is half of the
      others', because the root may be in the middle.

    Chips of a `tile` are counted group by group, and the groups' traffic added. With a tile or with switches
    `strength_s` looks at few partitions: the single chips, and the chips behind each port that several share.
    Takes a few seconds at 4,096 chips.

    Raises:
      TopologyError: the machine is cut in parts.

    Source: the one-way gossip bound of 2 (k - 1) messages among k; Cunningham 1985, doi:10.1145/3828.3829.
    """
    topology.check_connected()
    machine = _Machine(topology, collective, tile)
    if machine.alone:
        return Bounds(Fraction(0), Fraction(0), Fraction(0))
    share = Fraction(nbytes)
    half = Fraction(1, 2) if collective == "broadcast" else 1
    return Bounds(
        half * machine.longest_s(),
        share * max(machine.cut_s(inside) for inside in machine.sets()),
        share * _strength_s(machine),
    )


def _strength_s(machine: "_Machine") -> Fraction:
    """Seconds for a vector of one byte."""
    wired = not any(machine.topology.switched)
    if wired and len(machine.groups) == 1:
        whole = 1 / strength(machine.topology).bytes_per_s
        return whole if machine.collective == "all-reduce" else whole / 2
    return max(machine.traffic_s(parts) for parts in machine.partitions())


class _Machine:
    """The nodes and arcs of a machine as arrays, and what a collective must get across them."""

    def __init__(self, topology: Topology, collective: Collective, tile: Sequence[int]) -> None:
        self.topology, self.collective = topology, collective
        self.routes: Routes = routes(topology)
        self.groups = peers(topology, tuple(tile))
        self.alone = all(len(group) == 1 for group in self.groups)
        self.tails = np.array([arc.tail for arc in self.routes.arcs], np.int64)
        self.heads = np.array([arc.head for arc in self.routes.arcs], np.int64)
        speeds = [arc.bytes_per_s for arc in self.routes.arcs]
        self.speeds = [Fraction(speed) for speed in sorted(set(speeds))]  # few: so sums of them stay exact and fast
        self.speed = np.searchsorted(np.array(sorted(set(speeds)), object), np.array(speeds, object))
        self.places = np.array([topology.coordinates(chip) for chip in topology.chips])

    def width(self, arcs: np.ndarray) -> Fraction:
        """Bytes per second of the arcs in a mask."""
        counts = np.bincount(self.speed[arcs], minlength=len(self.speeds))
        return sum((int(c) * speed for c, speed in zip(counts, self.speeds, strict=True)), Fraction(0))

    def nodes(self, chips: np.ndarray) -> np.ndarray:
        """[nodes] mask of some chips, with the switches that have more of their bandwidth among them than elsewhere.

        Any choice of switches gives a valid cut; this one finds the narrow side of a shared port.
        """
        inside = np.zeros(self.routes.nodes, bool)
        inside[chips] = True
        size = self.topology.size
        if self.routes.nodes == size:
            return inside
        speed = np.array([float(self.speeds[k]) for k in self.speed])
        whole = np.bincount(self.heads, speed, self.routes.nodes)
        for _ in self.topology.shape:  # ports inside ports
            near = np.bincount(self.heads[inside[self.tails]], speed[inside[self.tails]], self.routes.nodes)
            inside[size:] = (2 * near > whole)[size:]
        return inside

    def cut_s(self, chips: np.ndarray) -> Fraction:
        """Seconds for a vector of one byte to get over the cut around `chips`."""
        inside = self.nodes(chips)
        out = self.width(inside[self.tails] & ~inside[self.heads])
        into = self.width(~inside[self.tails] & inside[self.heads])
        split = sum(0 < int(inside[list(group)].sum()) < len(group) for group in self.groups)
        if not split:
            return Fraction(0)
        part = Fraction(len(chips), len(self.topology.chips))
        must_leave, must_enter = {
            "all-reduce": (Fraction(split), Fraction(split)),
            "reduce-scatter": (1 - part, part),
            "all-gather": (part, 1 - part),
            "broadcast": (Fraction(0), Fraction(0)),
        }[self.collective]
        if self.collective == "broadcast":
            return 1 / max(out, into)
        return max(must_leave / out, must_enter / into)

    def sets(self) -> Iterable[np.ndarray]:
        """The chips on one side of each cut that is tried."""
        chips = np.array(self.topology.chips)
        single = self._narrowest_chips()
        yield from (np.array([chip]) for chip in single)
        for dim, n in enumerate(self.topology.shape):
            for place in range(1, n):
                side = self.places[:, dim] < place
                if side.any() and not side.all():
                    yield chips[side]
        for parts in self.partitions():
            if len(parts) < len(chips):
                yield from parts

    def _narrowest_chips(self) -> list[int]:
        """A chip for each width that occurs: the rest are as wide."""
        widths: dict[tuple, int] = {}
        counts = [
            np.bincount(ends * len(self.speeds) + self.speed, minlength=self.routes.nodes * len(self.speeds)).reshape(
                self.routes.nodes, len(self.speeds)
            )
            for ends in (self.tails, self.heads)
        ]
        for group, chips in enumerate(self.groups):
            for chip in chips:
                widths.setdefault((*counts[0][chip], *counts[1][chip], len(self.groups[group]) > 1), chip)
        return list(widths.values())

    def partitions(self) -> Iterable[list[np.ndarray]]:
        """Partitions of the chips: single ones, and those behind each port that chips share."""
        chips = np.array(self.topology.chips)
        yield [np.array([chip]) for chip in chips]
        for dim in range(1, len(self.topology.shape)):
            if self.topology.shared[dim - 1] and math.prod(self.topology.shape[dim:]) > 1:
                _, part = np.unique(self.places[:, :dim], axis=0, return_inverse=True)
                yield [chips[part == k] for k in range(int(part.max()) + 1)]

    def traffic_s(self, parts: list[np.ndarray]) -> Fraction:
        """Seconds for a vector of one byte, if all links out of the parts were busy all the time."""
        if len(parts) == len(self.topology.chips):
            out = self.width(self.tails < self.topology.size)
        else:
            out = sum((self._out(chips) for chips in parts), Fraction(0))
        part = {int(chip): k for k, chips in enumerate(parts) for chip in chips}
        messages = sum(len({part[chip] for chip in group}) - 1 for group in self.groups)
        if not messages:
            return Fraction(0)
        return (2 if self.collective == "all-reduce" else 1) * messages / out

    def _out(self, chips: np.ndarray) -> Fraction:
        inside = self.nodes(chips)
        return self.width(inside[self.tails] & ~inside[self.heads])

    def longest_s(self) -> Fraction:
        """The latency between two peers that are far apart: the farthest of all on whole meshes and tori.

        Found by going from one chip to the one farthest from it, and on from there, as long as that gets farther.
        On a broken machine there may be two that are farther yet.
        """
        best = Fraction(0)
        for group in {len(group): group for group in self.groups}.values():
            start, length = group[0], -1
            while True:
                away = self._latencies(start)
                farthest = max(group, key=lambda chip: away[chip])
                if away[farthest] <= length:
                    break
                start, length = farthest, away[farthest]
            best = max(best, Fraction(length, self._ticks[1]))
        return best

    @cached_property
    def _ticks(self) -> tuple[list[int], int]:
        """Latency of each arc in whole ticks, and how many of them make a second."""
        exact = [Fraction(arc.latency_s) for arc in self.routes.arcs]
        per_second = math.lcm(*(latency.denominator for latency in set(exact)))
        return [int(latency * per_second) for latency in exact], per_second

    @cached_property
    def _leaving(self) -> list[list[tuple[int, int]]]:
        leaving: list[list[tuple[int, int]]] = [[] for _ in range(self.routes.nodes)]
        for arc, ticks in zip(self.routes.arcs, self._ticks[0], strict=True):
            leaving[arc.tail].append((arc.head, ticks))
        return leaving

    def _latencies(self, start: int) -> dict[int, int]:
        """From `start` to every node, in ticks, by the quickest way."""
        away: dict[int, int] = {}
        queue = [(0, start)]
        while queue:
            ticks, node = heapq.heappop(queue)
            if node not in away:
                away[node] = ticks
                for head, more in self._leaving[node]:
                    if head not in away:
                        heapq.heappush(queue, (ticks + more, head))
        return away
