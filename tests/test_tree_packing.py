"""Tree packing: within 5 % of the strength bound on every kind of machine, and mended when chips die."""

import random
import re
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from contributions import check
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.collectives.build import build
from multipod.collectives.packing import Tree, flatten, loads, pack, relieve
from multipod.collectives.repair import repair
from multipod.collectives.schedule import Schedule, even_bounds
from multipod.collectives.strength import strength
from multipod.collectives.tree_packing import PERIODS, center, tree_packing
from multipod.collectives.verify import verify
from multipod.errors import ScheduleError, TopologyError
from multipod.simulate import simulate
from multipod.topology.topology import Topology


def machine(shape, wrap=False, hole=None, bytes_per_s=1, latency_s=0, **fields):
    """Links of one byte a second, and a hole given by its (first row, last row, first column, last column)."""
    chips = [(r, c) for r in range(hole[0], hole[1] + 1) for c in range(hole[2], hole[3] + 1)] if hole else []
    return Topology(shape, wrap, failed_chips=chips, bytes_per_s=bytes_per_s, latency_s=latency_s, **fields)


def over_bound(schedule, mode="pipelined", nbytes=1):
    """Simulated time over n / sigma, exactly."""
    topology = schedule.topology
    return simulate(schedule, topology, nbytes, mode, exact=True).seconds / strength(topology).seconds(nbytes)


SMALL = {
    "2": machine((2,)),
    "7": machine((7,)),
    "ring of 5": machine((5,), wrap=True),
    "2x3": machine((2, 3)),
    "3x3x3": machine((3, 3, 3)),
    "4x4": machine((4, 4)),
    "4x4 torus": machine((4, 4), wrap=True),
    "4x4 torus, hole": machine((4, 4), wrap=True, hole=(1, 2, 1, 2)),
    "8x8": machine((8, 8)),
    "8x8, 2x2 hole": machine((8, 8), hole=(2, 3, 2, 3)),
    "8x8, 4x2 hole": machine((8, 8), hole=(2, 5, 2, 3)),
    "8x8 torus": machine((8, 8), wrap=True),
    "8x8 torus, 4x2 hole": machine((8, 8), wrap=True, hole=(2, 5, 2, 3)),
    "8x8, scattered": machine((8, 8)).without([(1, 1), (3, 6), (6, 2), (5, 5)]),
    "8x8, one link": machine((8, 8)).without(links=[((3, 3), (3, 4))]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_within_5_percent_of_the_bound_even_with_a_barrier_after_every_step(name):
    topology = SMALL[name]
    schedule = tree_packing(topology)
    verify(schedule)
    assert 1 <= over_bound(schedule) <= Fraction(105, 100)
    assert 1 <= over_bound(schedule, "stepped") <= Fraction(105, 100)
    for step in schedule.steps:
        assert (step.stop - step.first == 1).all()
        arcs = step.src * topology.size + step.dst
        assert len(np.unique(arcs)) == len(arcs), "a link carries two pieces in one step"


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [(70, 50), (3, 1), (100, 1), (Fraction(10, 3), 3)])
@pytest.mark.parametrize("wrap", [False, True])
def test_within_5_percent_where_links_differ_in_speed(bytes_per_s, wrap):
    schedule = tree_packing(machine((6, 6), wrap, bytes_per_s=bytes_per_s))
    verify(schedule)
    assert 1 <= over_bound(schedule) <= Fraction(105, 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        machine((16, 32)),
        machine((16, 32), hole=(4, 7, 8, 9)),
        machine((16, 32), wrap=True),
        machine((32, 32), wrap=True),
        machine((32, 32)),
        machine((32, 32), hole=(6, 9, 10, 11)),
        pytest.param(machine((32, 32), wrap=True, hole=(6, 7, 10, 11)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_large_machines_come_as_near(topology):
    # Millions of sends: here the steps are counted, and one of them in each part of the schedule looked at.
    schedule = tree_packing(topology)
    packing = schedule.origin
    assert packing.beat.slot == 1
    length = Fraction(len(schedule.steps), schedule.pieces)  # a step moves one piece over a link of one byte a second
    assert 1 <= length / strength(topology).seconds(1) <= Fraction(105, 100)
    load = loads(packing.trees, packing.beat.cost)
    assert all(used <= packing.beat.capacity[link] for link, used in load.items())
    for k in random.Random(0).sample(range(len(schedule.steps)), 20):
        step = schedule.steps[k]
        arcs = step.src.astype(np.int64) * topology.size + step.dst
        assert len(np.unique(arcs)) == len(arcs)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [0, 1, 1e3, 1e6, 1e9])
def test_the_number_of_rounds_suits_the_vector(nbytes):
    topology = Topology((8, 8))
    chosen = tree_packing(topology, nbytes=nbytes)
    check(tree_packing(Topology((3, 4)), nbytes=nbytes))
    seconds = simulate(chosen, topology, nbytes).seconds
    for rounds in (1, 10, 100):
        assert seconds <= 1.1 * simulate(tree_packing(topology, rounds=rounds), topology, nbytes).seconds
    if nbytes == 1e9:
        assert seconds <= 1.06 * strength(topology).seconds(nbytes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds=0 is not possible. Give a whole number, 1 or more"),
        ({"rounds": "many"}, "rounds='many' is not possible"),
        ({"rounds": 10**9}, "1000000000 rounds of 8 trees are more than 16,777,216 pieces. Ask for fewer rounds"),
        ({"within": float("nan")}, "within=nan is not possible. Give a number above 0, such as 0.045"),
        ({"within": 1e-9}, "pieces. Ask for fewer rounds, or come less near to the bound"),
        ({"nbytes": -1}, "nbytes=-1 is not possible. Give a number, 0 or more"),
        ({"nbytes": float("inf")}, "nbytes=inf is not possible"),
        ({"collective": "broadcast"}, "does not do broadcast. It does: all-reduce"),
    ],
)
def test_options_that_make_no_schedule_are_refused(options, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        tree_packing(Topology((4, 4)), **options)


def test_machines_that_admit_no_packing_are_refused():
    with pytest.raises(ScheduleError, match=r"has switches.*Use multi-ring"):
        tree_packing(Topology((4, 4), switched=True))
    with pytest.raises(TopologyError, match="is cut into 2 parts"):
        tree_packing(Topology((4,), failed_chips=[1]))
    with pytest.raises(ScheduleError, match=f"no period of up to {PERIODS.stop - 1} pieces comes within 0.00%"):
        tree_packing(Topology((8, 8), bytes_per_s=(97, 89)), within=1e-6)


def test_one_chip_has_nothing_to_do():
    schedule = tree_packing(Topology((2, 2), failed_chips=[0, 1, 2]))
    assert len(schedule.steps) == 0
    verify(schedule)


def spans(tree, topology):
    chips = [tree.root, *tree.parent]
    assert sorted(chips) == list(topology.chips)
    assert all(parent in topology.neighbours[chip] for chip, parent in tree.parent.items())
    assert sorted(tree.below(tree.root)) == list(topology.chips)
    assert {chip for children in tree.children.values() for chip in children} == set(tree.parent)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(2, 5), st.tuples(st.booleans(), st.booleans()), st.data())
def test_as_many_trees_are_packed_as_the_strength_admits(rows, columns, wrap, data):
    topology = Topology((rows, columns), wrap)
    links = data.draw(st.lists(st.sampled_from([(a, b) for a, b, _ in topology.links]), max_size=4))
    topology = topology.without(links=links)
    if len(topology.parts) > 1:
        return
    ticks = data.draw(st.integers(1, 7))
    capacity = {(a, b): ticks for a, b, _ in topology.links}
    count = int(ticks * strength(topology).value)
    root, radius = center(topology.neighbours)
    trees = pack(topology.neighbours, capacity, count, root)
    assert len(trees) == count
    assert max(loads(trees, capacity).values()) <= ticks
    for tree in trees:
        spans(tree, topology)
        assert tree.root == root
        assert max(tree.depths().values()) >= radius
    with pytest.raises(ValueError, match=f"{count + 1} trees do not fit"):
        pack(topology.neighbours, capacity, count + 1, root)


def test_trees_are_made_shallower_without_overloading_a_link():
    topology = Topology((4, 4))
    snake = [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11, 15, 14, 13, 12]
    tree = Tree(0)
    for parent, chip in pairwise(snake):
        tree.attach(chip, parent)
    capacity = {(a, b): 1 for a, b, _ in topology.links}
    flatten([tree], topology.neighbours, capacity)
    spans(tree, topology)
    assert max(tree.depths().values()) == 6


def test_overloaded_links_are_relieved():
    topology = Topology((3, 3), wrap=True)
    capacity = {(a, b): 1 for a, b, _ in topology.links}
    root, _ = center(topology.neighbours)
    one, two = (pack(topology.neighbours, capacity, 1, root)[0] for _ in range(2))
    assert max(loads([one, two], capacity).values()) == 2
    relieve([one, two], capacity)
    assert max(loads([one, two], capacity).values()) == 1
    spans(one, topology)
    spans(two, topology)


MENDED = [
    ("8x8", {"chips": [(3, 3)]}),
    ("8x8", {"chips": [(0, 1)]}),
    ("8x8", {"chips": [(2, 2), (2, 3), (3, 2), (3, 3)]}),
    ("8x8", {"links": [((3, 3), (3, 4))]}),
    ("8x8, 2x2 hole", {"chips": [(6, 6)], "links": [((0, 0), (0, 1))]}),
    ("8x8 torus", {"chips": [(r, c) for r in (4, 5, 6, 7) for c in (0, 1)]}),
    ("4x4 torus", {"chips": [(0, 0), (1, 3)]}),
    ("7", {"chips": [0]}),
    ("2", {"chips": [0]}),
]


@pytest.mark.parametrize(("name", "broken"), MENDED)
def test_a_mended_schedule_is_proven_and_nearly_as_fast(name, broken):
    before = tree_packing(SMALL[name])
    topology = SMALL[name].without(**broken)
    after = repair(before, topology)
    verify(after, topology)
    assert after.topology == topology
    if len(topology.chips) > 1:
        assert over_bound(after, "stepped") <= Fraction(112, 100)


def test_mended_again_and_again_until_one_chip_is_left():
    schedule = tree_packing(machine((4, 4)), rounds=3)
    order = random.Random(1)
    while len(schedule.topology.chips) > 1:
        broken = schedule.topology.without([order.choice(schedule.topology.chips)])
        if len(broken.parts) > 1:
            with pytest.raises(TopologyError, match="is cut into"):
                repair(schedule, broken)
            broken = broken.without(chip for part in broken.parts[1:] for chip in part)
        schedule = repair(schedule, broken)
        check(schedule)


def test_a_tree_that_lost_nothing_stays_as_it_was():
    before = tree_packing(machine((8, 8)))
    gone = (3 * 8 + 3, 3 * 8 + 4)
    topology = before.topology.without(links=[gone])
    after = repair(before, topology)
    untouched = [tree for tree in before.origin.trees if not tree.has(gone)]
    kept = {frozenset(tree.edges()) for tree in after.origin.trees}
    assert any(frozenset(tree.edges()) in kept for tree in untouched)
    assert all(not tree.has(gone) for tree in after.origin.trees)
    assert any(tree.has(gone) for tree in before.origin.trees), "the old schedule must not change"


def test_what_cannot_be_mended_is_refused():
    topology = machine((4, 4))
    schedule = tree_packing(topology)
    with pytest.raises(ScheduleError, match=r"was not built here by tree-packing.*Build one for the broken machine"):
        repair(build("ring", topology), topology.without([0]))
    with pytest.raises(ScheduleError, match=r"another machine. Build one for it"):
        repair(schedule, machine((4, 5)))
    with pytest.raises(ScheduleError, match=r"another machine"):
        repair(schedule, machine((4, 4), bytes_per_s=2))
    hurt = topology.without([5], links=[(0, 1)])
    with pytest.raises(ScheduleError, match=r"chips \[5\] had failed in .*, and are back. Build a schedule anew"):
        repair(tree_packing(hurt), topology)
    with pytest.raises(ScheduleError, match=r"links \[\(0, 1\)\] had failed"):
        repair(tree_packing(hurt), topology.without([5]))
    check(repair(tree_packing(hurt), topology.without([0, 5])))  # the link went with its chip
    by_hand = Schedule("all-reduce", "tree-packing", Topology((1,)), 1, even_bounds(1), ())
    with pytest.raises(ScheduleError, match="no trees to mend"):
        repair(by_hand, Topology((1,)))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(8, 8), (5, 9), (3, 3, 3)]), st.sampled_from([0.03, 0.1, 0.25]), st.randoms(use_true_random=False)
)
def test_every_connected_mesh_gets_a_proven_schedule_and_a_split_one_an_error(shape, share, rng):
    whole = machine(shape, wrap=rng.random() < 0.5)
    chips = [chip for chip in range(whole.size) if rng.random() < share][:-1]
    topology = whole.without(chips, [(a, b) for a, b, _ in whole.links if rng.random() < share / 2])
    if len(topology.parts) > 1:
        with pytest.raises(
            TopologyError, match=f"is cut into {len(topology.parts)} parts .*: {len(topology.parts[0])} "
        ):
            build("tree-packing", topology)
        topology = topology.without(chip for part in topology.parts[1:] for chip in part)
    for name in ("tree-packing", "detour-ring", "ring", "double-tree"):
        verify(build(name, topology, **({"rounds": 1} if name == "tree-packing" else {})), topology)
    verify(repair(tree_packing(whole, rounds=1), topology), topology)
