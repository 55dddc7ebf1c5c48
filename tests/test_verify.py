"""`verify`: right schedules are proven, wrong ones refused with the reason, whatever was done to them."""

import importlib
import json
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import ADASUM, ADD, COPY, OPS, Schedule, Step, Steps, even_bounds, make_step
from multipod.collectives.verify import verify
from multipod.errors import ScheduleError, TopologyError
from multipod.topology.topology import Topology

room = importlib.import_module("multipod.collectives.verify")  # the package has a function of that name

PAGE = Path(__file__).parents[1] / "docs" / "schedule-format.md"
MACHINES = [
    Topology((1,)),
    Topology((2,)),
    Topology((5,), wrap=True),
    Topology((4, 4)),
    Topology((3, 5)),
    Topology((4, 6), wrap=(True, False)),
    Topology((6, 6), failed_chips=[(2, 2), (2, 3), (3, 2), (3, 3)]),
    Topology((4, 4), failed_chips=[1], failed_links=[(5, 9)]),
    Topology((2, 2, 4), switched=True),
]
SMALL = {"tree-packing": {"rounds": 3}}
"""Options that make algorithms of many pieces quick for the printed checker."""
CASES = [(name, collective) for name, builder in ALGORITHMS.items() for collective in builder.collectives]
LINE = Topology((3,))
TWO = Topology((2,))
HOLE = Topology((3, 3), failed_chips=[4])


def make(*sends) -> Step:
    """A step from (src, dst, piece, op) each."""
    src, dst, piece, op = zip(*sends, strict=True)
    return make_step(src, dst, piece, None, op)


def hand(*steps, topology=LINE, pieces=1, collective="all-reduce", **fields) -> Schedule:
    """A schedule from steps of (src, dst, piece, op) each."""
    bounds = np.array(fields.pop("bounds", even_bounds(pieces)))
    made = [step if isinstance(step, Step) else make(*step) for step in steps]
    return Schedule(collective, "hand", topology, int(bounds[-1]), bounds, made, **fields)


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    return str(error.value)


@pytest.fixture(scope="module")
def checker():
    """The checker that docs/schedule-format.md prints: plain sets, one send after the other."""
    code = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    names = {"__name__": "printed"}
    exec(compile(code.split("\nfor file in")[0], str(PAGE), "exec"), names)
    return names["check"]


def plain(schedule: Schedule) -> dict:
    """What the printed checker reads."""
    ends = schedule.bounds.tolist()
    return {
        "collective": schedule.collective,
        "topology": {"shape": list(schedule.topology.shape), "failed_chips": sorted(schedule.topology.failed_chips)},
        "denominator": schedule.denominator,
        "pieces": [[a, b] for a, b in pairwise(ends)],
        "tile": schedule.tile,
        "steps": [[(s, d, k, OPS[op]) for s, d, k, op in singles(step)] for step in schedule.steps],
    }


def singles(step: Step) -> list[tuple[int, int, int, int]]:
    rows = zip(*(column.tolist() for column in step), strict=True)
    return [(src, dst, k, op) for src, dst, first, stop, op in rows for k in range(first, stop)]


def is_right(checker, schedule: Schedule) -> bool:
    try:
        checker(plain(schedule))
    except AssertionError:
        return False
    return True


# ---- right schedules


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_every_builder_is_proven_on_every_machine_that_it_takes(name, collective, checker):
    proven = 0
    for topology in MACHINES:
        try:
            schedule = build(name, topology, collective, **SMALL.get(name, {}))
        except (ScheduleError, TopologyError):
            continue
        proof = verify(schedule, topology)
        assert proof.chips == len(topology.chips)
        assert proof.steps == len(schedule.steps)
        assert proof.pieces_sent == sum(len(singles(step)) for step in schedule.steps)
        assert (proof.root is not None) == (collective == "broadcast")
        checker(plain(schedule))
        proven += 1
    assert proven >= 4


@pytest.mark.parametrize(
    ("name", "shape", "steps", "share"),
    [
        ("bidirectional-ring", (4, 4), 30, Fraction(15, 16)),
        ("bidirectional-ring", (8, 8), 126, Fraction(63, 64)),
        ("bidirectional-ring", (8, 16), 254, Fraction(127, 128)),
        ("row-column", (4, 4), 12, Fraction(15, 16)),
        ("row-column", (8, 8), 28, Fraction(63, 64)),
        ("row-pairs", (4, 4), 16, Fraction(1)),
        ("row-pairs", (8, 8), 36, Fraction(9, 8)),
        ("row-pairs", (4, 8), 32, Fraction(1)),
    ],
)
def test_the_busiest_link_carries_what_was_computed_by_hand(name, shape, steps, share):
    proof = verify(build(name, Topology(shape)))
    assert (proof.steps, proof.busiest_share) == (steps, share)


def test_a_proof_says_what_was_counted():
    proof = verify(
        hand(
            [(0, 1, 0, ADD), (2, 1, 1, ADD)],
            [(2, 1, 0, ADD), (0, 1, 1, ADD)],
            [(1, 0, 0, COPY), (1, 0, 1, COPY), (1, 2, 0, COPY), (1, 2, 1, COPY)],
            bounds=[0, 1, 3],
        )
    )
    assert (proof.chips, proof.steps, proof.sends, proof.pieces, proof.pieces_sent) == (3, 3, 8, 2, 8)
    assert (proof.patterns, proof.longest_way_hops, proof.multi_hop_sends, proof.deadlock) == (2, 1, 0, ())
    assert (proof.busiest_link, proof.busiest_share) == ((0, 1), 1)
    assert str(proof) == (
        "hand all-reduce on mesh:3: proven on 3 chips, 3 steps, 8 sends, 2 pieces in 2 patterns, single hops, "
        "busiest link 0->1 carries 1 of the vector"
    )


def test_messages_over_other_chips_are_counted_and_may_deadlock():
    ring = Topology((4,), wrap=True)
    around = [(chip, (chip + 2) % 4, 0, ADD) for chip in range(4)]
    to_the_next = [(0, 1, 0, ADD), (1, 0, 0, ADD), (2, 3, 0, ADD), (3, 2, 0, ADD)]
    proof = verify(hand(to_the_next, around, topology=ring))
    assert (proof.longest_way_hops, proof.multi_hop_sends) == (2, 4)
    assert proof.deadlock == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert str(proof).endswith("its routes can deadlock unless arcs have more than one buffer")
    assert "4 sends over up to 2 hops" in str(proof)
    switch = verify(hand(to_the_next, around, topology=Topology((4,), switched=True)))
    assert (switch.longest_way_hops, switch.multi_hop_sends, switch.deadlock) == (1, 0, ())


def test_all_of_a_step_read_what_was_there_before():
    two = Topology((2,))
    assert verify(hand([(0, 1, 0, ADD), (1, 0, 0, ADD)], topology=two)).sends == 2
    # A chain in one step: chip 1 passes on what it had, not what it gets.
    text = refusal(hand([(0, 1, 0, COPY), (1, 2, 0, COPY)], collective="broadcast"))
    assert text == (
        "hand broadcast on mesh:3: chip 2 ends with piece 0 without the contribution of chip 0 and with that of chip "
        "1, which does not belong there. Send what it lacks."
    )


def test_the_root_of_a_broadcast_is_found():
    proof = verify(hand([(1, 0, 0, COPY), (1, 2, 0, COPY)], collective="broadcast"))
    assert (proof.root, proof.patterns) == (1, 1)
    assert "root 1" in str(proof)
    assert verify(hand(topology=Topology((2,), failed_chips=[0]), collective="broadcast")).root == 1


def test_one_chip_needs_no_steps():
    for collective in ("all-reduce", "reduce-scatter", "all-gather", "broadcast"):
        proof = verify(hand(topology=Topology((1,)), collective=collective))
        assert (proof.sends, proof.busiest_link, proof.busiest_share) == (0, None, 0)
        assert "proven on 1 chip, 0 steps, 0 sends, 1 piece in 1 pattern" in str(proof)


def test_garbage_may_lie_about_as_long_as_it_does_not_last():
    def gather(*steps):
        return hand(*steps, pieces=2, topology=TWO, collective="all-gather")

    right = [(1, 0, 1, COPY), (0, 1, 0, COPY)]
    assert verify(gather(right)).patterns == 2
    assert verify(gather([(1, 0, 1, ADD), (0, 1, 0, ADD)], right)).patterns == 2
    assert "chip 0 ends with piece 1 with that of chip 0, which does not belong there" in refusal(
        gather([(1, 0, 1, ADD), (0, 1, 0, COPY)])
    )
    assert "chip 0 ends with piece 0 without the contribution of chip 0" in refusal(gather([(1, 0, 0, COPY)], right))


def test_adasum_counts_like_add():
    two = Topology((2,))
    assert verify(hand([(0, 1, 0, ADASUM)], [(1, 0, 0, COPY)], topology=two)).sends == 2
    assert "would count twice" in refusal(hand([(0, 1, 0, ADASUM)], [(0, 1, 0, ADASUM)], topology=two))


def test_pieces_of_no_width_hold_nothing():
    done = [(0, 1, 0, ADD), (1, 0, 0, ADD)]
    assert verify(hand(done, topology=Topology((2,)), bounds=[0, 2, 2])).patterns == 1


def test_peers_of_a_tile_are_summed_and_nobody_else():
    four = Topology((4,))
    far = [(0, 2, 0, ADD), (2, 0, 0, ADD), (1, 3, 0, ADD), (3, 1, 0, ADD)]
    assert verify(hand(far, topology=four, tile=(2,))).sends == 4
    near = [(0, 1, 0, ADD), (1, 0, 0, ADD), (2, 3, 0, ADD), (3, 2, 0, ADD)]
    assert refusal(hand(near, topology=four, tile=(2,))).endswith(
        "chip 0 ends with piece 0 without the contribution of chip 2 and with that of chip 1, which does not belong "
        "there. Send what it lacks."
    )
    assert "does not tile" in refusal(hand(far, topology=four, tile=(3,)))
    assert "a tile is skipped by all-reduce only" in refusal(
        hand(far, topology=four, tile=(2,), collective="broadcast")
    )


@pytest.mark.parametrize(("shape", "tile"), [((4, 4), (2, 2)), ((4, 6), (1, 2)), ((7, 3), (7, 1)), ((4, 4), (4, 4))])
@pytest.mark.parametrize("failed", [(), (1,), (1, 5)])
def test_strided_rings_sum_the_peers_of_tiles(shape, tile, failed, checker):
    topology = Topology(shape, wrap=True, failed_chips=failed)
    schedule = build("ring", topology, tile=tile)
    assert verify(schedule).chips == len(topology.chips)
    checker(plain(schedule))
    whole = Schedule("all-reduce", "ring", topology, schedule.denominator, schedule.bounds, schedule.steps)
    assert "without the contribution of" in refusal(whole)


def test_shares_are_exact_where_bounds_are_huge():
    huge = 2**61
    steps = [[(0, 1, 0, ADD), (1, 0, 1, ADD)], [(1, 0, 0, COPY), (0, 1, 1, COPY)]] * 9
    steps = steps[:2] + [[(1, 0, 0, COPY), (0, 1, 1, COPY)]] * 9
    proof = verify(hand(*steps, topology=Topology((2,)), bounds=[0, huge - 1, huge]))
    assert proof.busiest_share == Fraction(10 * (huge - 1) + 1, huge)
    assert proof.busiest_link == (1, 0)


def test_pieces_that_travel_alike_at_other_times_are_followed_once():
    up, down = [(0, 1), (2, 1)], [(1, 0), (1, 2)]

    def step(k: int) -> Step:
        """Piece k begins at step k and takes 3 steps; odd pieces wait a step before they come down."""
        sends = [(*up[t], k - t, ADD) for t in (0, 1) if 0 <= k - t < 50]
        for piece in range(50):
            if k == piece + 2 + piece % 2:
                sends += [(*way, piece, COPY) for way in down]
        return make(*sends) if sends else make_step([], [], [])

    schedule = Schedule("all-reduce", "hand", LINE, 50, even_bounds(50), Steps(53, step))
    assert verify(schedule).patterns == 1


@pytest.mark.slow
def test_small_batches_prove_the_same(monkeypatch):
    schedules = [build(name, Topology((2, 3)), collective) for name, collective in CASES]
    whole = [verify(schedule) for schedule in schedules]
    monkeypatch.setattr("multipod.collectives.tally.WAITING", 150)
    for limits in ({"BATCH_SENDS": 7}, {"BATCH_CELLS": 25}, {"STATE_BYTES": 200}, {"BATCH_SENDS": 1, "STATE_BYTES": 1}):
        for name, limit in limits.items():
            monkeypatch.setattr(room, name, limit)
        for schedule, proof in zip(schedules, whole, strict=True):
            again = verify(schedule)
            assert again.patterns >= proof.patterns
            assert again == proof or again.patterns > proof.patterns


def test_more_than_64_chips_take_more_than_one_word():
    for p in (63, 64, 65, 129):
        schedule = build("ring", Topology((p,)))
        assert verify(schedule).patterns == p
        last = list(schedule.steps)
        last[-1] = Step(*(column[:-1] for column in last[-1]))
        assert "without the contribution of chip" in refusal(with_steps(schedule, last))


# ---- wrong schedules

REFUSED = {
    "missing": (
        hand([(0, 1, 0, ADD)], [(1, 0, 0, COPY)]),
        "hand all-reduce on mesh:3: chip 0 ends with piece 0 without the contribution of chip 2. Send what it lacks.",
    ),
    "added twice": (
        hand([(0, 1, 0, ADD)], [(0, 1, 0, ADD)], [(1, 0, 0, COPY)], topology=TWO),
        "hand all-reduce on mesh:2: step 1: chip 1 adds piece 0 from chip 0, and both hold the contribution of chip 0 "
        "already, which would count twice. Leave this send out, or let it copy.",
    ),
    "two writes": (
        hand([(0, 1, 0, ADD), (2, 1, 0, ADD)]),
        "hand all-reduce on mesh:3: step 0: chip 1 is sent piece 0 twice in one step, by chips 0 and 2. "
        "Put one of these sends into another step.",
    ),
    "two copies": (
        hand([(0, 1, 0, COPY), (0, 1, 0, COPY)], collective="broadcast"),
        "hand broadcast on mesh:3: step 0: chip 1 is sent piece 0 twice in one step, by chips 0 and 0. "
        "Put one of these sends into another step.",
    ),
    "dead source": (
        hand([(4, 5, 0, ADD)], topology=HOLE),
        f"hand all-reduce on {HOLE}: step 0: the send 4->5 of pieces 0 to 0 begins at chip 4, which has "
        "failed. Send between live chips only.",
    ),
    "dead target": (
        hand([(5, 4, 0, ADD)], topology=HOLE),
        f"hand all-reduce on {HOLE}: step 0: the send 5->4 of pieces 0 to 0 ends at chip 4, which has "
        "failed. Send between live chips only.",
    ),
    "no such chip": (
        hand([(0, 1, 0, ADD), (0, 3, 0, ADD)]),
        "hand all-reduce on mesh:3: step 0: the send 0->3 of pieces 0 to 0 leaves the machine, whose chips are 0 to 2.",
    ),
    "negative chip": (
        hand([(-1, 1, 0, ADD)]),
        "hand all-reduce on mesh:3: step 0: the send -1->1 of pieces 0 to 0 leaves the machine, whose chips are 0 to "
        "2.",
    ),
    "to itself": (
        hand([(1, 1, 0, COPY)]),
        "hand all-reduce on mesh:3: step 0: the send 1->1 of pieces 0 to 0 goes nowhere. Leave it out.",
    ),
    "no such piece": (
        hand([(0, 1, 1, ADD)]),
        "hand all-reduce on mesh:3: step 0: the send 0->1 of pieces 1 to 1 leaves the vector, whose pieces are 0 to 0.",
    ),
    "negative piece": (
        hand([(0, 1, -1, ADD)]),
        "hand all-reduce on mesh:3: step 0: the send 0->1 of pieces -1 to -1 leaves the vector, whose pieces are 0 to "
        "0.",
    ),
    "empty message": (
        hand(make_step(0, 1, 1, 1), pieces=2),
        "hand all-reduce on mesh:3: step 0: the send 0->1 of pieces 1 to 0 carries nothing. Leave it out.",
    ),
    "no such op": (
        hand([(0, 1, 0, 3)]),
        "hand all-reduce on mesh:3: step 0: the send 0->1 of pieces 0 to 0 has op 3; there are 0 to 2: "
        "('add', 'copy', 'adasum').",
    ),
    "ragged": (
        hand(make((0, 1, 0, ADD))._replace(op=np.zeros(2, np.int32))),
        "hand all-reduce on mesh:3: step 0 has columns of unequal length. Make it with make_step.",
    ),
    "scattered to the wrong chip": (
        hand([(0, 1, 0, ADD), (1, 0, 1, ADD)], pieces=2, topology=TWO, collective="reduce-scatter"),
        "hand reduce-scatter on mesh:2: chip 0 ends with piece 0 without the contribution of chip 1. Send what it "
        "lacks.",
    ),
    "gathered from the wrong chip": (
        hand([(1, 0, 0, COPY), (0, 1, 1, COPY)], pieces=2, topology=TWO, collective="all-gather"),
        "hand all-gather on mesh:2: chip 0 ends with piece 0 without the contribution of chip 0 and with that of chip "
        "1, which does not belong there. Send what it lacks.",
    ),
    "gathered in pieces of several chips": (
        hand([(0, 1, 0, COPY)], topology=TWO, collective="all-gather"),
        "hand all-gather on mesh:2: piece 0 has parts that begin on chips 0, 1, so no chip begins with it whole. "
        "Cut the vector at all multiples of 1/2.",
    ),
    "broadcast from two roots": (
        hand([(0, 1, 0, COPY), (1, 0, 1, COPY)], pieces=2, topology=TWO, collective="broadcast"),
        "hand broadcast on mesh:2: chip 0 ends with piece 1 what chip 1 began with, and other pieces come from 0. "
        "Let all pieces come from one root.",
    ),
    "broadcast of a sum": (
        hand([(0, 1, 0, ADD)], [(1, 0, 0, COPY)], topology=TWO, collective="broadcast"),
        "hand broadcast on mesh:2: chip 0 ends with piece 0 the sum over chips 0, 1, and a broadcast sums nothing. "
        "Use copies only.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_with_the_reason(case):
    schedule, text = REFUSED[case]
    assert refusal(schedule) == text


def test_ends_without_a_way_between_them_are_refused():
    cut = Topology((3,), failed_links=[(1, 2)])
    text = refusal(hand([(0, 1, 0, ADD)], [(1, 2, 0, ADD)], topology=cut))
    assert text.startswith(f"hand all-reduce on {cut}: step 1: chip 1 cannot send to chip 2. {cut} is cut into 2 parts")


def test_many_missing_chips_are_not_all_named():
    assert "without the contribution of chips 1, 2, 3, 4, 5, 6, 7, 8 and 91 more." in refusal(
        hand(topology=Topology((100,)))
    )


def test_the_first_piece_and_its_own_step_are_named():
    steps = list(build("ring", Topology((5,))).steps)
    steps[3] = steps[3]._replace(op=np.full_like(steps[3].op, COPY))
    text = refusal(with_steps(build("ring", Topology((5,))), steps))
    assert text == (
        "ring all-reduce on mesh:5: chip 0 ends with piece 0 without the contribution of chip 0. Send what it lacks."
    )
    late = [make_step([], [], [])] * 7 + [make((0, 1, 1, ADD)), make((0, 1, 1, ADD))]
    assert "step 8: chip 1 adds piece 1" in refusal(hand(*late, pieces=2))


def test_a_schedule_for_another_topology_is_refused():
    schedule = build("ring", Topology((2, 4)))
    for other in (Topology((4, 2)), Topology((2, 4), wrap=True), Topology((2, 4), failed_chips=[3])):
        with pytest.raises(ScheduleError, match=r"a schedule for another topology than .* differ. Build one for this"):
            verify(schedule, other)
    faster = Topology((2, 4), bytes_per_s=1e12, name="the same, faster")
    assert verify(schedule, faster).chips == 8


def test_too_many_chips_are_refused_before_the_memory_is_gone(monkeypatch):
    monkeypatch.setattr(room, "MOST_CHIPS", 8)
    assert verify(build("ring", Topology((8,)))).chips == 8
    assert refusal(build("ring", Topology((9,)))) == (
        "ring all-reduce on mesh:9: 9 chips are too many to prove; the most are 8. "
        "Prove its algorithm on a smaller machine."
    )


# ---- mutations


def with_steps(schedule: Schedule, steps: list[Step]) -> Schedule:
    return Schedule(
        schedule.collective, schedule.algorithm, schedule.topology, schedule.denominator, schedule.bounds, steps
    )


@pytest.mark.parametrize("name", ["ring", "torus-2d", "row-pairs", "halving-doubling"])
def test_no_send_can_be_spared_or_done_twice(name):
    schedule = build(name, Topology((2, 3)))
    steps = [singles(step) for step in schedule.steps]
    for number, sends in enumerate(steps):
        for k, send in enumerate(sends):
            rest = sends[:k] + sends[k + 1 :]
            dropped = [make(*s) for s in (*steps[:number], rest, *steps[number + 1 :]) if s]
            assert "ends with piece" in refusal(with_steps(schedule, dropped))
            doubled = [make(*s) for s in (*steps[:number], [*sends, send], *steps[number + 1 :])]
            assert "twice in one step" in refusal(with_steps(schedule, doubled))
            if send[3] == ADD:
                again = [make(*s) for s in (*steps[: number + 1], [send], *steps[number + 1 :])]
                assert "would count twice" in refusal(with_steps(schedule, again))


@st.composite
def mutants(draw):
    """A right schedule with up to three of its sends or steps changed."""
    name, collective = draw(st.sampled_from(CASES))
    topology = draw(
        st.sampled_from([Topology((2,)), Topology((3,)), Topology((2, 3)), Topology((4,), wrap=True), HOLE])
    )
    try:
        schedule = build(name, topology, collective, **SMALL.get(name, {}))
    except ScheduleError:
        schedule = build("ring", topology, collective)
    steps = [singles(step) for step in schedule.steps]
    for _ in range(draw(st.integers(1, 3))):
        steps = draw(st.sampled_from(MUTATIONS))(draw, steps, topology.size, schedule.pieces)
    return with_steps(schedule, [make(*sends) if sends else make_step([], [], []) for sends in steps])


def pick(draw, steps):
    number = draw(st.integers(0, len(steps) - 1))
    return number, draw(st.integers(0, max(0, len(steps[number]) - 1)))


def drop(draw, steps, chips, pieces):
    number, k = pick(draw, steps)
    return [sends[:k] + sends[k + 1 :] if n == number else sends for n, sends in enumerate(steps)]


def change(draw, steps, chips, pieces):
    """Another source, target, piece, or add for copy: the printed checker does not know all that Adasum asks."""
    number, k = pick(draw, steps)
    if not steps[number]:
        return steps
    send = list(steps[number][k])
    field = draw(st.integers(0, 3))
    send[field] = draw(st.integers(0, (chips, chips, pieces, 2)[field] - 1))
    return [[*sends[:k], tuple(send), *sends[k + 1 :]] if n == number else sends for n, sends in enumerate(steps)]


def swap(draw, steps, chips, pieces):
    (one, _), (two, _) = pick(draw, steps), pick(draw, steps)
    steps = list(steps)
    steps[one], steps[two] = steps[two], steps[one]
    return steps


def merge(draw, steps, chips, pieces):
    if len(steps) < 2:
        return steps
    number = draw(st.integers(0, len(steps) - 2))
    return [*steps[:number], steps[number] + steps[number + 1], *steps[number + 2 :]]


def repeat(draw, steps, chips, pieces):
    number, k = pick(draw, steps)
    at = draw(st.integers(0, len(steps)))
    return [*steps[:at], steps[number][k : k + 1], *steps[at:]]


MUTATIONS = [drop, change, swap, merge, repeat]


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=mutants())
def test_mutants_are_refused_where_the_printed_checker_refuses_them(schedule, checker):
    try:
        verify(schedule)
    except ScheduleError as error:
        assert not is_right(checker, schedule), error  # noqa: PT017
    else:
        checker(plain(schedule))


def test_the_printed_checker_is_about_thirty_lines_and_takes_the_printed_example(checker):
    example = re.search(r"^```json\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    checker(json.loads(example))
    code = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) < 45
