"""The planner against MLPerf v0.6, and its predictions of v0.7: one set of constants for all sizes and models."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.layout.layout import Layout
from multipod.layout.sync import Sync
from multipod.plan.calibration.fit import Fit
from multipod.plan.machine import Machine
from multipod.plan.network import cost
from multipod.plan.predict import predict_step
from multipod.plan.run import RunPrediction
from multipod.plan.tables import v3
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import MASK_RCNN, V06, V07, PublishedStep, pod, split_by

P1, P2, P4 = "arXiv:2011.03641", "arXiv:1909.09756", "arXiv:2011.00071"


def run(report: Callable[[str], None]) -> Outcome:
    """Fits TPU v3's constants, holds them against what they were fitted to, and predicts the multipod's runs."""
    report("fitting seven constants to 18 steps and 10 sums")
    found = v3.fitted()
    machine = found.machine.calibrated(start_s=v3.start_s(found.machine))
    report("predicting six runs, also from fits that leave out one model")
    beside = v3.irregular(machine)
    runs = {one.name: v3.predicted(one, machine, beside) for one in V07}
    spreads = _spreads()
    report("effects of single techniques")
    rows, effects = _effects(machine)
    return Outcome(
        "The planner: fitted to MLPerf v0.6, predicting v0.7",
        (*_fit_claims(found, machine), *effects),
        (
            _constants(found, machine),
            _steps(machine),
            _scores(machine),
            _predictions(runs, spreads),
            Section("Effects", EFFECTS, ("effect", "published", "predicted"), rows),
            _mask(machine, beside),
        ),
        figures={"scaling": _scaling(machine)},
        data={
            "predictions": [
                {
                    "run": name,
                    "step_ms": 1e3 * one.step.step_s,
                    "run_s": one.seconds,
                    "updates": one.updates,
                    "step_ms_without_a_model": [1e3 * low for low in spreads[name]],
                    "parts_ms": {part: 1e3 * seconds for part, seconds in one.step.split().items()},
                    "source": next(r.source for r in V07 if r.name == name),
                }
                for name, one in runs.items()
            ],
            "constants": {name: value for name, (value, _) in found.constants.items()},
        },
    )


EFFECTS = (
    "Each technique switched off or on in an otherwise equal step. Shares of the update are of a step whose update "
    "is not "
    "sharded."
)


def _fit_claims(found: Fit, machine: Machine) -> list[Claim]:
    error = {f"{row.model} {row.chips}": v3.priced(row, machine).step_s / (row.step_ms / 1e3) - 1 for row in V06}
    resnet = max(abs(e) for name, e in error.items() if name.startswith("resnet50"))
    others = max(abs(e) for name, e in error.items() if not name.startswith("resnet50"))
    scores = max(abs(v3.score_s(row, machine) / row.run_s - 1) for row in V06 if row.epochs)
    return [
        Claim("ResNet-50's step at 16 to 1,024 chips: largest error, %", P2, 100 * resnet, 10, resnet <= 0.1),
        Claim("ResNet-50's score at 16 to 1,024 chips: largest error, %", P2, 100 * scores, 15, scores <= 0.15),
        Claim(
            "SSD's and Transformer's step at 16 to 1,024 chips: largest error, %", P2, 100 * others, 15, others <= 0.15
        ),
    ]


def _spreads() -> dict[str, tuple[float, float]]:
    """The smallest and largest step of each run when one model's rows are left out of the fit."""
    steps: dict[str, list[float]] = {run.name: [] for run in V07}
    for model in ("resnet50", "ssd", "transformer"):
        machine = v3.fitted([row for row in V06 if row.model != model]).machine
        beside = v3.irregular(machine)
        for one in V07:
            steps[one.name].append(v3.predicted(one, machine, beside).step.step_s)
    return {name: (min(found), max(found)) for name, found in steps.items()}


def _effects(machine: Machine) -> tuple[list[tuple[str, str, str]], list[Claim]]:
    def update_share(model: str, chips: int, batch: int, norm_group: int = 1) -> float:
        step = predict_step(MODELS[model], WHOLE, batch, machine.of(pod(chips).topology), norm_group)
        return step.update_s / step.step_s

    lars = update_share("resnet50", 1024, 32768, norm_group=8)
    adam, lamb = update_share("transformer", 1024, 2048), update_share("bert", 512, 4096)
    whole, split = (_step_s("ssd", machine, c, s, b) for c, s, b in ((256, 1, 2048), (1024, 4, 2048)))
    slow, fast = (_summed(machine, name) for name in ("ring", "torus-2d"))
    multipod = pod(4096).topology
    first_x, first_y = (cost(multipod, name).vectors for name in ("multi-ring", "torus-2d"))
    rows = [
        ("share of LARS, not sharded, ResNet-50 on 1,024 chips", f"about 6 % ({P2})", f"{lars:.1%}"),
        ("share of Adam, not sharded, Transformer on 1,024 chips", f"about 45 % ({P2})", f"{adam:.1%}"),
        ("share of LAMB, not sharded, BERT on 512 chips (batch 4,096)", f"about 18 % ({P1})", f"{lamb:.1%}"),
        (
            "SSD on 4 devices a replica instead of 1",
            f"1.6 times as fast ({P2}); 1.78 in the logs",
            f"{whole / split:.2f}",
        ),
        (
            "gradient sum of ResNet-50, 1,024 chips: one ring against torus-2d",
            "many times slower",
            f"{slow / fast:.1f}",
        ),
        (
            "bytes on the busiest link of the multipod: X first against Y first",
            "2 (closed form)",
            f"{first_x / first_y:.2f}",
        ),
    ]
    claims = [
        Claim("Unsharded updates cost: shares of LARS, Adam, LAMB in order and above 3 %", f"{P1}; {P2}",
              f"{lars:.1%}, {adam:.1%}, {lamb:.1%}", "3 %", min(lars, adam, lamb) > 0.03 and lars < lamb < adam),
        Claim("SSD's speed-up on 4 devices a replica", P2, whole / split, "1.4 to 1.8", 1.4 <= whole / split <= 1.8),
        Claim("Two-dimensional sums beat one ring on 1,024 chips", P4, slow / fast, 1, slow > fast),
        Claim("Y first halves the multipod's gradient sum", P1, first_x / first_y, 1.8, first_x / first_y > 1.8),
    ]  # fmt: skip
    return rows, claims


WHOLE = Layout(sync=Sync("torus-2d"))
"""Sums in two dimensions, and every device updates all weights."""


def _step_s(model: str, machine: Machine, chips: int, spatial: int, batch: int) -> float:
    layout, on = split_by(spatial=(spatial,)), machine.of(pod(chips).topology)
    return predict_step(MODELS[model], layout, batch, on, norm_group=16 * spatial).step_s


def _summed(machine: Machine, schedule: str) -> float:
    return cost(pod(1024).topology, schedule).seconds(machine, 102.2e6)


def _constants(found: Fit, machine: Machine) -> Section:
    meaning = {
        "convolution": "of the peak, where sizes fill the matrix unit",
        "matmul": "of the peak, where sizes fill the matrix unit",
        "memory": "of 450 GB/s a core",
        "op_s": "seconds an operator",
        "link": "of 82 GB/s one way",
        "hop_s": "seconds a hop",
        "message_s": "seconds a collective",
    }
    rows = [
        (name, f"{value:.3g}", f"{spread:.0%}", meaning[name], "not fixed by the data" if name in found.loose else "")
        for name, (value, spread) in found.constants.items()
    ]
    rows.append(("start_s", f"{machine.calibration.start_s:.3g}", "", "seconds of a run beside its steps", ""))
    rows.append(("vector", "0.03", "", "of the peak; not fitted: 1,024 lanes x 2 x 0.94 GHz", ""))
    twins = "; ".join(f"{a} and {b} ({r:+.2f})" for a, b, r in found.twins)
    text = (
        "One set for all models, sizes and layouts, by least squares of the logarithms of predicted over measured. "
        f"Pairs that the data cannot tell apart (correlation above 0.95): {twins or 'none'}. Constants that end at a "
        f"limit "
        "or are uncertain by more than a factor of two are marked: hops and messages are small beside all else, so "
        "only "
        "their sum is known. An operator's 16 microseconds are more than a kernel takes to start: they stand for all "
        "that "
        "does not shrink with the batch."
    )
    return Section("Constants", text, ("constant", "value", "uncertainty", "meaning", "remark"), rows)


def _steps(machine: Machine) -> Section:
    rows = []
    for row in V06:
        step = v3.priced(row, machine)
        parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in step.split().items() if s > 5e-5)
        error = f"{step.step_s / (row.step_ms / 1e3) - 1:+.1%}"
        cells = (row.model, f"{row.chips:,}", f"{row.batch:,}", str(row.layout.split) or "none")
        rows.append((*cells, f"{row.step_ms:.1f}", f"{1e3 * step.step_s:.1f}", error, parts))
    head = ("model", "chips", "batch", "split", "measured, ms", "predicted, ms", "error", "parts, ms")
    return Section(
        "Steps of v0.6", "Measured steps hold their share of the evaluations; so do the predicted.", head, rows
    )


def _scores(machine: Machine) -> Section:
    rows = []
    for row in V06:
        if row.epochs:
            score = v3.score_s(row, machine)
            rows.append((f"{row.chips:,}", f"{row.run_s:.1f}", f"{score:.1f}", f"{score / row.run_s - 1:+.1%}"))
    text = "ResNet-50 end to end: the logged epochs, the predicted step, and one number of seconds for all around."
    return Section("Scores of v0.6", text, ("chips", "measured, s", "predicted, s", "error"), rows, figure="scaling")


def _predictions(runs: dict[str, RunPrediction], spreads: dict[str, tuple[float, float]]) -> Section:
    rows = []
    for one in V07:
        found = runs[one.name]
        low, high = spreads[one.name]
        parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in found.step.split().items() if s > 5e-5)
        step = f"{1e3 * found.step.step_s:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"
        rows.append((one.name, step, parts, f"{found.updates:,.0f}", f"{found.seconds:.1f}", one.source))
    text = (
        "No measurement of these runs was used, and none is in this repository. In brackets: the step when the rows "
        "of one model are left out of the fit. Parameters and FLOPs are those of the tables in "
        "`multipod.plan.tables.models`, the machine is `tpu-v3-multipod` (or 64 x 32, or a slice of a pod), gradients "
        "are summed by `torus-2d`, the update is sharded."
    )
    return Section(
        "Predictions of v0.7",
        text,
        ("run", "step, ms", "parts, ms", "updates", "run, s", "inputs and their source"),
        rows,
    )


def _mask(machine: Machine, beside: v3.Irregular) -> Section:
    rows = [
        (f"{row.chips}", f"{row.step_ms:.1f}", f"{1e3 * v3.priced(row, machine).step_s:.1f}", f"{error:+.1%}")
        for row, error in zip(MASK_RCNN, beside.errors, strict=True)
    ]
    text = (
        "The counted operators are less than half of Mask R-CNN's steps in v0.6, whose choice of regions was not "
        "split and "
        "which hold most of the evaluation. Two constants for its three rows stand for that: "
        f"{1e3 * beside.example_s:.0f} ms an example of a replica, {beside.evaluation_s:.0f} s an evaluation. In "
        f"v0.7 the "
        "regions were split over the replica's devices (gathers as one-hot products) and masks were scored by 20 "
        "processes "
        "beside training, so the prediction divides the first by 8 and pays the second once, at the end. Of all "
        "predictions "
        "this is the least certain."
    )
    return Section("Mask R-CNN", text, ("chips", "measured, ms", "operators, ms", "error with both constants"), rows)


def _scaling(machine: Machine) -> Any:
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    for model, mark in (("resnet50", "o"), ("ssd", "s"), ("transformer", "^")):
        rows: Sequence[PublishedStep] = [row for row in V06 if row.model == model]
        chips = [row.chips for row in rows]
        axes.plot(chips, [row.step_ms for row in rows], mark, label=f"{model}, measured")
        axes.plot(chips, [1e3 * v3.priced(row, machine).step_s for row in rows], "-", color="0.5", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="chips of TPU v3", ylabel="step, ms (lines: predicted)")
    axes.legend()
    return figure
