"""Pipelines as data: builders against the papers' formulas, the check against broken schedules, stability limits."""

import math
from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.errors import ScheduleError
from multipod.pipelines import model, stability
from multipod.pipelines.build import PIPELINES, build, eager_1f1b, gpipe, interleaved, one_f_one_b, pipedream, pipemare
from multipod.pipelines.check import check, check_tied
from multipod.pipelines.drawing import draw, picture
from multipod.pipelines.schedule import PipelineOp, PipelineSchedule
from multipod.pipelines.timing import Costs, time_schedule

SIZES = [(p, n) for p in (1, 2, 3, 5, 8, 12) for n in (1, 2, 3, 8)]


def enough(stages: int, micro_batches: int) -> int:
    """Updates after which no stage reads version 0 for want of an older one."""
    return 3 + 2 * math.ceil(2 * stages / micro_batches)


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_pipemare_has_the_papers_delays(p, n):
    proof = check(pipemare(p, n, enough(p, n)))
    assert proof.settled
    for i in range(1, p + 1):
        assert proof.forward_delays(i - 1) == tuple(math.ceil(Fraction(2 * (p - i) + 1 - j, n)) for j in range(n))
        assert proof.mean_delay(i - 1) == model.tau(p, n, i) == Fraction(2 * (p - i) + 1, n)
        assert proof.backward_delays(i - 1) == (0,) * n
    assert sum(proof.peak_live) == model.cost("pipemare", p, n).activations == p * p
    assert proof.peak_live == tuple(2 * (p - i) + 1 for i in range(1, p + 1))
    assert time_schedule(proof.schedule).steady_utilisation == 1


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_pipedream_sees_the_same_weights_in_both_passes(p, n):
    proof = check(pipedream(p, n, enough(p, n)))
    assert proof.forward == proof.backward == check(pipemare(p, n, enough(p, n))).forward
    assert proof.stashed == tuple(model.whole_versions(p, n, i) for i in range(1, p + 1))
    assert model.cost("pipedream", p, n, "adam").weight_copies == 4 + Fraction(p, n)


@pytest.mark.parametrize(("p", "n"), SIZES)
@pytest.mark.parametrize("build_it", [gpipe, one_f_one_b])
def test_synchronous_pipelines_have_the_known_bubble(build_it, p, n):
    proof = check(build_it(p, n, 3))
    clock, known = time_schedule(proof.schedule, Costs(1, 2)), model.cost(proof.schedule.name, p, n)
    assert (
        clock.steady_utilisation
        >= time_schedule(build_it(p, n)).utilisation
        == Fraction(n, n + p - 1)
        == known.utilisation
    )
    assert sum(proof.peak_live) == known.activations
    assert proof.schedule.span == proof.schedule.stride == 2 * (n + p - 1)
    assert set(proof.stashed) == {0}


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_eager_1f1b_reaches_the_bound_in_lock_step_where_1f1b_does_not(p, n):
    proof = check(made := eager_1f1b(p, n, 2))
    known = model.cost("eager-1f1b", p, n)
    assert sum(proof.peak_live) == known.activations
    assert time_schedule(eager_1f1b(p, n), Costs(1, 2)).utilisation == known.utilisation == Fraction(n, n + p - 1)
    assert in_lock_step(eager_1f1b(p, n)) == 3 * (n + p - 1)
    assert p == 1 or n < 3 or in_lock_step(one_f_one_b(p, n)) > 3 * (n + p - 1)
    assert made.stride == n + 2 * p - 1
    assert set(proof.stashed) == {0}


def in_lock_step(made: PipelineSchedule) -> int:
    """The time of all ticks, each as long as its busiest device, with passes of 1 and 2."""
    took = {}
    for device, ops in enumerate(made.ops):
        for op in ops:
            took[op.tick, device] = took.get((op.tick, device), 0) + {"forward": 1, "backward": 2, "update": 0}[op.kind]
    return sum(max(time for (tick, _), time in took.items() if tick == now) for now in range(made.span))


@settings(deadline=None, max_examples=30)
@given(p=st.integers(1, 6), rounds=st.integers(1, 4), chunks=st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(p, rounds, chunks):
    made = interleaved(p, n := p * rounds, 2, chunks)
    check(made)
    assert made.stride == 2 * (n * chunks + p - 1)  # no tick is lost
    one = time_schedule(interleaved(p, n, 1, chunks), Costs(1, 2))
    assert one.utilisation == Fraction(n * chunks, n * chunks + p - 1)


def test_what_is_missing_doubled_or_early_is_listed():
    made = one_f_one_b(2, 2)
    ops = list(made.ops[1])
    broken = [op for op in ops if op != PipelineOp("forward", 1, 0, 3)]
    with pytest.raises(ScheduleError, match=r"device 1: no forward of 1 \(chunk 0\)"):
        check(replace(made, ops=(made.ops[0], tuple(broken))))
    with pytest.raises(ScheduleError, match="forward of 0 in part 1 at tick 0, and part 0 sends at 0"):
        check(replace(made, ops=(made.ops[0], (PipelineOp("forward", 0, 0, 0), *ops[1:]))))
    early = sorted([op for op in ops if op.kind != "update"] + [PipelineOp("update", 0, 0, 2)], key=lambda op: op.tick)
    with pytest.raises(ScheduleError, match="device 1: update 0 after 1 of its backward passes"):
        check(replace(made, ops=(made.ops[0], tuple(early))))
    late = pipemare(2, 2, 4)
    with pytest.raises(ScheduleError, match=r"calls itself synchronous, and parts \[0, 1\] see weights of other"):
        check(replace(late, synchronous=True))


def test_an_order_that_waits_for_itself_is_no_endless_loop():
    f, b, u = PipelineOp("forward", 0, 0, 0), PipelineOp("backward", 0, 0, 1), PipelineOp("update", 0, 0, 1)
    stuck = PipelineSchedule("made-up", 2, 1, 1, ((b, f, u), (f, b, u)), 2)
    with pytest.raises(ScheduleError, match="devices wait for each other: device 0 at backward of 0"):
        time_schedule(stuck)


def test_bad_numbers_and_names():
    with pytest.raises(ScheduleError, match=r"pipeline 1f1b: stages=0, micro_batches=-1. Give whole numbers"):
        build("1f1b", 0, -1)
    with pytest.raises(ScheduleError, match=r"There is no pipeline 'pipemar'. Nearest: pipemare"):
        build("pipemar", 2, 2)
    with pytest.raises(ScheduleError, match=r"6 micro-batches do not go round 4 stages evenly. Take 4 or 8 micro"):
        build("interleaved", 4, 6)
    with pytest.raises(ScheduleError, match=r"pipeline gpipe has no option chunks. It has: none"):
        build("gpipe", 4, 6, chunks=2)


def test_tied_weights_need_a_synchronous_schedule_or_one_stage():
    tied = {"tokens/table": (0, 3)}
    check_tied(one_f_one_b(4, 4), tied)
    check_tied(pipemare(4, 4), {"table": (2,)})
    with pytest.raises(ScheduleError, match=r"cannot stay equal: tokens/table \(parts 0, 3\). Untie them"):
        check_tied(pipemare(4, 4), tied)


def test_the_drawings():
    clock = time_schedule(one_f_one_b(2, 2), Costs(1, 2))
    assert draw(clock).splitlines()[:2] == ["stage 1 01..aa.bb|", "stage 2 .0aa1bb|.."]
    root = ET.fromstring(picture(time_schedule(interleaved(2, 4), Costs(1, 2))))
    boxes = [e for e in root.iter() if e.tag.endswith("rect") and len(e)]
    assert len(boxes) == 2 * 2 * 4 * 2
    with pytest.raises(ScheduleError, match="whole numbers"):
        draw(time_schedule(gpipe(2, 2), Costs(0.5, 1)))


def test_unequal_stages_wait_for_the_slowest():
    clock = time_schedule(pipemare(3, 4, 6), Costs((1, 2, 1), (2, 4, 2), send=1))
    assert clock.steady_utilisation == Fraction(3 + 6 + 3, 3 * 6)


@pytest.mark.parametrize("tau", [0, 1, 2, 5, 10, 20, 50])
def test_the_delayed_limit_is_the_closed_form_to_six_digits(tau):
    known = {1: 1.0, 2: 0.618034, 5: 0.284630, 10: 0.149460, 20: 0.076605, 50: 0.031104}
    limit = stability.limit(tau)
    assert limit == pytest.approx(known.get(tau, 2.0), abs=1e-6)
    assert stability.threshold(stability.delay_polynomial(tau, curvature=3.0)) == pytest.approx(limit / 3, rel=1e-6)
    assert stability.diverges(limit * 1.01, tau)
    assert not stability.diverges(limit * 0.99, tau)


@pytest.mark.parametrize(
    ("tau", "delta", "without", "theory", "from_decay"),
    [(10, 1, 0.05928, 0.13130, 0.13116), (10, 20, 0.00483, 0.04878, 0.04888), (40, 5, 0.00441, 0.02456, 0.02460)],
)
def test_the_correction_raises_the_limit(tau, delta, without, theory, from_decay):
    found = stability.threshold(stability.discrepancy_polynomial(tau, 0, delta))
    assert found == pytest.approx(without, abs=5e-6)
    assert found <= stability.discrepancy_bound(tau, 0, delta)
    gammas = stability.theory_gamma(tau), stability.decay_gamma(0.135, tau)
    limits = [stability.threshold(stability.discrepancy_polynomial(tau, 0, delta, gamma)) for gamma in gammas]
    assert limits == pytest.approx([theory, from_decay], abs=5e-6)


def test_momentum_lowers_the_limit():
    limits = [stability.threshold(stability.delay_polynomial(20, momentum=beta)) for beta in (0, 0.5, 0.9)]
    assert limits == pytest.approx([0.0766, 0.0367, 0.00615], abs=5e-5)
    assert stability.threshold(stability.delay_polynomial(0, momentum=0.9)) == pytest.approx(
        3.8
    )  # 2 (1 + beta) / lambda


def test_the_papers_headline_ratios():
    """14.3 times GPipe's utilisation at P = 107, N = 8; T2 costs a third with momentum, a quarter with Adam."""
    assert float(1 / model.cost("gpipe", 107, 8).utilisation) == 14.25
    assert model.cost("pipemare", 107, 8, "momentum").weight_copies / 3 == Fraction(4, 3)
    assert model.cost("pipemare", 93, 8, "adam").weight_copies / 4 == Fraction(5, 4)
    assert model.utilisation_with_warm_up(93, 8, 0, 50) == 1
    assert model.utilisation_with_warm_up(93, 8, 50, 0) == model.cost("gpipe", 93, 8).utilisation
    assert model.best_segment(100) == 10


def test_the_command_shows_every_pipeline(multipod, tmp_path):
    done = multipod("pipeline", "show", "pipemare", "--stages", "8", "--micro-batches", "16", "--out", "p.svg")
    assert (done.returncode, done.stderr) == (0, "")
    assert "steady       100.0% in a long run" in done.stdout
    assert "15/16" in done.stdout
    assert ET.parse(tmp_path / "p.svg").getroot().tag.endswith("svg")
    done = multipod("pipeline", "show", "pipemar")
    assert done.returncode == 2
    assert done.stderr.startswith("multipod: There is no pipeline 'pipemar'. Nearest: pipemare")
    listed = multipod("pipeline", "list").stdout
    assert all(name in listed for name in PIPELINES)
