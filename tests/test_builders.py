"""Every builder on many machines, followed contribution by contribution, and held to the published numbers."""

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from contributions import check
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.checks import check_whole
from multipod.collectives.detour_rings import cycle, detour
from multipod.collectives.double_tree import two_trees
from multipod.collectives.schedule import Schedule
from multipod.errors import ScheduleError, TopologyError
from multipod.topology.routes import routes
from multipod.topology.topology import Topology

WHOLE = [
    *(Topology((n,)) for n in (1, 2, 3, 4, 5, 7, 8, 13)),
    *(Topology((n,), wrap=True) for n in (2, 3, 5, 8)),
    *(Topology(shape) for shape in ((1, 1), (1, 4), (2, 2), (2, 3), (3, 2), (3, 3), (4, 4), (4, 5), (5, 5), (2, 3, 4))),
    *(Topology(shape) for shape in ((3, 3, 3), (2, 1, 5), (1, 3, 3))),
    *(Topology(shape, wrap=True) for shape in ((4, 4), (5, 3), (2, 6), (3, 3, 3))),
    Topology((4, 6), wrap=(True, False)),
    Topology((4, 6), wrap=(False, True)),
    Topology((3, 3), wrap=(False, True)),
    Topology((3, 5, 3), wrap=(False, True, False)),
    Topology((2, 2, 4), switched=True),
    Topology((3, 4), switched=(True, False)),
    Topology((4, 4), failed_links=[(0, 1), (5, 9)]),
]
BROKEN = [
    Topology((4, 4), failed_chips=[(0, 1)]),
    Topology((6, 6), failed_chips=[(2, 2), (2, 3), (3, 2), (3, 3)]),
    Topology((3, 4), failed_chips=[0, 5, 11]),
    Topology((6,), failed_chips=[0]),
    Topology((6,), wrap=True, failed_chips=[2]),
    Topology((3, 3, 3), failed_chips=[13, 0], failed_links=[(1, 2)]),
    Topology((4, 4), wrap=True, failed_chips=range(1, 16)),
    Topology((2, 2, 4), switched=True, failed_chips=[5, 6]),
]
CASES = [(name, collective) for name, builder in ALGORITHMS.items() for collective in builder.collectives]


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_every_builder_does_its_collectives_on_every_machine_or_says_why_not(name, collective):
    refused = []
    for topology in [*WHOLE, *BROKEN]:
        try:
            schedule = build(name, topology, collective)
        except ScheduleError:
            refused.append(topology)
            assert topology.failed_chips or name == "row-pairs" or (name == "tree-packing" and any(topology.switched))
            continue
        assert (schedule.collective, schedule.algorithm) == (collective, name)
        check(schedule)
    if ALGORITHMS[name].broken and name not in ("multi-ring", "tree-packing"):
        assert not refused
    if name not in ("row-pairs", "multi-ring", "tree-packing"):
        assert not set(refused) & set(WHOLE)


@st.composite
def machines(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple).filter(lambda s: np.prod(s) <= 30))
    topology = Topology(shape, wrap=draw(st.tuples(*[st.booleans()] * len(shape))))
    chips = draw(st.sets(st.integers(0, topology.size - 1), max_size=min(4, topology.size - 1)))
    topology = topology.without(chips)
    wires = [(a, b) for a, b, _ in topology.links]
    return topology.without(links=draw(st.lists(st.sampled_from(wires), max_size=3)) if wires else ())


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_machines(data):
    topology = data.draw(machines())
    name, collective = data.draw(st.sampled_from(CASES))
    if len(topology.parts) > 1:
        with pytest.raises(TopologyError, match="cut into"):
            build(name, topology, collective)
        return
    try:
        schedule = build(name, topology, collective)
    except ScheduleError:
        assert topology.failed_chips or name == "row-pairs"
        return
    check(schedule)


@settings(max_examples=60, deadline=None)
@given(machines(), st.integers(1, 5), st.data())
def test_broadcast_from_any_root_in_any_number_of_segments(topology, segments, data):
    assume(len(topology.parts) == 1)
    root = data.draw(st.sampled_from(topology.chips))
    for name in ("ring", "double-tree"):
        check(build(name, topology, "broadcast", root=root, segments=segments), root)
    check(build("double-tree", topology, segments=segments))
    check(build("ring", topology, "broadcast", root=topology.coordinates(root), along="cycle"), root)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4), st.sampled_from(CASES), st.booleans())
def test_tiers_and_rings(tiers, rings, case, fail):
    p = int(np.prod(tiers))
    topology = Topology((p + fail,), failed_chips=[0] if fail else ())
    for collective in ALGORITHMS["multi-ring"].collectives:
        schedule = build("multi-ring", topology, collective, tiers=tiers, rings=rings)
        assert len(schedule.steps) == sum(n - 1 for n in tiers) * (2 if collective == "all-reduce" else 1)
        check(schedule)


@pytest.mark.parametrize("name", ["ring", "torus-2d", "row-column"])
@pytest.mark.parametrize(
    ("shape", "tile", "wrap"),
    [
        ((2, 8), (1, 4), False),
        ((4, 8), (1, 4), True),
        ((4, 4), (2, 2), False),
        ((3, 4, 6), (1, 2, 2), True),
        ((2, 4), (2, 4), True),
    ],
)
def test_peers_of_a_tile_are_skipped(name, shape, tile, wrap):
    schedule = build(name, Topology(shape, wrap=wrap), tile=tile)
    check(schedule)
    home = {chip: group for group, chips in enumerate(schedule.groups) for chip in chips}
    assert all(
        home[a] == home[b] for step in schedule.steps for a, b in zip(step.src.tolist(), step.dst.tolist(), strict=True)
    )
    assert len(schedule.groups) == np.prod(tile)


def test_tiles_with_failed_chips_have_rings_of_different_lengths():
    topology = Topology((4, 8), failed_chips=[(0, 1), (2, 1), (3, 2)])
    schedule = build("ring", topology, tile=(1, 4))
    assert sorted(map(len, schedule.groups)) == [6, 7, 8, 8]
    assert schedule.denominator == 168
    check(schedule)


# Published numbers ------------------------------------------------------------------------------------------


def link_level(schedule: Schedule) -> tuple[int, int, Fraction, Fraction]:
    """Steps, the sum of their longest hops, time in n beta if steps are barriers, load of the busiest arc in n."""
    ways, sizes = routes(schedule.topology), np.diff(schedule.bounds)
    total: Counter[int] = Counter()
    hops, busiest = 0, 0
    for step in schedule.steps:
        load: Counter[int] = Counter()
        longest = 0
        for src, dst, first, stop, _ in zip(*(column.tolist() for column in step), strict=True):
            way = ways.route(src, dst)
            longest = max(longest, len(way))
            load.update(dict.fromkeys(way, int(sizes[first:stop].sum())))
        hops += longest
        busiest += max(load.values())
        total.update(load)
    whole = schedule.denominator
    return len(schedule.steps), hops, Fraction(busiest, whole), Fraction(max(total.values()), whole)


@pytest.mark.parametrize(
    ("shape", "name", "options", "steps", "hops", "time", "arc"),
    [
        ((4, 4), "ring", {"along": "cycle"}, 30, 30, "15/8", "15/8"),
        ((4, 4), "bidirectional-ring", {}, 30, 30, "15/16", "15/16"),
        ((4, 4), "row-column", {"folded": False}, 12, 36, "15/16", "15/16"),
        ((4, 4), "row-column", {}, 12, 24, "15/16", "15/16"),
        ((4, 4), "row-pairs", {"folded": False}, 16, 18, "9/8", "1"),
        ((8, 8), "ring", {"along": "cycle"}, 126, 126, "63/32", "63/32"),
        ((8, 8), "bidirectional-ring", {}, 126, 126, "63/64", "63/64"),
        ((8, 8), "row-column", {"folded": False}, 28, 196, "63/64", "63/64"),
        ((8, 8), "row-column", {}, 28, 56, "63/64", "63/64"),
        ((8, 8), "row-pairs", {"folded": False}, 36, 66, "9/8", "9/8"),
        ((4, 8), "row-column", {"folded": False}, 28, 196, "47/32", "35/32"),
        ((4, 8), "row-pairs", {"folded": False}, 32, 34, "17/16", "1"),
        ((8, 16), "bidirectional-ring", {}, 254, 254, "127/128", "127/128"),
        ((8, 16), "row-column", {"folded": False}, 60, 900, "191/128", "135/128"),
        ((16, 32), "row-pairs", {}, 140, None, "133/128", None),
    ],
)
def test_the_golden_table_of_fault_free_schemes(shape, name, options, steps, hops, time, arc):
    found = link_level(build(name, Topology(shape), **options))
    expected = (steps, hops, Fraction(time), arc and Fraction(arc))
    assert [value for value, known in zip(found, expected, strict=True) if known is not None] == [
        value for value in expected if value is not None
    ]


@pytest.mark.parametrize(
    ("holes", "steps", "time"),
    [([(2, 2), (2, 4)], 110, "55/56"), ([(2, 2)], 118, "59/60"), ([(0, 0), (6, 6), (2, 4)], 102, "51/52")],
)
def test_a_ring_around_aligned_holes_loads_links_like_one_without(holes, steps, time):
    failed = [(y + i, x + j) for y, x in holes for i in (0, 1) for j in (0, 1)]
    schedule = build("detour-ring", Topology((8, 8), failed_chips=failed))
    assert link_level(schedule) == (steps, steps, Fraction(time), Fraction(time))
    assert not schedule.notes


def test_ddl_on_4x4x16():
    topology = Topology((16, 4, 4), switched=True, shared=(True, True, False))
    schedule = build("multi-ring", topology, tiers=(4, 4, 16))
    sent = Counter()
    sizes = np.concatenate([[0], np.cumsum(np.diff(schedule.bounds))])
    for step in schedule.steps:
        for src, dst, amount in zip(
            step.src.tolist(), step.dst.tolist(), (sizes[step.stop] - sizes[step.first]).tolist(), strict=True
        ):
            differing = [a != b for a, b in zip(topology.coordinates(src), topology.coordinates(dst), strict=True)]
            assert sum(differing) == 1
            sent[differing.index(True), src] += Fraction(amount, schedule.denominator)
    assert len(schedule.steps) == 42 == 6 + 6 + 30
    assert [{sent[tier, chip] for chip in topology.chips} for tier in (2, 1, 0)] == [
        {Fraction(3, 2)},
        {Fraction(3, 8)},
        {Fraction(15, 128)},
    ]
    assert sum((Fraction(3, 2), Fraction(3, 8), Fraction(15, 128))) == Fraction(2 * 255, 256)
    assert len(build("multi-ring", Topology((256,)), tiers=(256,)).steps) == 510
    assert len(build("multi-ring", topology, rings=3).steps) == 42


def test_unequal_shares_of_row_column_shorten_the_barrier_time_of_oblong_meshes():
    plain, better = (link_level(build("row-column", Topology((4, 8)), shares=shares))[2] for shares in ((), (5, 3)))
    assert better < plain == Fraction(47, 32)


def test_a_torus_is_swept_both_ways_at_once():
    steps, hops, time, _ = link_level(build("torus-2d", Topology((8, 8), wrap=True)))
    assert (steps, hops, time) == (28, 28, Fraction(63, 64))
    assert link_level(build("row-column", Topology((8, 8), wrap=True)))[2] == Fraction(63, 128)


def test_the_multipod_goes_along_its_closed_dimension_first():
    schedule = build("torus-2d", Topology((4, 16), wrap=(True, False)))
    assert link_level(schedule)[:3] == (36, 6 + 60, 2 * (3 * Fraction(1, 8) + 15 * Fraction(1, 64)))
    assert {abs(a - b) % 16 for a, b in zip(schedule.steps[0].src, schedule.steps[0].dst, strict=True)} == {0}
    turned = build("torus-2d", Topology((16, 4), wrap=(False, True)))
    assert link_level(turned)[2] == link_level(schedule)[2]


def test_4096_chips_are_built_lazily():
    multipod = Topology((32, 128), wrap=(True, False))
    assert len(build("torus-2d", multipod).steps) == 2 * (31 + 127)
    ring = build("ring", multipod)
    assert len(ring.steps) == 2 * 4095
    step = ring.steps[4095]
    assert len(step.src) == 4096
    assert np.array_equal(step.first, step.src)
    assert np.array_equal(ring.steps[-1].dst, (ring.steps[-1].src + 1) % 4096)


@pytest.mark.parametrize("p", [*range(1, 40), 100, 127, 128, 1000])
def test_the_two_trees_share_no_busy_place_and_are_low(p):
    trees = two_trees(p)
    assert not set(trees[0].values()) & set(trees[1].values())
    for tree in trees:
        assert len(tree) == p - 1
        assert max(Counter(tree.values()).values(), default=0) <= 2
        for place in range(p):
            depth = 0
            while place in tree:
                place, depth = tree[place], depth + 1
            assert depth <= max(1, 2 * p.bit_length() - 2)
    steps = len(build("double-tree", Topology((p,)), segments=4).steps)
    assert steps <= (2 * 4 + 4 * p.bit_length() + 2 if p > 1 else 0)


# Rings --------------------------------------------------------------------------------------------------------


def long_hops(topology, order):
    ways = routes(topology)
    hops = zip(order, [*order[1:], order[0]], strict=True) if len(order) > 1 else ()
    return [length for length in (len(ways.route(a, b)) for a, b in hops) if length > 1]


@pytest.mark.parametrize("topology", [t for t in WHOLE if not t.failed_links and not any(t.switched)], ids=str)
def test_cycles_of_whole_grids_have_as_few_long_hops_as_can_be(topology):
    order, notes = cycle(topology)
    assert sorted(order) == list(topology.chips)
    sizes = [n for n in topology.shape if n > 1]
    least = sizes[0] - 2 if len(sizes) == 1 else topology.size % 2
    if any(topology.wrap) or topology.size <= 2:
        least = 0
    assert long_hops(topology, order) == [2] * least
    assert bool(notes) == bool(least)


@pytest.mark.parametrize(
    ("hole", "hopeless"), [((2, 2), 8), ((1, 2), 8), ((2, 1), 8), ((3, 2), 8), ((2, 4), 8), ((1, 4), 8)]
)
def test_a_cycle_is_found_around_every_hole_that_has_one(hole, hopeless):
    # How many positions on 8 x 8 have none is known from counting all cycles by transfer matrices.
    without = 0
    for y in range(9 - hole[0]):
        for x in range(9 - hole[1]):
            chips = [(y + i, x + j) for i in range(hole[0]) for j in range(hole[1])]
            topology = Topology((8, 8), failed_chips=chips)
            order, notes = detour(topology)
            assert sorted(order) == list(topology.chips)
            assert bool(long_hops(topology, order)) == bool(notes)
            without += bool(notes)
    assert without == hopeless


def test_one_failed_chip_costs_one_hop_of_two_links_and_no_board():
    topology = Topology((8, 8), failed_chips=[(3, 3)])
    schedule = build("detour-ring", topology)
    assert long_hops(topology, detour(topology)[0]) == [2]
    (note,) = schedule.notes
    assert note.startswith("1 of the 63 hops of the ring take more than one link: ")
    assert note.endswith("(2 links); any ring of these chips takes 1 links more than chips")


def test_rings_around_scattered_failures_have_few_long_hops():
    choose = random.Random(3)
    for shape, failures in (((16, 16), 12), ((32, 32), 20), ((6, 6, 6), 5)):
        topology = Topology(shape)
        topology = topology.without(choose.sample(range(topology.size), failures))
        wires = [(a, b) for a, b, _ in topology.links]
        topology = topology.without(links=choose.sample(wires, 3))
        assert len(topology.parts) == 1
        order, _ = detour(topology)
        assert sorted(order) == list(topology.chips)
        assert set(long_hops(topology, order)) <= {2, 3}
        assert len(long_hops(topology, order)) <= failures
        assert detour(topology) == detour(
            Topology(shape, failed_chips=topology.failed_chips, failed_links=topology.failed_links)
        )


# Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "collective", "options", "words"),
    [
        ("rign", "all-reduce", {}, r"There is no algorithm 'rign'\. Nearest: ring"),
        ("ring", "all-redcue", {}, r"'all-redcue' is no collective\. Nearest: all-reduce"),
        (
            "row-pairs",
            "broadcast",
            {},
            r"row-pairs does all-reduce, not broadcast\. For broadcast use ring, double-tree",
        ),
        ("torus-2d", "all-reduce", {"tiers": (4,)}, r"torus-2d has no option tiers\. It has tile, folded\."),
        ("detour-ring", "all-reduce", {"root": 1}, r"detour-ring has no option root\. It has none\."),
        ("ring", "all-reduce", {"root": 1}, "all-reduce has no root"),
        ("ring", "all-reduce", {"along": "snake"}, "Give 'ranks' or 'cycle'"),
        ("ring", "all-reduce", {"along": "cycle", "tile": (1, 2)}, "no tile can be skipped"),
        ("ring", "reduce-scatter", {"tile": (1, 2)}, "skipped by all-reduce only"),
        ("ring", "broadcast", {"segments": 0}, "Give a whole number of 1 or more"),
        ("double-tree", "broadcast", {"segments": 1.5}, "Give a whole number of 1 or more"),
        ("torus-2d", "all-reduce", {"tile": (1, 3)}, r"tile=\(1, 3\) does not tile mesh:4x4"),
        ("torus-2d", "all-reduce", {"tile": (2,)}, "one size for each dimension"),
        ("row-column", "all-reduce", {"shares": (1, 0)}, "Give 2 numbers above 0"),
        (
            "multi-ring",
            "all-reduce",
            {"tiers": (4, 3)},
            r"tiers=\(4, 3\) multiply to 12, and mesh:4x4 has 16 live chips",
        ),
        ("multi-ring", "all-reduce", {"tiers": (-4, -4)}, "multiply to 16"),
        ("multi-ring", "all-reduce", {"rings": 0}, "no number of rings"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_next_move(name, collective, options, words):
    with pytest.raises(ScheduleError, match=words):
        build(name, Topology((4, 4)), collective, **options)


def test_a_dead_root_is_refused():
    with pytest.raises(ScheduleError, match=r"the root \(0, 1\) has failed"):
        build("ring", Topology((4, 4), failed_chips=[1]), "broadcast", root=(0, 1))
    with pytest.raises(TopologyError, match="has no chip 16"):
        build("double-tree", Topology((4, 4)), "broadcast", root=16)


def test_a_broken_machine_is_told_what_does_without_the_lost_chips():
    broken = Topology((4, 4), failed_chips=[5])
    with pytest.raises(ScheduleError) as error:
        check_whole("torus-2d", broken)
    names = str(error.value).split("does not: ")[1].rstrip(".").split(", ")
    for name in set(names) - {"tree-packing"}:
        assert ALGORITHMS[name].broken
        check(build(name, broken))
    for name in set(ALGORITHMS) - set(names) - {"multi-ring"}:
        assert not ALGORITHMS[name].broken
    with pytest.raises(
        ScheduleError, match=r"has 15 live chips\. Give tiers that multiply to 15, fastest first; \(3, 5\) do"
    ):
        build("multi-ring", broken)


def test_every_docstring_gives_steps_bound_and_source():
    for builder in ALGORITHMS.values():
        text = builder.function.__doc__
        assert "steps" in text
        assert "n beta" in text
        assert "Source:" in text
        assert builder.source.startswith(("arXiv:", "doi:"))


def test_the_checker_refuses_wrong_schedules():
    good = build("ring", Topology((4,)))
    steps = list(good.steps)
    twice = steps[1]._replace(dst=steps[1].dst * 0 + 3, first=steps[1].first * 0, stop=steps[1].stop * 0 + 1)
    for wrong, words in (
        (steps[:-1], "at the end chip 0 has 1101, not 1111, in piece 1"),
        ([*steps[:3], steps[2]], "step 3: piece 1 added twice on chip 1"),
        ([twice], "step 0: two writes to piece 0 on chip 3"),
        ([steps[0]._replace(stop=steps[0].first)], "sends pieces"),
    ):
        with pytest.raises(AssertionError, match=words):
            check(Schedule("all-reduce", "ring", good.topology, 4, good.bounds, wrong))
    gather = build("ring", Topology((4,)), "all-gather")
    backwards = Schedule("all-gather", "ring", gather.topology, 4, gather.bounds, gather.steps[::-1])
    with pytest.raises(AssertionError, match="not 1111"):
        check(backwards)
