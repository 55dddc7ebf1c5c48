"""What one number says about a machine: how far its chips are apart, how wide its middle is."""

from collections import defaultdict
from collections.abc import Container, Iterator

from multipod.topology.topology import Number, Topology


def diameter(topology: Topology) -> int:
    """The most hops between any two live chips; a hop is one wire, or one passage through switches.

    Raises:
      TopologyError: the machine is cut in parts.
    """
    topology.check_connected()
    near = [[topology.rank[other] for other in topology.neighbours[chip]] for chip in topology.chips]
    # Bit j of heard[i]: word from the chip of rank j has reached the chip of rank i. All spread at once.
    heard = [1 << rank for rank in range(len(near))]
    everyone = (1 << len(near)) - 1
    hops = 0
    while any(word != everyone for word in heard):
        before, hops = heard, hops + 1
        heard = [before[rank] for rank in range(len(near))]
        for rank, others in enumerate(near):
            for other in others:
                heard[rank] |= before[other]
    return hops


def bisection_bytes_per_s(topology: Topology) -> Number:
    """What the narrowest straight cut through the middle carries one way; 0 for a single chip.

    Cuts each dimension in half (a ring at every pair of opposite places) and takes the least. On a whole grid
    with sides of even length that is the bisection bandwidth; on a broken one the halves may be unequal.
    """
    widths = [
        sum(_crossings(topology, dim, side))
        for dim, n in enumerate(topology.shape)
        for side in _halves(n, closed=topology.wrap[dim] and n > 2)
    ]
    return min(widths, default=0)


def _halves(n: int, closed: bool) -> list[range | set[int]]:
    """The places on one side of each cut in half of a dimension of length n."""
    if n == 1:
        return []
    if closed:
        return [{(start + k) % n for k in range(n // 2)} for start in range(n)]
    return [range(n // 2), range(n - n // 2)]


def _crossings(topology: Topology, dim: int, side: Container[int]) -> Iterator[Number]:
    """Bytes per second, one way, of each thing that joins `side` of dimension `dim` to the rest."""
    place = {chip: topology.coordinates(chip) for chip in topology.chips}
    if not topology.switched[dim]:
        for a, b, along in topology.links:
            if along == dim and (place[a][dim] in side) != (place[b][dim] in side):
                yield topology.bytes_per_s[dim]
        return
    ports: dict[tuple[int, ...], set[int]] = defaultdict(set)  # of each switch: where its live ports are
    for here in place.values():
        ports[here[:dim] if topology.shared[dim] else here[:dim] + here[dim + 1 :]].add(here[dim])
    for places in ports.values():
        inside = sum(c in side for c in places)
        yield min(inside, len(places) - inside) * topology.bytes_per_s[dim]
