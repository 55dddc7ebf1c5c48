"""The strength of a network: how fast its links could sum, at best, and the partition that proves it."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from multipod.errors import TopologyError
from multipod.topology.topology import Topology

Edge = tuple[int, int]
Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Strength:
    """sigma = min over partitions P of the chips of (bandwidth of links between parts) / (number of parts - 1).

    No all-reduce of n bytes that adds and copies can take less than n / sigma: k parts must exchange at
    least 2 (k - 1) messages of n bytes (the one-way gossip bound), over links that carry both directions.
    A fractional packing of spanning trees attains it (Tutte 1961, Nash-Williams 1961).

    Attributes:
      value: sigma in links, each counted by its bandwidth relative to the fastest.
      bytes_per_s: sigma in bytes per second: `value` times the bandwidth of the fastest link.
      partition: chips in parts, a partition that attains the minimum; `crossing` recomputes the value from it.
    """

    value: Fraction
    bytes_per_s: Fraction
    partition: Partition

    def seconds(self, nbytes: float | Fraction) -> Fraction:
        """The least time in which `nbytes` on every chip can be summed, latency left out."""
        return Fraction(nbytes) / self.bytes_per_s


def strength(topology: Topology) -> Strength:
    """The strength of `topology`, exactly.

    Newton's iteration on lambda: find the partition that minimises crossing - lambda (parts - 1); where
    that is negative, the partition's own ratio is the next lambda. Each minimum is found exactly, in
    integers, with one local flow for every chip: 64 chips take tens of milliseconds, 1,024 chips seconds.

    Raises:
      TopologyError: the machine is cut in parts, is a single chip, or has switches.

    Source: Cunningham 1985, doi:10.1145/3828.3829; the greedy algorithm for the inner minimum is that of
    the Dilworth truncation of (crossing / 2 - lambda), Frank and Tardos 1988, doi:10.1007/BF02192547.
    """
    check_wired(topology)
    topology.check_connected()
    if len(topology.chips) == 1:
        raise TopologyError(f"{topology} has one live chip, which has nobody to sum with: its strength is unlimited.")
    weights = link_weights(topology)
    ratio, partition = weakest(topology.chips, weights)
    value = ratio / max(weights.values())
    fastest = max(Fraction(topology.bytes_per_s[link.dim]) for link in topology.links)
    return Strength(value, value * fastest, partition)


def weakest(chips: Sequence[int], weights: dict[Edge, int]) -> tuple[Fraction, Partition]:
    """The least crossing / (parts - 1) over all partitions of two or more connected chips, and one that has it."""
    partition: Partition = tuple((chip,) for chip in chips)
    while True:
        ratio = Fraction(crossing(partition, weights), len(partition) - 1)
        worst = _worst_partition(chips, weights, ratio)
        if len(worst) < 2 or Fraction(crossing(worst, weights), len(worst) - 1) >= ratio:
            return ratio, partition
        partition = worst


def check_wired(topology: Topology) -> None:
    """Refuses machines with switches: the bound and the trees are those of wires between pairs of chips.

    Raises:
      TopologyError: the machine has a switched dimension of more than one chip.
    """
    if any(yes and n > 1 for yes, n in zip(topology.switched, topology.shape, strict=True)):
        raise TopologyError(
            f"{topology} has switches, and network strength and tree packing are about wires between two chips. "
            "Use multi-ring, halving-doubling or double-tree there."
        )


def link_weights(topology: Topology) -> dict[Edge, int]:
    """The bandwidth of every working link as a whole number, in the smallest numbers that keep the proportions."""
    speeds = {link.dim: Fraction(topology.bytes_per_s[link.dim]) for link in topology.links}
    scale = math.lcm(*(speed.denominator for speed in speeds.values()))
    whole = {dim: int(speed * scale) for dim, speed in speeds.items()}
    common = math.gcd(*whole.values())
    return {(link.a, link.b): whole[link.dim] // common for link in topology.links}


def crossing(partition: Iterable[Sequence[int]], weights: dict[Edge, int]) -> int:
    """The weight of the links between different parts."""
    part = {chip: k for k, chips in enumerate(partition) for chip in chips}
    return sum(weight for (a, b), weight in weights.items() if part[a] != part[b])


def _worst_partition(chips: Sequence[int], weights: dict[Edge, int], ratio: Fraction) -> Partition:
    """A partition that minimises crossing - ratio * parts, exactly.

    It equals the total weight minus the least sum of z over vectors z with z(S) >= weight inside S + ratio
    for all sets S of chips. Such a z is found greedily, chip by chip: z[v] is the least that will do for
    the sets among the chips seen so far. To test a z is to hand every link's weight to its two ends, no
    more than z to each, with `ratio` to spare wherever one asks; so each new chip tries to hand on as
    much as it can to those seen before, along links, and keeps the rest.
    """
    extra, scale = ratio.numerator, ratio.denominator
    near: dict[int, dict[int, int]] = {chip: {} for chip in chips}
    for (a, b), weight in weights.items():
        near[a][b] = near[b][a] = scale * weight
    held: dict[int, dict[int, int]] = {}  # held[u][v]: what u holds of the link u-v
    slack: dict[int, int] = {}  # z minus what is held, of every chip seen
    part = {chip: chip for chip in chips}
    members = {chip: [chip] for chip in chips}
    for chip in _breadth_first(near):
        held[chip] = {other: weight for other, weight in near[chip].items() if other in held}
        for other in held[chip]:
            held[other][chip] = 0
        # The sets reached are tight; where two of them meet, their union is tight too.
        for name in {part[other] for other in _hand_on(chip, held, slack)} - {part[chip]}:
            for other in members[name]:
                part[other] = part[chip]
            members[part[chip]] += members.pop(name)
        slack[chip] = extra
    return tuple(tuple(sorted(chips)) for chips in members.values())


def _breadth_first(near: dict[int, dict[int, int]]) -> list[int]:
    order = [min(near)]
    seen = set(order)
    for chip in order:
        fresh = [other for other in near[chip] if other not in seen]
        seen.update(fresh)
        order += fresh
    return order


def _hand_on(source: int, held: dict[int, dict[int, int]], slack: dict[int, int]) -> list[int]:
    """Moves what `source` holds to chips with slack, as much as possible; returns the chips it could still reach."""
    while True:
        came: dict[int, int] = {source: source}
        queue = deque([source])
        target = None
        while queue and target is None:
            u = queue.popleft()
            for v, amount in held[u].items():
                if amount and v not in came:
                    came[v] = u
                    if slack[v]:
                        target = v
                        break
                    queue.append(v)
        if target is None:
            return list(came)
        way = [target]
        while way[-1] != source:
            way.append(came[way[-1]])
        way.reverse()
        amount = min(slack[target], *(held[u][v] for u, v in itertools.pairwise(way)))
        slack[target] -= amount
        for u, v in itertools.pairwise(way):
            held[u][v] -= amount
            held[v][u] += amount
