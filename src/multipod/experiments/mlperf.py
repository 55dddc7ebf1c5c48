"""The multipod paper's curves from the planner: time, speed-up, share of sums against chips, beside v0.6's logs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.plan.machine import Machine, find
from multipod.plan.predict import predict_step, with_evaluations
from multipod.plan.run import predict_run
from multipod.plan.tables import v3
from multipod.plan.tables.convergence import epochs_to_target, updates_at
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import EXAMPLES, HALF_SHARDED, V06, V07, PublishedRun, PublishedStep, pod

P1, LOGS = "arXiv:2011.03641", "logs of MLPerf v0.6; arXiv:1909.09756"
MULTIPOD_S = 28.8
"""Score of ResNet-50 on 4,096 chips in MLPerf v0.7 (arXiv:2011.03641)."""

NEAR = 0.15
"""Relative error of a ratio of two runs that passes."""

BERT_CHIPS = (16, 64, 256, 512, 1024, 2048)
"""Beside the published 4,096; each chip has at most 32 sequences, and a batch at most the published 8,192."""


@dataclass(frozen=True)
class Point:
    """A run of one size.

    Attributes:
      chips, batch: of the run.
      step_s: of an update, with its share of the evaluations.
      share: of the step that is sums and other messages.
      run_s: from the start to the target.
      published_s: what the logs say of it; 0 if nothing.
      updates: to the target.
    """

    chips: int
    batch: int
    step_s: float
    share: float
    run_s: float
    published_s: float
    updates: float


REMARKS = {
    "ssd": "The run on 16 chips had its target sooner than the 65 epochs that are taken for every run of batch 1,024: "
    "its score has room for 6,440 of its logged steps of 117.5 ms. So its predicted time is too long, and with it "
    "every speed-up over it."
}
"""What a reader of a model's table should know."""

Curves = Mapping[str, Sequence[Point]]
"""Points by model, by rising chips."""


def run(report: Callable[[str], None]) -> Outcome:
    """Prices the runs of v0.6, and those of v0.7 of which the inputs were published."""
    machine = find("tpu-v3-pod")
    machine = machine.calibrated(start_s=v3.start_s(machine))
    curves = {}
    for model in ("resnet50", "ssd", "transformer", "bert"):
        report(f"pricing {model} at every size")
        curves[model] = curve(model, machine)
    return Outcome(
        "MLPerf on 16 to 4,096 chips of TPU v3",
        tuple(claims_of(curves)),
        (_about(), *(_table(model, points) for model, points in curves.items())),
        figures={
            "time": _figure(curves, "seconds to the target", lambda one, _: one.run_s, published=True),
            "speedup": _figure(curves, "speed-up over 16 chips", lambda one, first: first.run_s / one.run_s),
            "share": _figure(curves, "share of sums in the step, %", lambda one, _: 100 * one.share, logs="x"),
        },
    )


def curve(model: str, machine: Machine) -> list[Point]:
    """The model at every size that a round published, BERT at sizes between as well."""
    points = [_of_v06(row, machine) for row in V06 if row.model == model]
    points += [_of_bert(chips, machine) for chips in BERT_CHIPS if model == "bert"]
    return [*points, *sorted((_of_v07(one, machine) for one in V07 if one.model == model), key=lambda one: one.chips)]


def claims_of(curves: Curves) -> list[Claim]:
    """What the curves say of each claim."""
    return [*(_speed_up(model, points) for model, points in curves.items() if model != "bert"), *_of_sums(curves)]


def _speed_up(model: str, points: Sequence[Point]) -> Claim:
    logged = [one for one in points if one.published_s]
    first, last = logged[0], logged[-1]
    ours, theirs = first.run_s / last.run_s, first.published_s / last.published_s
    return Claim(
        f"{model}: speed-up from {first.chips} to {last.chips:,} chips, end to end",
        P1 if last.chips > 1024 else LOGS,
        ours,
        f"{theirs:.1f} within {NEAR:.0%}",
        abs(ours / theirs - 1) <= NEAR,
        fails_if="steps, updates and the time around them do not shrink with the chips as they were logged to",
    )


def _of_sums(curves: Curves) -> list[Claim]:
    return [
        Claim(
            f"{model}: the share of sums on 4,096 chips over that on 16, with examples a chip falling",
            P1,
            points[-1].share / points[0].share,
            "above 2",
            points[-1].share > 2 * points[0].share,
            fails_if="more chips with fewer examples each do not wait longer for their sums",
        )
        for model, points in curves.items()
        if model in ("resnet50", "bert")
    ]


def _of_v06(row: PublishedStep, machine: Machine) -> Point:
    epochs = row.epochs or epochs_to_target(row.model, row.batch)[0]
    updates = epochs * EXAMPLES[row.model] / row.batch
    step = v3.priced(row, machine)
    seconds = predict_run(step, row.machine(machine), updates).seconds
    return Point(row.chips, row.batch, step.step_s, step.collectives_s / step.step_s, seconds, row.run_s, updates)


def _of_v07(one: PublishedRun, machine: Machine) -> Point:
    found = v3.predicted(one, machine, v3.Irregular(0.0, 0.0, ()))
    published = MULTIPOD_S if one.name == "resnet50-4096" else 0.0
    share = found.step.collectives_s / found.step.step_s
    return Point(one.chips, one.batch, found.step.step_s, share, found.seconds, published, one.updates)


def _of_bert(chips: int, machine: Machine) -> Point:
    batch, workload, on = min(8192, 32 * chips), MODELS["bert"], machine.of(pod(chips).topology)
    updates = updates_at("bert", batch)[0]
    step = predict_step(workload, HALF_SHARDED, batch, on)
    step, _ = with_evaluations(step, workload, on, 500_000 / batch)
    seconds = predict_run(step, on, updates).seconds
    return Point(chips, batch, step.step_s, step.collectives_s / step.step_s, seconds, 0.0, updates)


def _about() -> Section:
    text = (
        "Layouts, batches and groups of batch norm are those of the published runs. Epochs are the logs' own where "
        "they were noted, else those of v0.6 at the same batch; BERT's updates below 4,096 chips follow from MLPerf's "
        "reference convergence points, and its batches there are ours: 32 sequences a chip, at most 8,192. Constants "
        "are those that `multipod reproduce planner` fits to v0.6's steps, so that v0.6's points are no test of them; "
        "that page has what a fit says of points that it has not seen. The workloads are tables, which tests hold "
        "against the programs of the models (ResNet-50, BERT and Transformer)."
    )
    return Section("What is priced", text)


def _table(model: str, points: Sequence[Point]) -> Section:
    first = points[0]
    rows = [
        (
            f"{one.chips:,}",
            f"{one.batch:,}",
            f"{one.updates:,.0f}",
            f"{1e3 * one.step_s:.1f}",
            f"{one.share:.1%}",
            f"{one.run_s:.1f}",
            f"{one.published_s:.1f}" if one.published_s else "",
            f"{first.run_s / one.run_s:.1f}",
            f"{first.published_s / one.published_s:.1f}" if one.published_s and first.published_s else "",
        )
        for one in points
    ]
    head = ("chips", "batch", "updates", "step, ms", "sums", "run, s", "published, s", "speed-up", "published")
    figure = {"resnet50": "time", "ssd": "speedup", "transformer": "share"}.get(model, "")
    return Section(model, REMARKS.get(model, ""), head, rows, figure=figure)


def _figure(
    curves: Curves, label: str, value: Callable[[Point, Point], float], published: bool = False, logs: str = "xy"
) -> Figure:
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    for number, (model, points) in enumerate(curves.items()):
        chips = [one.chips for one in points]
        axes.plot(chips, [value(one, points[0]) for one in points], "-", color=f"C{number}", label=model)
        logged = [one for one in points if one.published_s and published]
        axes.plot([one.chips for one in logged], [one.published_s for one in logged], "o", color=f"C{number}")
    axes.set(xlabel="chips of TPU v3", ylabel=label, **{f"{axis}scale": "log" for axis in logs})
    axes.legend()
    return figure
