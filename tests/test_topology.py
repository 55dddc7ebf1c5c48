"""Machines as data: topologies, routes, the catalogue, drawings, `multipod topology`."""

import json
import math
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, permutations

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from multipod.cli.main import main
from multipod.cli.schedules.machine import BYTES
from multipod.cli.schedules.topology import topology as command
from multipod.errors import TopologyError
from multipod.topology.chips import CHIPS, Chip
from multipod.topology.drawing import draw
from multipod.topology.machines import MACHINES, from_data, parse, to_data
from multipod.topology.measures import bisection_bytes_per_s, diameter
from multipod.topology.routes import Routes, dependency_cycle, routes
from multipod.topology.topology import BYTES_PER_S, LATENCY_S, Topology

few = settings(max_examples=60, deadline=None)


def wired_pairs(topology):
    """All wires that the machine was built with, from the definition: neighbours along one dimension."""
    pairs = {}
    for a, b in combinations(range(topology.size), 2):
        p, q = topology.coordinates(a), topology.coordinates(b)
        apart = [dim for dim in range(len(p)) if p[dim] != q[dim]]
        if len(apart) == 1 and not topology.switched[apart[0]]:
            gap, n = abs(p[apart[0]] - q[apart[0]]), topology.shape[apart[0]]
            if gap == 1 or (topology.wrap[apart[0]] and gap == n - 1):
                pairs[a, b] = apart[0]
    return pairs


def distances(topology, start):
    """Hops from `start` to every chip that it reaches, over the live ones of `wired_pairs`."""
    live = [pair for pair in wired_pairs(topology) if pair not in topology.failed_links]
    live = [pair for pair in live if not set(pair) & topology.failed_chips]
    found, edge, hops = {start: 0}, {start}, 0
    while edge:
        hops += 1
        edge = {b for pair in live for a, b in (pair, pair[::-1]) if a in edge} - found.keys()
        found |= dict.fromkeys(edge, hops)
    return found


@st.composite
def grids(draw, broken=True):
    """Wired machines of up to three dimensions and about 40 chips, some chips and links failed."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 40))
    wrap = draw(st.tuples(*(st.booleans() for _ in shape)))
    whole = Topology(tuple(shape), wrap)
    if not broken:
        return whole
    chips = draw(st.sets(st.integers(0, whole.size - 1), max_size=min(whole.size - 1, 6)))
    links = sorted(wired_pairs(whole))
    cut = draw(st.sets(st.sampled_from(links), max_size=4)) if links else []
    return whole.without(chips, cut)


@st.composite
def machines(draw):
    """Any machine at all: switches, shared ports, chips, names, exact numbers."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    flags = st.tuples(*(st.booleans() for _ in shape))
    switched = draw(flags)
    wrap = tuple(w and not s for w, s in zip(draw(flags), switched, strict=True))
    shared = tuple(p and s for p, s in zip(draw(flags), switched, strict=True))
    positive = st.one_of(
        st.integers(1, 10**18),
        st.floats(1e-300, 1e300),
        st.fractions(Fraction(1, 10**20), 10**20, max_denominator=10**30),
    )
    numbers = st.tuples(*(positive for _ in shape))
    own = Chip("own", {"int4": 1.5}, 2, 3.0, 0, 1e9, 4, "made up")
    chip = draw(st.sampled_from([None, own, *CHIPS.values()]))
    name = draw(st.text("ab c:12/ü", max_size=8))
    machine = Topology(
        shape, wrap, chip=chip, latency_s=draw(numbers), bytes_per_s=draw(numbers),
        switched=switched, shared=shared, name=name,
    )  # fmt: skip
    dead = draw(st.sets(st.integers(0, machine.size - 1), max_size=machine.size - 1))
    links = sorted(wired_pairs(machine))
    return machine.without(dead, draw(st.sets(st.sampled_from(links))) if links else [])


# The topology itself.


@few
@given(machines(), st.data())
def test_chips_are_numbered_row_major_and_back(machine, data):
    chip = data.draw(st.integers(0, machine.size - 1))
    place = machine.coordinates(chip)
    assert machine.number(place) == machine.number(chip) == chip
    assert chip == sum(c * math.prod(machine.shape[dim + 1 :]) for dim, c in enumerate(place))
    assert [machine.chips[rank] for rank in map(machine.rank.get, machine.chips)] == list(machine.chips)


@few
@given(grids())
def test_links_are_the_live_wires_of_the_definition(topology):
    live = {
        (a, b, dim)
        for (a, b), dim in wired_pairs(topology).items()
        if (a, b) not in topology.failed_links and not {a, b} & topology.failed_chips
    }
    assert set(topology.links) == live
    assert list(topology.links) == sorted(topology.links)
    near = {chip: {b for pair in live for a, b in (pair[:2], pair[1::-1]) if a == chip} for chip in topology.chips}
    assert {chip: set(others) for chip, others in topology.neighbours.items()} == near
    parts = {frozenset(distances(topology, chip)) for chip in topology.chips}
    assert {frozenset(part) for part in topology.parts} == parts


def test_zero_is_a_latency_and_no_bandwidth():
    assert Topology((2, 2), latency_s=0).latency_s == (0, 0)
    assert Topology((2, 2)).latency_s == (LATENCY_S, LATENCY_S)
    assert Topology((2, 2)).bytes_per_s == (BYTES_PER_S, BYTES_PER_S)
    assert Topology((2, 2), chip=CHIPS["tpu-v4"]).bytes_per_s == (50e9, 50e9)
    with pytest.raises(TopologyError, match=r"bytes_per_s=0 is not possible. Give finite numbers above 0"):
        Topology((2, 2), bytes_per_s=0)


def test_a_name_keeps_saying_what_is_broken():
    assert str(parse("tpu-v3-pod").without([0], [((1, 1), (1, 2))])) == "tpu-v3-pod (1 chip failed, 1 link failed)"
    assert str(parse("mesh:8x8", ["2-3,2-5"])) == "mesh:8x8 (8 chips failed)"
    assert str(Topology((32, 128), (True, False))) == "grid:32x128"
    assert str(parse("switch:4x2")) == "switch:4x2"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"shape": (0, 4)}, "shape=(0, 4) is no grid of chips. Give positive whole numbers"),
        ({"shape": 8}, "shape=8 is no grid of chips"),
        ({"shape": (2.0, 2)}, "shape=(2.0, 2) is no grid of chips"),
        ({"wrap": (True,)}, "wrap=(True,) does not fit shape=(2, 2)"),
        ({"failed_chips": [4]}, "mesh:2x2 has no chip 4. Chips are numbered 0 to 3"),
        ({"failed_chips": [(0, 2)]}, "mesh:2x2 has no chip (0, 2). Coordinates go from 0 to (1, 1)"),
        ({"failed_chips": [1.5]}, "1.5 does not name a chip"),
        ({"failed_chips": range(4)}, "all 4 chips have failed, so there is no machine left"),
        ({"failed_links": [(0, 3)]}, "mesh:2x2 has no link 0-3: chip 0 is wired to [1, 2]"),
        ({"failed_links": [(0, 1, 2)]}, "failed link (0, 1, 2) does not name two chips"),
        ({"latency_s": -1}, "latency_s=-1 is not possible. Give finite numbers 0 or more"),
        ({"latency_s": math.nan}, "latency_s=nan is not possible"),
        ({"bytes_per_s": (1, math.inf)}, "bytes_per_s=(1, inf) is not possible"),
        ({"bytes_per_s": "12"}, "bytes_per_s=12 is not possible"),
        ({"shared": (True, False)}, "only switched dimensions have shared ports"),
        ({"switched": True, "wrap": True}, "a switched dimension is not closed by a link"),
    ],
)
def test_what_is_no_machine_is_refused(made, message):
    with pytest.raises(TopologyError) as refused:
        Topology(**{"shape": (2, 2), **made})
    assert message in str(refused.value)


def test_a_cut_machine_names_its_parts():
    cut = parse("mesh:2x5", ["0-1,2"])
    assert cut.parts == ((0, 1, 5, 6), (3, 4, 8, 9))
    with pytest.raises(TopologyError, match=r"cut into 2 parts .*: 4 chips 0, 1, 5, 6; 4 chips 3, 4, 8, 9\. Give up"):
        cut.check_connected()


# Routes.


@few
@given(grids())
def test_arcs_are_both_directions_of_every_live_wire(topology):
    found = routes(topology)
    wires = {(a, b) for a, b, _ in topology.links}
    assert Counter((arc.tail, arc.head) for arc in found.arcs) == Counter({*wires, *(wire[::-1] for wire in wires)})
    assert found.nodes == topology.size


@few
@given(grids())
def test_routes_are_live_whole_and_shortest(topology):
    found = Routes(topology)
    for src in topology.chips[:8]:
        near = distances(topology, src)
        for dst in topology.chips:
            if dst not in near:
                with pytest.raises(TopologyError, match="is cut into"):
                    found.route(src, dst)
                continue
            way = found.route(src, dst)
            assert len(way) == near[dst]
            arcs = [found.arcs[number] for number in way]
            assert all(one.head == then.tail for one, then in pairwise(arcs))
            assert found.nodes_on(way) == ((src, *(arc.head for arc in arcs)) if way else ())
            assert not way or (arcs[0].tail, arcs[-1].head) == (src, dst)
            assert Routes(topology).route(src, dst) == way == found.route(src, dst)


@few
@given(grids(broken=False))
def test_whole_machines_route_in_dimension_order(topology):
    for src, dst in permutations(topology.chips[:12], 2):
        places = [topology.coordinates(node) for node in routes(topology).nodes_on(routes(topology).route(src, dst))]
        turned = [next(d for d, (a, b) in enumerate(zip(p, q, strict=True)) if a != b) for p, q in pairwise(places)]
        assert turned == sorted(turned)


def test_around_a_ring_the_shorter_way_and_upwards_where_both_are():
    ring = parse("torus:6")
    assert routes(ring).nodes_on(routes(ring).route(0, 4)) == (0, 5, 4)
    assert routes(ring).nodes_on(routes(ring).route(1, 4)) == (1, 2, 3, 4)


def test_a_route_needs_live_ends():
    broken = parse("mesh:3x3", ["1,1"])
    with pytest.raises(TopologyError, match=r"chip 4 has failed, so there is no route 0->4. Send between live chips"):
        routes(broken).route(0, 4)
    with pytest.raises(TopologyError, match="has no chip 9"):
        routes(broken).route(9, 0)


def test_equal_machines_share_their_routes():
    assert routes(parse("mesh:3x3")) is routes(Topology((3, 3)))


# Switches and shared ports.


def test_a_hop_through_a_switch_takes_two_arcs_and_its_latency_once():
    box = Topology((2, 3), switched=True, latency_s=(5, 1), bytes_per_s=(10, 300))
    found = routes(box)
    way = [found.arcs[number] for number in found.route(0, 2)]
    assert [(arc.latency_s, arc.bytes_per_s) for arc in way] == [(1, 300), (0, 300)]
    assert way[0].head == way[1].tail >= box.size
    both = [found.arcs[number] for number in found.route(0, 5)]
    assert [arc.bytes_per_s for arc in both] == [10, 10, 300, 300]
    assert both[1].head == 3  # through the chip that has both ports
    assert len(found.arcs) == 2 * 2 * box.size


def test_a_failed_chip_leaves_its_switch_standing():
    box = Topology((2, 3), switched=True)
    broken = box.without([(1, 0)])
    found = routes(broken)
    assert len(found.arcs) == 2 * 2 * 5
    assert len(found.route(1, 2)) == 2
    assert 3 not in found.nodes_on(found.route(0, 5))  # dimension order led through the failed chip
    assert len(found.route(0, 5)) == 4
    assert broken.neighbours[4] == (1, 5)


def test_an_uplink_carries_what_all_chips_behind_it_send():
    # Cho et al., 2017, arXiv:1708.02188: rings over tiers of 4 GPUs, 4 hosts, 16 leaves, in units of the vector.
    cluster = parse("ddl-cluster")
    found = routes(cluster)
    load = {dim: Counter() for dim in range(3)}
    sent = {2: Fraction(3, 2), 1: Fraction(3, 8), 0: Fraction(15, 8 * 16)}
    for dim, amount in sent.items():
        for chip in cluster.chips:
            line = cluster.along(chip, dim)
            after = line[(line.index(chip) + 1) % len(line)]
            for number in found.route(chip, after):
                load[dim][number] += amount
    speed = {dim: cluster.bytes_per_s[dim] for dim in range(3)}
    busiest = {
        (dim, tier): max((load[dim][k] for k in load[dim] if found.arcs[k].bytes_per_s == speed[tier]), default=0)
        for dim in range(3)
        for tier in range(3)
    }
    assert busiest[2, 2] == Fraction(3, 2)  # GPU to GPU, nothing on the cards
    assert busiest[2, 1] == busiest[2, 0] == busiest[1, 0] == 0
    assert busiest[1, 1] == Fraction(3, 2)  # four GPUs share the card of their host
    assert busiest[0, 1] == Fraction(15, 32)
    assert busiest[0, 0] == Fraction(15, 8)  # and 16 the uplink of their leaf
    seconds = [sum(found.arcs[k].latency_s for k in found.route(0, dst)) for dst in (1, 4, 16, 255)]
    assert seconds == pytest.approx([1e-6, 5e-6, 6e-6, 6e-6])


@few
@given(machines())
def test_neighbours_are_those_that_a_message_reaches_past_no_other_chip(machine):
    found = routes(machine)
    for chip, others in machine.neighbours.items():
        for other in others:
            between = found.nodes_on(found.route(chip, other))[1:-1]
            assert all(node >= machine.size for node in between)
    ports = {node for arc in found.arcs for node in arc[:2] if node >= machine.size}
    assert all(node < found.nodes for node in ports)
    assert not {node for arc in found.arcs for node in arc[:2]} & machine.failed_chips


# Deadlock.


def every_route(topology):
    return [routes(topology).route(src, dst) for src, dst in permutations(topology.chips, 2)]


@pytest.mark.parametrize("text", ["mesh:7", "mesh:4x5", "mesh:3x3x3", "mesh:2x2", "switch:3x4", "ddl-cluster:2x2x3"])
def test_dimension_order_cannot_deadlock_on_a_whole_mesh(text):
    assert dependency_cycle(every_route(parse(text))) is None


@pytest.mark.parametrize("text", ["torus:5", "torus:4x4", "tpu-v3-multipod:32x32"])
def test_a_ring_with_long_routes_can(text):
    topology = parse(text)
    ways = [
        routes(topology).route(topology.along(0, 0)[k], topology.along(0, 0)[k - 2]) for k in range(topology.shape[0])
    ]
    cycle = dependency_cycle(ways)
    assert cycle is not None
    waits = {pair for way in ways for pair in pairwise(way)}
    assert set(pairwise([*cycle, cycle[0]])) <= waits
    assert len(set(cycle)) == len(cycle) == topology.shape[0]


@few
@given(grids())
def test_single_hops_never_deadlock(topology):
    near = [(chip, other) for chip, others in topology.neighbours.items() for other in others]
    assert dependency_cycle(routes(topology).route(*pair) for pair in near) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 8), max_size=5, unique=True).map(tuple), max_size=8))
def test_a_cycle_is_found_if_and_only_if_there_is_one(ways):
    waits = {}
    for first, then in (pair for way in ways for pair in pairwise(way)):
        waits.setdefault(first, set()).add(then)
    try:
        list(TopologicalSorter(waits).static_order())
        assert dependency_cycle(ways) is None
    except CycleError:
        cycle = dependency_cycle(ways)
        assert all(then in waits[first] for first, then in pairwise([*cycle, cycle[0]]))


# Measures.


@few
@given(grids())
def test_the_diameter_is_the_longest_of_the_shortest_ways(topology):
    assume(len(topology.parts) == 1)
    assert diameter(topology) == max(max(distances(topology, chip).values()) for chip in topology.chips)


def test_measures_of_whole_grids():
    assert diameter(parse("tpu-v3-multipod")) == 16 + 127
    assert diameter(parse("tpu-v4-pod:8x8x8")) == 12
    assert diameter(parse("dgx-h100:4")) == 2
    assert diameter(parse("ddl-cluster:3x3x3")) == 1
    links = {"mesh:4x8": 4, "torus:4x8": 8, "mesh:5x7": 5, "torus:5x7": 10, "mesh:1x9": 1, "torus:6x6x6": 72}
    for text, wide in links.items():
        assert bisection_bytes_per_s(parse(text)) == wide * BYTES_PER_S
    assert bisection_bytes_per_s(parse("mesh:1")) == 0
    assert bisection_bytes_per_s(parse("mesh:4x4", fail_links=["0,1-0,2"])) == 3 * BYTES_PER_S
    assert bisection_bytes_per_s(parse("switch:8")) == 4 * BYTES_PER_S
    assert bisection_bytes_per_s(parse("dgx-h100:2")) == 8 * 50e9
    with pytest.raises(TopologyError, match="is cut into 2 parts"):
        diameter(parse("mesh:3", ["1"]))


# The catalogue.


def test_the_catalogue_agrees_with_what_its_makers_say_of_whole_machines():
    peak = {"tpu-v3-pod": 126e15, "tpu-v4-pod": 1.1e18, "tpu-v5e-pod": 50.63e15, "tpu-v6e-pod": 234.9e15}
    for name, flop_per_s in peak.items():
        machine = parse(name)
        assert machine.size * machine.chip.flop_per_s["bfloat16"] == pytest.approx(flop_per_s, rel=0.03)
    assert parse("tpu-v5p-pod").size == 8960
    middle = {"tpu-v4-pod": 24e12, "tpu-v5e-pod": 1.6e12, "tpu-v6e-pod": 3.2e12}
    for name, bytes_per_s in middle.items():
        assert bisection_bytes_per_s(parse(name)) == pytest.approx(bytes_per_s, rel=0.07)
    # A pod of TPU v3 sums 340 TB/s: every chip sends over its four links at once.
    assert 1024 * 4 * CHIPS["tpu-v3"].link_bytes_per_s == pytest.approx(340e12, rel=0.02)


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_is_whole_connected_and_has_a_source(name):
    machine = parse(name)
    assert str(machine) == name
    assert len(machine.parts) == 1
    assert not machine.failed_chips
    assert MACHINES[name].source
    assert MACHINES[name].about
    if machine.chip is not None and not any(machine.switched):
        assert all(len(others) <= machine.chip.links for others in machine.neighbours.values())


def test_every_chip_is_possible_and_has_a_source():
    for name, chip in CHIPS.items():
        assert chip.name == name
        assert chip.source
        assert chip.flop_per_s["bfloat16"] > 0
        assert 0 < chip.link_latency_s < 1e-3
        assert chip.links * chip.link_bytes_per_s < chip.memory_bytes_per_s < chip.flop_per_s["bfloat16"]


def test_names_take_sizes():
    assert parse("dgx-h100:4").shape == (4, 8)
    assert parse("host-ring:5").shape == (5,)
    assert parse("tpu-v3-multipod:32x64").wrap == (True, False)
    assert parse("tpu-v3-pod:16x32").wrap == (False, True)
    assert parse("tpu-v4-pod:4x4x8").wrap == (True, True, True)
    assert parse("tpu-v4-pod:2x2x4").wrap == (False, False, False)
    assert parse("ddl-cluster:2x3x4").shape == (2, 3, 4)


def test_failures_are_blocks_chips_and_links():
    broken = parse("mesh:8x8", ["2-3,2-5", " 0 , 1 "], ["7,6-7,7", "8-0"])
    assert broken.failed_chips == {18, 19, 20, 21, 26, 27, 28, 29, 1}
    assert broken.failed_links == {(62, 63), (0, 8)}
    assert parse("torus:5", ["3-4"], ["0-4"]).failed_links == {(0, 4)}


@pytest.mark.parametrize(
    ("text", "fail", "links", "message"),
    [
        ("tpu-v3-pods", (), (), "no machine 'tpu-v3-pods'. Nearest: tpu-v3-pod"),
        ("", (), (), "no machine ''. Known: "),
        ("mesh", (), (), "machine 'mesh' has no size. Write positive numbers, as mesh:8x8"),
        ("mesh:8x", (), (), "machine 'mesh:8x' has no size"),
        ("mesh:0x8", (), (), "machine 'mesh:0x8' has no size"),
        ("mesh:-1", (), (), "machine 'mesh:-1' has no size"),
        ("torus:99999x99999", (), (), "has 9,999,800,001 chips in 2 dimensions, and the most are 1,048,576"),
        ("mesh:" + "x".join("1" * 20), (), (), "in 20 dimensions"),
        ("dgx-h100:2x8", (), (), "machine 'dgx-h100:2x8' is not of the form dgx-h100:BOXES"),
        ("tpu-v5e-pod:8", (), (), "is not of the form tpu-v5e-pod:ROWSxCOLUMNS"),
        ("tpu-v3-multipod:16x64", (), (), "is 32 chips by a multiple of 32, not 16x64"),
        ("mesh:8x8", ["3"], (), "--fail '3' names no block of mesh:8x8. Write one place or range for each of its 2"),
        ("mesh:8x8", ["a,b"], (), "--fail 'a,b' names no block"),
        ("mesh:8x8", ["8,0"], (), "8 is no range in dimension 0 of mesh:8x8, which goes from 0 to 7"),
        ("mesh:8x8", ["5-2,0"], (), "5-2 is no range in dimension 0"),
        ("mesh:2x2", ["0-1,0-1"], (), "all 4 chips have failed"),
        ("mesh:8x8", (), ["0,0"], "--fail-link '0,0' names no link. Write its two ends, as 0,0-0,1"),
        ("mesh:8x8", (), ["0,0-1,1"], "has no link 0-9: chip 0 is wired to [1, 8]"),
        ("mesh:8x8", (), ["0,0-0,9"], "has no chip (0, 9)"),
        ("dgx-h100", (), ["0-1"], "has no link 0-1"),
    ],
)
def test_words_that_mean_no_machine_are_refused(text, fail, links, message):
    with pytest.raises(TopologyError) as refused:
        parse(text, fail, links)
    assert message in str(refused.value)


# The JSON form.


@few
@given(machines())
def test_what_is_written_is_read_back_exactly(machine):
    back = from_data(json.loads(json.dumps(to_data(machine))))
    assert back == machine
    exact = [(type(a), type(b)) for a, b in zip(back.latency_s, machine.latency_s, strict=True)]
    assert all(a is b for a, b in exact)


def test_only_the_shape_must_be_there():
    assert from_data({"shape": [2, 3]}) == Topology((2, 3))
    assert to_data(Topology((2,), latency_s=Fraction(1, 3), chip=CHIPS["h100"])) == {
        "shape": [2], "wrap": [False], "failed_chips": [], "failed_links": [], "chip": "h100", "latency_s": ["1/3"],
        "bytes_per_s": [450e9], "switched": [False], "shared": [False], "name": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": None}, '"shape" is None, not a list'),
        ({"shape": []}, '"shape" is []. Give positive whole numbers'),
        ({"shape": [2, True]}, '"shape" holds True, which is no whole number'),
        ({"shape": [2, 2.0]}, '"shape" holds 2.0, which is no whole number'),
        ({"shape": [10**6, 10**6]}, "topology has 1,000,000,000,000 chips in 2 dimensions"),
        ({"shape": [1] * 99}, "in 99 dimensions"),
        ({"wrap": [1, 0]}, '"wrap" holds 1, which is no true or false'),
        ({"wrap": [True]}, "wrap=(True,) does not fit shape=(2, 2)"),
        ({"failed_chips": ["0"]}, "\"failed_chips\" holds '0', which is no whole number"),
        ({"failed_chips": [7]}, "mesh:2x2 has no chip 7"),
        ({"failed_links": [[0, 1, 2]]}, '"failed_links" is not made of pairs of chip numbers'),
        ({"failed_links": [0]}, '"failed_links" holds 0, which is no pair in brackets'),
        ({"failed_links": [[0, 3]]}, "has no link 0-3"),
        ({"latency_s": ["1/0", 1]}, "\"latency_s\" holds '1/0', which is no number"),
        ({"latency_s": ["1" * 2000 + "/1", 1]}, "which is no number"),
        ({"latency_s": [math.nan, 1]}, "is not possible. Give finite numbers 0 or more"),
        ({"bytes_per_s": [0, 1]}, "is not possible. Give finite numbers above 0"),
        ({"chip": "h101"}, "no chip 'h101'. Nearest: h100"),
        ({"chip": {"name": "x"}}, "Give a name of the catalogue, or all of name, flop_per_s"),
        ({"name": "a\x1b[2J"}, '"name" is'),
        ({"name": "a" * 1000}, "Give a short text, or leave it out"),
        ({"shap": [2]}, "topology has no field 'shap'. Nearest: shape"),
    ],
)
def test_data_that_is_no_machine_is_refused(changed, message):
    with pytest.raises(TopologyError) as refused:
        from_data({"shape": [2, 2], **changed})
    assert message in str(refused.value)


def test_a_chip_in_data_is_read_with_care():
    data = to_data(Topology((2,), chip=Chip("own", {"int4": 1.5}, 2, 3.0, 0, 1e9, 4, "made up")))
    for name, value in {"links": -1, "flop_per_s": {"int4": "fast"}, "memory_bytes": math.nan, "source": 3}.items():
        with pytest.raises(TopologyError, match="does not describe one"):
            from_data({**data, "chip": {**data["chip"], name: value}})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**30) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*to_data(Topology((2, 2)))]


@settings(max_examples=150, deadline=None)
@given(st.one_of(json_values, st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4)), st.booleans())
def test_garbage_is_refused_with_a_reason(garbage, shaped):
    if shaped and isinstance(garbage, dict):
        garbage = {**garbage, "shape": [2, 3]}
    try:
        read = from_data(garbage)
    except TopologyError:
        return
    assert from_data(to_data(read)) == read


# Drawings.


def test_a_drawing_shows_chips_links_and_failures():
    broken = parse("torus:3x4", ["1,2"], ["0,0-0,1", "2,3-0,3", "1,0-1,3"])
    assert draw(broken).splitlines()[:8] == [
        "    0 1 2 3",
        "    ~ ~ ~ /",
        "0 ~ o/o-o-o ~",
        "    | |   |",
        "1 / o-o x o /",
        "    | |   |",
        "2 ~ o-o-o-o ~",
        "    ~ ~ ~ /",
    ]
    assert draw(parse("mesh:5", ["3"])).splitlines()[:2] == ["    0 1 2 3 4", "0   o-o-o x o"]


def test_a_large_drawing_keeps_the_failures_and_fits():
    drawn = draw(parse("tpu-v3-multipod", ["4-5,6-9"], ["20,100-20,101"]), width=80, height=40)
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 46
    assert drawn.count("x x x x") == 2
    assert any("o/o" in line and line.startswith("20") for line in lines)
    assert "not drawn" not in drawn


def test_three_dimensions_are_drawn_as_slices():
    drawn = draw(parse("tpu-v4-pod", ["9,3,1"], ["4,0,0-5,0,0"]), height=60)
    assert [line for line in drawn.splitlines() if "slice" in line] == [
        "slice 0",
        ".. 3 slices left out ..",
        "slice 4",
        "slice 5",
        ".. 3 slices left out ..",
        "slice 9",
        ".. 6 slices left out ..",
        "dimension 0, of 16, links the slices, closed into rings",
    ]
    assert "not drawn: 0 failed chips, 1 failed link" in drawn


def test_switches_are_named_below():
    drawn = draw(parse("ddl-cluster:2x2x3", ["1,1,2"]))
    assert "o-o" not in drawn
    assert "dimension 1, of 2, hangs on switches; the chips behind one port share it" in drawn
    assert "dimension 2, of 3, hangs on switches; every chip has its own port" in drawn


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 120), st.integers(40, 200), st.data())
def test_every_drawing_fits_its_width(rows, columns, width, data):
    whole = Topology((rows, columns), (True, True))
    failed = data.draw(st.sets(st.integers(0, whole.size - 1), max_size=min(whole.size - 1, 30)))
    lines = draw(whole.without(failed), width).splitlines()
    drawn = sum(line.count("x") for line in lines[: lines.index("")])
    hidden = [line for line in lines if line.startswith("not drawn")]
    assert all(len(line) <= width for line in lines[: lines.index("")])
    assert drawn + (int(hidden[0].split()[2]) if hidden else 0) == len(failed)


# The command.


def run(*args):
    done = CliRunner().invoke(command, args, prog_name="multipod topology")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_show_draws_and_measures():
    out = run("show", "tpu-v3-multipod", "--fail", "4-5,6-9", "--fail-link", "0,0-31,0").output
    for part in (
        "tpu-v3-multipod (8 chips failed, 1 link failed)",
        "x x x x",
        "chips       4,088, 8 failed",
        "links       8,137, 1 failed",
        "latency     1 us",
        "bandwidth   82 GB/s, one way",
        "diameter    143 hops",
        "bisection   2.624 TB/s",
        "chip        tpu-v3: 123 bfloat16",
        "doi:10.1145/3360307",
    ):
        assert part in out
    assert (
        "in parts    2 that cannot reach each other, of 4, 4 chips" in run("show", "mesh:2x5", "--fail", "0-1,2").output
    )
    boxes = run("show", "dgx-h100:2").output
    assert "links       no wires; switches in dimension 0, 1" in boxes
    assert "latency     5 us (dimension 0), 1 us (dimension 1)" in boxes


def test_list_names_every_machine_and_chip():
    names = [line.split()[0] for line in run("list").output.splitlines() if line]
    assert {*MACHINES, *CHIPS} <= set(names)


def test_strength_prints_sigma_its_proof_and_the_bound():
    out = run("strength", "--on", "mesh:8x8", "--fail", "2-3,2-5", "--bytes", "100M").output
    assert "sigma       19/12 links" in out
    assert "32 chips: 4-7,0-7" in out
    # 12 / 19 of the vector over one link of 50 GB/s.
    assert "bound       1.263 ms to sum 100,000,000 bytes" in out
    assert "every chip alone" in run("strength", "--on", "torus:4x4").output


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("100M", 10**8),
        ("1.5G", 15 * 10**8),
        ("64MiB", 2**26),
        ("2 kB", 2000),
        ("0.5KiB", 512),
        ("3T", 3 * 10**12),
    ],
)
def test_sizes_are_read(text, size):
    assert BYTES.convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "M", "1x", "-3M", "0", "0.3", "1e6", "1,5M", "nan", "1 m"])
def test_other_sizes_are_refused(text):
    refused = run("strength", "--on", "mesh:2x2", "--bytes", text)
    assert refused.exit_code == 2
    assert "is no size. Write a number" in refused.output or "Give a whole number of bytes" in refused.output


def test_bad_words_end_with_one_message(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multipod", "topology", "show", "mesh:8x8", "--fail", "9,9"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("multipod: --fail '9,9': 9 is no range in dimension 0 of mesh:8x8")
    assert "Traceback" not in error


def test_topology_needs_no_jax():
    modules = "multipod.cli.schedules.topology"
    modules += "".join(f", multipod.topology.{name}" for name in ("drawing", "measures", "routes"))
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
