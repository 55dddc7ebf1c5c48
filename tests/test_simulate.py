"""The simulator against golden numbers, closed forms, and a plain event-driven one; its bounds, pictures, traces."""

import heapq
import importlib
import json
from collections import defaultdict, deque
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.cli.schedules.simulate import simulate as command
from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import COLLECTIVES, Schedule, even_bounds, make_step
from multipod.collectives.text import write
from multipod.errors import ScheduleError, TopologyError
from multipod.simulate import best, bounds, compare, simulate
from multipod.simulate.picture import colour, draw, write_picture
from multipod.simulate.trace import events, write_trace
from multipod.topology.machines import parse
from multipod.topology.measures import diameter
from multipod.topology.routes import routes
from multipod.topology.topology import Topology

MODULE = importlib.import_module("multipod.simulate.simulate")
MODES = ("pipelined", "stepped")


def mesh(*shape, latency_s=0, bytes_per_s=1, **fields):
    return Topology(shape, latency_s=latency_s, bytes_per_s=bytes_per_s, **fields)


def schedule_of(topology, steps, pieces=1, **fields):
    """A schedule from steps of (src, dst, first, stop, op); nothing says that it sums anything."""
    made = [make_step(*zip(*step, strict=True)) if step else make_step([], [], []) for step in steps]
    return Schedule("all-reduce", "made up", topology, pieces, even_bounds(pieces), made, **fields)


# Golden numbers: steps, sum over steps of the longest way, seconds of the transfers and bytes on the busiest arc, both
# for a vector of one byte over links of one byte a second.
GOLDEN = [
    ("ring", (4, 4), 30, 30, Fraction(15, 8), Fraction(15, 8)),
    ("bidirectional-ring", (4, 4), 30, 30, Fraction(15, 16), Fraction(15, 16)),
    ("row-column", (4, 4), 12, 36, Fraction(15, 16), Fraction(15, 16)),
    ("row-pairs", (4, 4), 16, 18, Fraction(9, 8), Fraction(1)),
    ("ring", (8, 8), 126, 126, Fraction(63, 32), Fraction(63, 32)),
    ("bidirectional-ring", (8, 8), 126, 126, Fraction(63, 64), Fraction(63, 64)),
    ("row-column", (8, 8), 28, 196, Fraction(63, 64), Fraction(63, 64)),
    ("row-pairs", (8, 8), 36, 66, Fraction(9, 8), Fraction(9, 8)),
    ("row-column", (4, 8), 28, 196, Fraction(47, 32), Fraction(35, 32)),
    ("row-pairs", (4, 8), 32, 34, Fraction(17, 16), Fraction(1)),
    ("bidirectional-ring", (8, 16), 254, 254, Fraction(127, 128), Fraction(127, 128)),
    ("row-column", (8, 16), 60, 900, Fraction(191, 128), Fraction(135, 128)),
    ("row-pairs", (16, 32), 140, None, 2 * (Fraction(63, 128) + Fraction(14, 512)), None),
    ("row-pairs", (32, 32), 156, None, 2 * (Fraction(63, 128) + Fraction(30, 1024)), None),
]
OPTIONS = {"ring": {"along": "cycle"}, "row-column": {"folded": False}, "row-pairs": {"folded": False}}


@pytest.mark.parametrize(("name", "shape", "steps", "hops", "transfer_s", "busiest"), GOLDEN)
def test_golden_numbers_come_out_exactly(name, shape, steps, hops, transfer_s, busiest):
    topology = mesh(*shape)
    schedule = build(name, topology, **OPTIONS.get(name, {}))
    run = simulate(schedule, topology, 1, "stepped", exact=True)
    assert (run.steps, run.seconds) == (steps, transfer_s)
    if busiest is not None:
        assert max(run.link_bytes.values()) == busiest
        slow = mesh(*shape, latency_s=1)
        assert simulate(schedule, slow, 0, "stepped", exact=True).seconds == hops
    assert simulate(schedule, topology, 1, "stepped").seconds == pytest.approx(float(transfer_s), rel=1e-12)
    if hops == steps:  # every way is one link: then waiting for nobody but one's own is never slower
        assert simulate(schedule, topology, 1).seconds <= float(transfer_s) * (1 + 1e-12)


def test_a_ring_of_56_chips_walks_around_a_hole():
    topology = mesh(8, 8).without([(r, c) for r in (2, 3) for c in (2, 3, 4, 5)])
    run = simulate(build("detour-ring", topology), topology, 1, exact=True)
    assert (run.steps, run.seconds) == (110, Fraction(55, 56))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", [2, 3, 7, 16])
def test_a_ring_takes_its_closed_form(p, mode):
    latency_s, bytes_per_s, n = Fraction(1, 10**6), 10**9, 10**6
    topology = mesh(p, wrap=True, latency_s=latency_s, bytes_per_s=bytes_per_s)
    run = simulate(build("ring", topology), topology, n, mode, exact=True)
    assert run.seconds == 2 * (p - 1) * latency_s + Fraction(2 * (p - 1), p) * n / bytes_per_s
    assert simulate(build("ring", topology), topology, n, mode).seconds == pytest.approx(float(run.seconds), rel=1e-12)


@pytest.mark.parametrize("p", [4, 16, 64])
def test_halving_doubling_on_a_switch_takes_its_closed_form(p):
    topology = mesh(p, switched=True, latency_s=Fraction(1, 10**6), bytes_per_s=10**9)
    run = simulate(build("halving-doubling", topology), topology, 10**6, "stepped", exact=True)
    levels = p.bit_length() - 1
    assert run.seconds == 2 * levels * Fraction(1, 10**6) + Fraction(2 * (p - 1), p) * Fraction(10**6, 10**9)


def test_tiers_on_shared_ports_take_the_cost_model_of_ddl():
    """Cho et al., 2017, arXiv:1708.02188: 4 GPUs a host, 4 hosts a leaf, 16 leaves; ports are shared by 4 and 16."""
    beta = {0: Fraction(1, 5), 1: Fraction(1, 3), 2: Fraction(1, 40)}  # seconds a byte: leaves, hosts, GPUs
    alpha = {0: Fraction(2), 1: Fraction(3), 2: Fraction(1, 7)}
    topology = Topology(
        (16, 4, 4),
        switched=True,
        shared=(True, True, False),
        latency_s=tuple(alpha.values()),
        bytes_per_s=tuple(1 / second for second in beta.values()),
    )
    n = 256
    run = simulate(build("multi-ring", topology, tiers=(4, 4, 16)), topology, n, "stepped", exact=True)
    # A message between leaves passes the host's port on its way, and pays its latency too.
    tiers = [(4, alpha[2], beta[2], 4), (4, alpha[1], 4 * beta[1], 16), (16, alpha[0] + alpha[1], 16 * beta[0], 256)]
    assert run.steps == 42
    assert run.seconds == sum(2 * (d - 1) * (a + b * Fraction(n, parts)) for d, a, b, parts in tiers)


def test_tiers_on_shared_ports_carry_the_bytes_of_ddl():
    topology = Topology((16, 4, 4), switched=True, shared=(True, True, False), latency_s=0, bytes_per_s=1)
    run = simulate(build("multi-ring", topology, tiers=(4, 4, 16)), topology, 1, exact=True)
    carried = defaultdict(set)
    for (tail, head), nbytes in run.link_bytes.items():
        carried[tail < topology.size, head < topology.size].add(nbytes)
    between_chips_and_switches = {Fraction(3, 2), Fraction(3, 8) + Fraction(15, 128)}
    assert carried[True, False] == carried[False, True] == between_chips_and_switches
    # A host's port carries 1.5 n for the second tier and 0.46875 n for the third, a leaf's 1.875 n.
    assert carried[False, False] == {Fraction(3, 2) + Fraction(15, 32), Fraction(15, 8)}


# The reference: one event after the other, in plain Python.


def reference(schedule, topology, nbytes):
    """{(step, dst, src, first, stop, op): [(start, arrival), ...]}, and when the last has arrived."""
    ways, bytes_of = routes(topology), np.array(schedule.bounds, object) * Fraction(nbytes) / schedule.denominator
    names, arcs_of, hold, latency, needs = [], [], [], [], []
    written = defaultdict(list)  # cell: the messages that earlier steps wrote it with
    queue = defaultdict(deque)  # arc: the messages that it has still to serve, in order
    for number, step in enumerate(schedule.steps):
        fresh = defaultdict(list)
        for dst, src, first, stop, op in sorted(zip(step.dst, step.src, step.first, step.stop, step.op, strict=True)):
            message = len(names)
            names.append((number, dst, src, first, stop, op))
            arcs_of.append(ways.route(int(src), int(dst)))
            slowest = min(Fraction(ways.arcs[arc].bytes_per_s) for arc in arcs_of[-1])
            hold.append((bytes_of[stop] - bytes_of[first]) / slowest)
            latency.append(sum(Fraction(ways.arcs[arc].latency_s) for arc in arcs_of[-1]))
            needs.append({writer for piece in range(first, stop) for writer in written[src, piece]})
            for piece in range(first, stop):
                fresh[dst, piece].append(message)
            for arc in arcs_of[-1]:
                queue[arc].append(message)
        for cell, messages in fresh.items():
            written[cell] += messages
    times, arrived, started = {}, set(), set()
    happens = [(Fraction(0), -1, "begin")]
    now = Fraction(0)
    while happens:
        now, message, what = heapq.heappop(happens)
        if what == "leave":
            for arc in arcs_of[message]:
                assert queue[arc].popleft() == message
        elif what == "arrive":
            arrived.add(message)
        if happens and happens[0][0] == now:
            continue  # all that happens at this moment first
        for head in {messages[0] for messages in queue.values() if messages} - started:
            if needs[head] <= arrived and all(queue[arc][0] == head for arc in arcs_of[head]):
                started.add(head)
                times[head] = now, now + hold[head] + latency[head]
                heapq.heappush(happens, (now + hold[head], head, "leave"))
                heapq.heappush(happens, (times[head][1], head, "arrive"))
    assert len(arrived) == len(names)
    found = defaultdict(list)
    for message, name in enumerate(names):
        found[name].append(times[message])
    return found, now


def stepped_reference(schedule, topology, nbytes):
    ways, seconds = routes(topology), Fraction(0)
    for step in schedule.steps:
        load, longest = defaultdict(Fraction), Fraction(0)
        for src, dst, first, stop in zip(step.src, step.dst, step.first, step.stop, strict=True):
            way = ways.route(int(src), int(dst))
            longest = max(longest, sum(Fraction(ways.arcs[arc].latency_s) for arc in way))
            units = int(schedule.bounds[stop] - schedule.bounds[first])
            for arc in way:
                load[arc] += Fraction(nbytes) * units / schedule.denominator / Fraction(ways.arcs[arc].bytes_per_s)
        seconds += longest + max(load.values(), default=0)
    return seconds


MACHINES = [
    mesh(3, 3, latency_s=1, bytes_per_s=2),
    mesh(2, 4, wrap=(False, True), latency_s=(Fraction(1, 3), 2), bytes_per_s=(5, 3)),
    mesh(3, 4, latency_s=0, bytes_per_s=1).without([(1, 1), (1, 2)]),
    mesh(2, 3, switched=(True, False), latency_s=(4, 1), bytes_per_s=(1, 7)),
    mesh(2, 2, 2, switched=True, shared=(True, True, False), latency_s=(3, 2, 1), bytes_per_s=(1, 1, 4)),
]


@st.composite
def anything(draw):
    """Random sends on a random machine, proving nothing."""
    topology = draw(st.sampled_from(MACHINES))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, 12), max_size=4))), 12]
    pieces = len(cuts) - 1
    chip = st.sampled_from(topology.chips)

    def send(values):
        src, dst, (first, stop), op = values
        return src, dst, first, max(stop, first + 1), op

    span = st.tuples(st.integers(0, pieces - 1), st.integers(1, pieces))
    one = st.tuples(chip, chip, span, st.integers(0, 2)).filter(lambda v: v[0] != v[1]).map(send)
    steps = draw(st.lists(st.lists(one, max_size=8), max_size=5))
    schedule = schedule_of(topology, steps)
    return replace(schedule, denominator=12, bounds=np.array(cuts)), draw(st.integers(0, 1000))


@settings(max_examples=150, deadline=None)
@given(anything())
def test_fast_and_plain_simulators_agree(case):
    schedule, nbytes = case
    topology = schedule.topology
    found, seconds = reference(schedule, topology, nbytes)
    run = simulate(schedule, topology, nbytes, exact=True)
    assert run.seconds == seconds
    mine, line = defaultdict(list), run.timeline()
    columns = line.step, line.dst, line.src, line.first, line.stop, line.op
    for *name, start, arrival in zip(*(map(int, c) for c in columns), line.start_s, line.arrival_s, strict=True):
        mine[tuple(name)].append((start, arrival))
    assert mine == found
    assert simulate(schedule, topology, nbytes).seconds == pytest.approx(float(seconds), rel=1e-12)
    barriers = simulate(schedule, topology, nbytes, "stepped", exact=True)
    assert barriers.seconds == stepped_reference(schedule, topology, nbytes)
    assert simulate(schedule, topology, nbytes, "stepped").seconds == pytest.approx(float(barriers.seconds), rel=1e-12)
    assert barriers.link_bytes == run.link_bytes


@settings(max_examples=60, deadline=None)
@given(anything(), st.randoms(use_true_random=False))
def test_the_order_of_sends_within_a_step_changes_nothing(case, random):
    schedule, nbytes = case
    shuffled = []
    for step in schedule.steps:
        order = list(range(len(step.src)))
        random.shuffle(order)
        shuffled.append(type(step)(*(column[order] for column in step)))
    other = replace(schedule, steps=shuffled)
    for mode in MODES:
        one, two = (simulate(s, schedule.topology, nbytes, mode) for s in (schedule, other))
        assert one.seconds == two.seconds  # to the last bit
        assert one.link_bytes == two.link_bytes
        assert (one.arc_busy_s == two.arc_busy_s).all()


# What a result says.


def test_what_each_link_carries_and_how_long_it_is_held():
    topology = mesh(1, 3, latency_s=10, bytes_per_s=2)
    run = simulate(schedule_of(topology, [[(0, 2, 0, 1, 0)], [(0, 1, 0, 1, 0)]]), topology, 6)
    assert run.link_bytes == {(0, 1): 12.0, (1, 0): 0.0, (1, 2): 6.0, (2, 1): 0.0}
    assert run.seconds == 3 + max(20, 3 + 10)  # the second leaves when the arc is free, and overtakes
    assert run.busiest == (0, 1)
    assert run.chip_busy_s.tolist() == [6.0, 3.0, 0.0]
    assert (run.messages, run.steps) == (2, 2)
    line = run.timeline()
    assert line.start_s.tolist() == [0.0, 3.0]
    assert line.end_s.tolist() == [3.0, 6.0]
    assert line.arrival_s.tolist() == [23.0, 16.0]
    assert line.nbytes.tolist() == [6.0, 6.0]


def test_pieces_that_travel_together_wait_for_the_last_of_them():
    topology = mesh(3, 1)
    steps = [[(0, 1, 0, 1, 0)], [(0, 1, 1, 2, 0)], [(1, 2, 0, 2, 0)]]
    run = simulate(schedule_of(topology, steps, pieces=2), topology, 2, exact=True)
    assert run.timeline().start_s.tolist() == [0, 1, 2]
    assert run.seconds == 4


def test_ranges_are_looked_up_in_parts(monkeypatch):
    topology = mesh(4, 4, wrap=True, latency_s=1)
    schedule = build("torus-2d", topology)
    whole = [simulate(schedule, topology, 1, exact=exact).seconds for exact in (False, True)]
    monkeypatch.setattr(MODULE, "CELLS_AT_ONCE", 3)
    assert [simulate(schedule, topology, 1, exact=exact).seconds for exact in (False, True)] == whole


def test_one_chip_has_nothing_to_do():
    topology = mesh(1, 1)
    for mode in MODES:
        run = simulate(build("ring", topology), topology, 10**9, mode)
        assert (run.seconds, run.steps, run.link_bytes, run.busiest) == (0.0, 0, {}, None)
        assert (run.bounds.seconds, run.percent_of_bound) == (0, 100.0)
        assert len(run.timeline().step) == 0
    assert simulate(build("ring", topology), topology, 1, exact=True).seconds == 0


@pytest.mark.parametrize("mode", MODES)
def test_no_bytes_take_the_latency(mode):
    topology = mesh(4, wrap=True, latency_s=3)
    run = simulate(build("ring", topology), topology, 0, mode, exact=True)
    assert run.seconds == 6 * 3
    assert set(run.link_bytes.values()) == {0}
    assert run.busiest is None


def test_vectors_of_more_than_2_to_the_31_elements():
    topology = mesh(4, wrap=True)
    schedule = build("ring", topology)
    run = simulate(schedule, topology, 2**45, exact=True)
    assert run.seconds == 2**45 * Fraction(3, 2)
    assert simulate(schedule, topology, 2**45).seconds == 2**45 * 1.5
    assert simulate(schedule, topology, np.int64(2**45)).seconds == 2**45 * 1.5


# What is refused.


@pytest.mark.parametrize("nbytes", [-1, float("nan"), float("inf"), "100M", None, True])
def test_sizes_that_are_none(nbytes):
    topology = mesh(4, wrap=True)
    message = r"nbytes=.* is no size of a vector\. Give a finite number of bytes, 0 or more\."
    with pytest.raises(ScheduleError, match=message):
        simulate(build("ring", topology), topology, nbytes)
    with pytest.raises(ScheduleError, match=message):
        compare(topology, nbytes)


def test_modes_that_are_none():
    topology = mesh(4, wrap=True)
    with pytest.raises(ScheduleError, match=r"mode='fast' is no mode of simulation\. Known: pipelined, stepped\."):
        simulate(build("ring", topology), topology, 1, "fast")


def test_a_schedule_for_other_chips():
    schedule = build("ring", mesh(4, 4))
    with pytest.raises(
        ScheduleError, match=r"for a grid of 4x4 chips, and mesh:2x8 is one of 2x8\. Build the schedule"
    ):
        simulate(schedule, mesh(2, 8), 1)
    one = mesh(4, 4).without([3])
    with pytest.raises(ScheduleError, match=r"for other chips: \(0, 3\) has failed on mesh:4x4 .*, and works there\."):
        simulate(schedule, one, 1)
    with pytest.raises(ScheduleError, match=r"for other chips: \(0, 3\) has failed there, and works here\."):
        simulate(build("ring", one), mesh(4, 4).without([4]), 1)


def test_a_schedule_for_the_same_chips_goes_around_a_link_that_has_failed():
    topology = mesh(4, 4, latency_s=1)
    schedule = build("bidirectional-ring", topology)
    a, b, _ = topology.links[0]
    broken = topology.without(links=[(a, b)])
    assert (a, b) not in simulate(schedule, broken, 1).link_bytes
    assert simulate(schedule, broken, 1).seconds > simulate(schedule, topology, 1).seconds


def test_a_way_that_is_cut():
    schedule = build("ring", mesh(1, 4))
    with pytest.raises(TopologyError, match=r"step 0: .*cut into 2 parts"):
        simulate(schedule, mesh(1, 4).without(links=[(1, 2)]), 1)


@pytest.mark.parametrize(
    ("send", "message"),
    [
        ((0, 9, 0, 1, 0), r"step 1: there is no chip 9\. Chips are numbered 0 to 3\."),
        ((-1, 2, 0, 1, 0), r"step 1: there is no chip -1\."),
        ((2, 2, 0, 1, 0), r"step 1: .*chip 2 sends to itself\. Leave that send out"),
        ((0, 1, 0, 3, 0), r"step 1: chip 0 sends the pieces from 0 to before 3 to chip 1\. Send .* pieces 0 to 1\."),
        ((0, 1, 1, 1, 0), r"step 1: chip 0 sends the pieces from 1 to before 1 to chip 1\."),
        ((0, 3, 0, 1, 0), r"step 1: .*chip 3 has failed"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_sends_that_cannot_be(send, message, mode):
    topology = mesh(2, 2).without([3])
    schedule = schedule_of(topology, [[(0, 1, 0, 2, 0)], [(1, 0, 0, 1, 0), send]], pieces=2)
    with pytest.raises((ScheduleError, TopologyError), match=message):
        simulate(schedule, topology, 1, mode)


def test_too_many_cells_for_pipelined_mode():
    topology = mesh(64, 64, wrap=True)
    schedule = schedule_of(topology, [[(0, 1, 0, 2**17, 0)]], pieces=2**17)
    with pytest.raises(ScheduleError, match=r"4,096 chips x 131,072 pieces, which needs 4\.0 GiB\. Use the stepped"):
        simulate(schedule, topology, 1)
    assert simulate(schedule, topology, 1, "stepped").seconds == 1


def test_too_many_messages_for_a_timeline(monkeypatch):
    topology = mesh(4, wrap=True)
    monkeypatch.setattr(MODULE, "RECORDS", 10)
    with pytest.raises(ScheduleError, match="a timeline of 24 messages does not fit in memory"):
        simulate(build("ring", topology), topology, 1).timeline()


# Bounds.

STRENGTHS = [
    (mesh(4, 4), Fraction(5, 8)),
    (mesh(8, 8), Fraction(9, 16)),
    (mesh(8, 8).without([(r, c) for r in (2, 3) for c in (2, 3)]), Fraction(3, 5)),
    (mesh(8, 8).without([(r, c) for r in (2, 3) for c in (2, 3, 4, 5)]), Fraction(12, 19)),
    (mesh(8, 8, wrap=True), Fraction(63, 128)),
    (mesh(16, 32), Fraction(511, 976)),
    (mesh(5, wrap=True), Fraction(4, 5)),
]


@pytest.mark.parametrize(("topology", "seconds"), STRENGTHS)
def test_strength_bounds(topology, seconds):
    assert bounds(topology, 1).strength_s == seconds
    assert bounds(topology, 1, "all-gather").strength_s == seconds / 2


def test_cut_bounds():
    assert bounds(mesh(4, 4), 12).cut_s == 6  # a corner has two links
    assert bounds(mesh(4, 4), 16, "all-gather").cut_s == Fraction(15, 2)  # and must hear of 15 others
    assert bounds(mesh(4, 4), 16, "reduce-scatter").cut_s == Fraction(15, 2)
    assert bounds(mesh(4, 4, wrap=True), 12, "broadcast").cut_s == 3
    narrow = mesh(2, 8, bytes_per_s=(1, Fraction(1, 10)))
    assert bounds(narrow, 1).cut_s == 5  # between two columns
    assert bounds(mesh(16, switched=True), 1).cut_s == 1
    # Four chips share a port as fast as the links of each.
    assert bounds(mesh(4, 4, switched=True, shared=(True, False)), 1).cut_s == 1
    assert bounds(mesh(4, 4, switched=True, shared=(True, False)), 1).strength_s == Fraction(2 * 3, 4)


def test_latency_bounds():
    for shape, wrap in (((4, 4), False), ((5, 6), True), ((3, 4, 5), (True, False, True)), ((7,), False)):
        topology = mesh(*shape, wrap=wrap, latency_s=Fraction(1, 3))
        assert bounds(topology, 1).latency_s == diameter(topology) * Fraction(1, 3)
    assert bounds(mesh(4, 4, latency_s=(1, 10)), 1).latency_s == 33
    hole = mesh(6, 6, latency_s=1).without([(2, 2), (2, 3), (3, 2), (3, 3)])
    assert bounds(hole, 1).latency_s == diameter(hole) == 10
    assert bounds(mesh(4, 4, latency_s=1), 1, "broadcast").latency_s == 3


def test_bounds_of_a_machine_in_two_parts():
    with pytest.raises(TopologyError, match="cut into 2 parts"):
        bounds(mesh(1, 4).without(links=[(1, 2)]), 1)


def test_peers_of_a_tile_are_bound_by_their_group():
    topology = mesh(4, 4, wrap=True, latency_s=1)
    whole, tiled = bounds(topology, 1), bounds(topology, 1, tile=(2, 2))
    assert tiled.strength_s == Fraction(2 * 4 * 3, 64)
    assert tiled.cut_s == whole.cut_s * 2  # four groups are cut in the middle, where eight links are
    alone = bounds(topology, 1, tile=(4, 4))
    assert alone.seconds == 0


LAW = [
    mesh(4, 4, latency_s=1),
    mesh(4, 4, latency_s=1, wrap=True),
    mesh(2, 8, latency_s=(2, 1), bytes_per_s=(1, 3)),
    mesh(4, 6, latency_s=1).without([(2, 2), (2, 3), (3, 2), (3, 3)]),
    mesh(3, 4, latency_s=1, switched=(True, False)),
    mesh(2, 4, 2, latency_s=1, switched=True, shared=(True, True, False)),
    mesh(2, 2, 3, latency_s=1, wrap=True),
]


@pytest.mark.parametrize("topology", LAW, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_no_schedule_beats_the_bounds(topology, collective):
    for mode in MODES:
        for nbytes in (0, 1, 1000):
            compared = compare(topology, nbytes, collective, mode=mode, exact=True)
            assert compared.simulations
            for name, run in compared.simulations.items():
                assert run.seconds >= run.bounds.seconds, (name, nbytes)
                assert 0 < run.percent_of_bound <= 100


# The choice.


def test_the_fastest_comes_first_and_refusals_say_why():
    topology = mesh(8, 8, latency_s=1e-6, bytes_per_s=50e9).without([(2, 2), (2, 3), (3, 2), (3, 3)])
    compared = compare(topology, 10**8)
    seconds = [run.seconds for run in compared.simulations.values()]
    assert seconds == sorted(seconds)
    assert set(compared.simulations) | set(compared.refusals) == set(ALGORITHMS)
    assert "row-pairs needs every chip of the grid" in compared.refusals["row-pairs"]
    assert best(topology, 10**8).algorithm == next(iter(compared.simulations))


def test_small_and_large_vectors_want_different_algorithms():
    topology = mesh(8, 8, latency_s=1e-6, bytes_per_s=50e9)
    names = ["bidirectional-ring", "double-tree", "halving-doubling"]
    assert best(topology, 10**9, algorithms=names).algorithm == "bidirectional-ring"
    assert best(topology, 64, algorithms=names).algorithm == "halving-doubling"


def test_no_algorithm_fits():
    broken = mesh(4, 4).without([0])
    with pytest.raises(
        ScheduleError, match=r"No algorithm that was tried builds all-reduce on .*\n  row-pairs: row-pairs"
    ):
        best(broken, 1, algorithms=["row-pairs"])
    with pytest.raises(ScheduleError, match=r"There is no algorithm 'rings'\. Nearest: .*ring"):
        best(broken, 1, algorithms=["rings"])


# Pictures and traces.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topology", MACHINES, ids=str)
def test_a_trace_has_every_message_on_every_arc_and_no_two_at_once(topology, mode, tmp_path):
    run = simulate(build("ring", topology), topology, 1000, mode)
    write_trace(run, tmp_path / "trace.json")
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read["otherData"]["seconds"] == run.seconds
    messages = [event for event in read["traceEvents"] if event["ph"] == "X"]
    line, ways = run.timeline(), routes(topology)
    assert len(messages) == sum(len(ways.route(int(a), int(b))) for a, b in zip(line.src, line.dst, strict=True))
    tracks = defaultdict(list)
    for event in messages:
        assert set(event) == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        assert event["cat"] in ("add", "copy")
        tracks[event["pid"], event["tid"]].append((round(1000 * event["ts"]), round(1000 * event["dur"])))
    for track in tracks.values():
        assert all(begin + length <= after for (begin, length), (after, _) in pairwise(sorted(track)))
        assert max(begin + length for begin, length in track) <= run.seconds * 1e9 * (1 + 1e-9)
    named = {(e["pid"], e.get("tid")) for e in read["traceEvents"] if e["name"] in ("process_name", "thread_name")}
    assert named >= set(tracks) | {(pid, None) for pid, _ in tracks}
    assert min(pid for pid, _ in named) > 0


def test_a_trace_that_no_viewer_opens(monkeypatch):
    topology = mesh(4, wrap=True)
    monkeypatch.setattr("multipod.simulate.trace.EVENTS", 10)
    with pytest.raises(ScheduleError, match="its trace has 24 events, and viewers open about 10"):
        list(events(simulate(build("ring", topology), topology, 1)))


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("topology", [*MACHINES, mesh(5), mesh(2, 3, 2, 2, wrap=True), mesh(1)], ids=str)
def test_a_picture_shows_every_arc_inside_the_page(topology):
    run = simulate(build("ring", topology), topology, 1000)
    page = ET.fromstring(draw(run))
    width, height = (float(v) for v in page.get("viewBox").split()[2:])
    strokes = [path for path in page.iter(f"{SVG}path") if path.find(f"{SVG}title") is not None]
    titles = [path.findtext(f"{SVG}title") for path in page.iter() if path.find(f"{SVG}title") is not None][1:]
    assert len({title.split(":")[0] for title in titles}) == len(run.arcs)
    for stroke in strokes:
        x0, y0, x1, y1 = map(float, stroke.get("d").replace("M", "").replace("L", " ").split())
        assert 0 < min(x0, x1) <= max(x0, x1) < width
        assert 0 < min(y0, y1) <= max(y0, y1) < height
    busiest = [s for s in strokes if s.get("stroke") == colour(1)]
    assert bool(busiest) == any(tail < topology.size or head < topology.size for tail, head in busiest_arcs(run))


def busiest_arcs(run):
    return [arc for arc, held in zip(run.arcs, run.arc_busy_s, strict=True) if held and held == max(run.arc_busy_s)]


def test_a_picture_shows_what_has_failed(tmp_path):
    topology = mesh(4, 4).without([(1, 1), (1, 2)], links=[((3, 0), (3, 1))])
    write_picture(simulate(build("ring", topology), topology, 1), tmp_path / "load.svg")
    text = (tmp_path / "load.svg").read_text(encoding="utf-8")
    assert "Crossed: 2 chips and 1 link failed." in text
    whole = draw(simulate(build("ring", mesh(4, 4)), mesh(4, 4), 1))
    assert "Crossed" not in whole


def test_a_picture_of_many_chips_is_small():
    topology = mesh(32, 128, wrap=(True, False))
    assert len(draw(simulate(build("torus-2d", topology), topology, 1, "stepped"))) < 10**6


# The command.


def test_the_command_prints_a_table_draws_and_traces(tmp_path):
    drawn, traced = tmp_path / "load.svg", tmp_path / "trace.json"
    words = ["all-reduce", "--on", "mesh:4x4", "--fail", "1,1", "--bytes", "1M", "--algorithm", "all"]
    done = CliRunner().invoke(command, [*words, "--draw", str(drawn), "--trace", str(traced)])
    assert done.exit_code == 0, done.output
    compared = compare(parse("mesh:4x4", ["1,1"]), 10**6)
    words = [line.split() for line in done.output.splitlines() if line.strip()]
    assert [row[0] for row in words if row[0] in ALGORITHMS] == list(compared.simulations)
    assert "No schedule takes less than" in done.output
    assert "left out: row-column" in done.output
    ET.fromstring(drawn.read_text(encoding="utf-8"))
    assert json.loads(traced.read_text())["traceEvents"]


def test_the_command_takes_a_schedule_from_a_file(tmp_path):
    file, topology = tmp_path / "s.json", parse("torus:4x4")
    write(build("torus-2d", topology), file)
    done = CliRunner().invoke(command, ["--schedule", str(file), "--bytes", "1M", "--mode", "stepped"])
    assert done.exit_code == 0, done.output
    run = simulate(build("torus-2d", topology), topology, 10**6, "stepped")
    assert f"{1e6 * run.seconds:.4g} µs" in done.output
    other = CliRunner().invoke(command, ["--schedule", str(file), "--on", "mesh:3x5"])
    assert "for a grid of 4x4 chips, and mesh:3x5 is one of 3x5" in str(other.exception)
    wrong = CliRunner().invoke(command, ["all-gather", "--schedule", str(file)])
    assert "is a schedule for all-reduce, not all-gather" in str(wrong.exception)
    both = CliRunner().invoke(command, ["--schedule", str(file), "--algorithm", "ring"])
    assert "Leave --algorithm out." in both.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no machine. Give --on"),
        (["--fail", "0,0"], "--fail and --fail-link are about the machine of --on"),
        (["all-sum", "--on", "mesh:4x4"], "'all-sum' is no collective. Nearest: all-"),
        (["--on", "mesh:4x4", "--algorithm", "rings"], "There is no algorithm 'rings'."),
        (["--on", "mesh:4x4", "--mode", "slow"], "mode='slow' is no mode of simulation."),
        (["--on", "mesh:4x4", "--bytes", "-3"], "'-3' is no size."),
        (["--on", "mesh:4x4", "--draw", "nowhere/out.svg"], "nowhere is no folder to write out.svg in."),
        (["--on", "mesh:4x4", "--fail", "0,0", "--algorithm", "row-pairs"], "No algorithm that was tried builds"),
    ],
)
def test_the_command_refuses(words, message):
    done = CliRunner().invoke(command, words)
    assert done.exit_code != 0
    assert message in f"{done.output}{done.exception}"
