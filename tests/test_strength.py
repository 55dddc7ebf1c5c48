"""The strength of a network: published and closed forms, every partition of small machines, its certificate."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from multipod.collectives.strength import strength
from multipod.errors import TopologyError
from multipod.topology.topology import Topology

HOLE_2X2 = [(2, 2), (2, 3), (3, 2), (3, 3)]
HOLE_2X4 = [(r, c) for r in (2, 3) for c in (2, 3, 4, 5)]
HOLE_4X2 = [(r, c) for r in (6, 7, 8, 9) for c in (10, 11)]

# By a linear program with tree separation; the last three, by contracting every rectangle.
GOLDEN = [
    (Topology((4, 4)), Fraction(8, 5)),
    (Topology((8, 8)), Fraction(16, 9)),
    (Topology((8, 8), failed_chips=HOLE_2X2), Fraction(5, 3)),
    (Topology((8, 8), failed_chips=HOLE_2X4), Fraction(19, 12)),
    (Topology((8, 8), failed_chips=[(0, 0), (0, 1), (1, 0), (1, 1)]), Fraction(104, 59)),
    (Topology((4, 4), wrap=True), Fraction(32, 15)),
    (Topology((8, 8), wrap=True), Fraction(128, 63)),
    (Topology((8, 8), wrap=True, failed_chips=HOLE_2X2), Fraction(116, 59)),
    (Topology((16, 32)), Fraction(976, 511)),
    (Topology((32, 32)), Fraction(64, 33)),
    (Topology((32, 32), wrap=True), Fraction(2048, 1023)),
    (Topology((16, 32), failed_chips=HOLE_4X2), Fraction(954, 503)),
    (Topology((32, 32), failed_chips=HOLE_4X2), Fraction(1962, 1015)),
    (Topology((32, 32), wrap=True, failed_chips=HOLE_4X2), Fraction(2026, 1015)),
]


def ratio(topology, partition):
    """The certificate once more: bandwidth between the parts, over one less than their number."""
    assert sorted(chip for part in partition for chip in part) == list(topology.chips)
    part = {chip: k for k, chips in enumerate(partition) for chip in chips}
    speeds = [Fraction(topology.bytes_per_s[link.dim]) for link in topology.links if part[link.a] != part[link.b]]
    return sum(speeds) / (len(partition) - 1)


@pytest.mark.parametrize(("topology", "sigma"), GOLDEN, ids=str)
def test_published_values_come_out_exactly_with_a_partition_that_proves_them(topology, sigma):
    found = strength(topology)
    assert found.value == sigma
    assert ratio(topology, found.partition) == found.bytes_per_s == sigma * 50 * 10**9
    assert found.seconds(50e9) == 1 / sigma


@pytest.mark.parametrize("n", [2, 3, 4, 5, 9, 100])
def test_closed_forms_of_lines_rings_and_cubes(n):
    assert strength(Topology((n,))).value == 1
    if n > 2:
        assert strength(Topology((n,), wrap=True)).value == Fraction(n, n - 1)
    if n in (3, 4, 5):
        assert strength(Topology((n, n, n), wrap=True)).value == Fraction(3 * n**3, n**3 - 1)
        assert strength(Topology((n, n, n))).value == Fraction(3 * n * n * (n - 1), n**3 - 1)


def partitions(chips):
    """Every partition of `chips`."""
    if not chips:
        yield []
        return
    for rest in partitions(chips[1:]):
        for k in range(len(rest)):
            yield [*rest[:k], (chips[0], *rest[k]), *rest[k + 1 :]]
        yield [(chips[0],), *rest]


@st.composite
def small_machines(draw):
    shape = draw(st.sampled_from([(2,), (7,), (2, 2), (2, 3), (3, 3), (2, 4), (2, 2, 2)]))
    wrap = draw(st.tuples(*[st.booleans()] * len(shape)))
    speeds = draw(st.tuples(*[st.sampled_from([1, 2, 3, Fraction(1, 3), 0.7])] * len(shape)))
    topology = Topology(shape, wrap=wrap, bytes_per_s=speeds)
    topology = topology.without(draw(st.sets(st.integers(0, topology.size - 2), max_size=2)))
    wires = [(a, b) for a, b, _ in topology.links]
    return topology.without(links=draw(st.lists(st.sampled_from(wires), max_size=2)) if wires else ())


@settings(max_examples=60, deadline=None)
@given(small_machines())
def test_no_partition_of_a_small_machine_is_weaker(topology):
    assume(len(topology.chips) in range(2, 9))
    if len(topology.parts) > 1:
        with pytest.raises(TopologyError, match="is cut into"):
            strength(topology)
        return
    found = strength(topology)
    least = min(ratio(topology, parts) for parts in partitions(topology.chips) if len(parts) > 1)
    assert found.bytes_per_s == ratio(topology, found.partition) == least


def test_the_slower_dimension_counts_for_less():
    # Each of the 8 rows is a part: 7 * 8 slow links between 8 parts. Nothing is weaker where those are slow enough.
    topology = Topology((8, 8), bytes_per_s=(1, 100))
    assert strength(topology).value == Fraction(8, 100)
    assert len(strength(topology).partition) == 8


def test_machines_without_a_strength_are_refused():
    with pytest.raises(TopologyError, match=r"one live chip.*its strength is unlimited"):
        strength(Topology((2,), failed_chips=[0]))
    with pytest.raises(TopologyError, match=r"has switches.*Use multi-ring, halving-doubling or double-tree"):
        strength(Topology((4, 4), switched=(True, False)))
