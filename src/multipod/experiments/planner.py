"""The planner against MLPerf v0.6, and its predictions of v0.7: one set of constants for all sizes and models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from multipod.experiments import planner_dlrm, planner_families
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.layout.layout import Layout
from multipod.layout.sync import Sync
from multipod.plan.calibration.fit import Fit, fit
from multipod.plan.machine import Machine
from multipod.plan.network import cost
from multipod.plan.predict import predict_step
from multipod.plan.run import RunPrediction
from multipod.plan.tables import v3
from multipod.plan.tables.choices import choices
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import EFFICIENTNET, MASK_RCNN, V06, V07, PublishedRun, PublishedStep, pod, split_by

P1, P2 = "arXiv:2011.03641", "arXiv:1909.09756"
LOGS = f"logs of MLPerf v0.6; {P2}"
SPLIT_GAIN = 24.5 / 13.8
"""SSD's step on 256 chips over that on 1,024 with 4 devices a replica, the same examples a replica: logs of v0.6."""

SHARES = {"LARS": 0.06, "Adam": 0.45, "LAMB": 0.18}
"""Published shares of an update that is not sharded in the step, noted second-hand to one or two digits."""

MULTIPOD_S, MULTIPOD_UPDATES = 28.8, 1738
"""Score of ResNet-50 on 4,096 chips in MLPerf v0.7 and the updates that its flags plan (arXiv:2011.03641)."""

NEAR, FAR, ROUGH = 0.10, 0.15, 0.25
"""Relative errors that pass: within the sizes of the fit, beyond them, and of numbers noted to two digits."""

MODELS_OF_V06 = ("resnet50", "ssd", "transformer")


@dataclass(frozen=True)
class Evidence:
    """All numbers that the claims are made of.

    Attributes:
      fitted: relative error of each step of v0.6, which the constants were fitted to.
      scores: relative error of each score of ResNet-50 in v0.6, likewise.
      held_out: relative errors of rows that a fit has not seen, by what was left out of it.
      shares: of the unsharded update in the step, by optimizer.
      effects: ratios by name.
      run_s: ResNet-50 on 4,096 chips, end to end, from a fit without any number of v0.7.
    """

    fitted: Mapping[str, float]
    scores: Mapping[str, float]
    held_out: Mapping[str, Mapping[str, float]]
    shares: Mapping[str, float]
    effects: Mapping[str, float]
    run_s: float


def run(report: Callable[[str], None]) -> Outcome:
    """Fits TPU v3's constants, holds fits that lack a part of the data against that part, and predicts v0.7."""
    report("fitting seven constants to 18 steps and 10 sums")
    found = v3.fitted()
    machine = _started(found.machine)
    report("fits that lack a part of the data, and what they say of it")
    held_out = _held_out()
    report("predicting six runs, and effects of single techniques")
    beside = v3.irregular(machine)
    runs = {one.name: v3.predicted(one, machine, beside) for one in V07}
    brackets = {one.name: _bracket(one, runs[one.name].step.step_s, held_out) for one in V07}
    evidence = _evidence(machine, held_out)
    families = planner_families.study(report)
    return Outcome(
        "The planner: fitted to MLPerf v0.6, predicting v0.7, and large runs from small ones",
        (*claims_of(evidence), *planner_families.claims_of(families)),
        (
            _constants(found, machine),
            _steps(machine),
            _scores(machine),
            _unseen(held_out),
            _predictions(runs, brackets),
            _choices(machine),
            planner_dlrm.section(machine),
            _effects(evidence),
            _mask(machine, beside),
            *planner_families.sections(families),
        ),
        figures={"scaling": _scaling(machine), "families": planner_families.figure(families)},
        data={
            "predictions": [
                {
                    "run": name,
                    "step_ms": 1e3 * one.step.step_s,
                    "run_s": one.seconds,
                    "updates": one.updates,
                    "step_ms_by_held_out_errors": [1e3 * end for end in brackets[name]],
                    "parts_ms": {part: 1e3 * seconds for part, seconds in one.step.split().items()},
                    "source": next(r.source for r in V07 if r.name == name),
                }
                for name, one in runs.items()
            ],
            "constants": {name: value for name, (value, _) in found.constants.items()},
            "evidence": asdict(evidence),
            "families": planner_families.data_of(families),
        },
    )


def claims_of(found: Evidence) -> list[Claim]:
    """What the evidence says of each claim."""
    return [*_fit_claims(found), *_held_out_claims(found), *_effect_claims(found)]


def _fit_claims(found: Evidence) -> list[Claim]:
    def largest(by_row: Mapping[str, float], resnet: bool) -> float:
        return max(abs(error) for name, error in by_row.items() if name.startswith("resnet50") == resnet)

    steps, others, scores = largest(found.fitted, True), largest(found.fitted, False), largest(found.scores, True)
    bent = "seven constants cannot describe the very rows that they are fitted to"
    return [
        Claim("Fit: ResNet-50's step at 16 to 1,024 chips: largest error, %", LOGS, 100 * steps, 100 * NEAR,
              steps <= NEAR, fails_if=bent),
        Claim("Fit: ResNet-50's score at 16 to 1,024 chips: largest error, %", LOGS, 100 * scores, 100 * FAR,
              scores <= FAR,
              fails_if="one number of seconds beside the steps does not explain the scores of all sizes"),
        Claim("Fit: SSD's and Transformer's step at 16 to 1,024 chips: largest error, %", LOGS, 100 * others,
              100 * FAR, others <= FAR, fails_if=bent),
    ]  # fmt: skip


def _held_out_claims(found: Evidence) -> list[Claim]:
    def largest(*left_out: str) -> float:
        return max(abs(error) for name in left_out for error in found.held_out[name].values())

    models, last, far = largest(*MODELS_OF_V06), largest("1,024 chips"), largest("512 and 1,024 chips")
    sums, run = largest("sums"), found.run_s / MULTIPOD_S - 1
    return [
        Claim("Held out: the steps of each model by a fit that lacks that model: largest error, %", LOGS,
              100 * models, 100 * NEAR, models <= NEAR,
              fails_if="constants of two models do not carry over to the third"),
        Claim("Held out: 1,024 chips by a fit that lacks them: largest error, %", LOGS, 100 * last, 100 * NEAR,
              last <= NEAR, fails_if="twice the largest size in the fit is out of its reach"),
        Claim("Held out: 512 and 1,024 chips by a fit to at most 256: largest error, %", LOGS, 100 * far, 100 * FAR,
              far <= FAR,
              fails_if="four times the largest size in the fit, as the multipod is of v0.6's, is out of its reach"),
        Claim("Held out: EfficientNet's gradient sums on 64 to 512 chips by a fit to steps alone: largest error, %",
              "arXiv:2011.00071, table I", 100 * sums, 100 * ROUGH, sums <= ROUGH,
              fails_if="links that explain steps do not explain sums that were measured by themselves"),
        Claim("Held out: ResNet-50 on 4,096 chips, end to end, by a fit without any number of v0.7, s", P1,
              found.run_s, f"{MULTIPOD_S} within {FAR:.0%}", abs(run) <= FAR,
              fails_if="the multipod takes another time than predicted, by its machine or by what compilers gained"),
    ]  # fmt: skip


def _effect_claims(found: Evidence) -> list[Claim]:
    split, same, whole, first = (found.effects[name] for name in ("split", "split, same chips", "resnet", "Y first"))
    published = {"LARS": (P2, "ResNet-50 on 1,024"), "Adam": (P2, "Transformer on 1,024"), "LAMB": (P1, "BERT on 512")}
    shares = [
        Claim(f"Share of {name}, not sharded, in the step of {where} chips, %", source, 100 * found.shares[name],
              f"{100 * SHARES[name]:g} within {ROUGH:.0%} of it", abs(found.shares[name] / SHARES[name] - 1) <= ROUGH,
              fails_if="the priced update is not the measured one: no step in the fit has an unsharded update")
        for name, (source, where) in published.items()
    ]  # fmt: skip
    return [
        *shares,
        Claim("SSD's speed-up on 4 devices a replica (256 to 1,024 chips), by a fit without split rows", LOGS, split,
              f"{SPLIT_GAIN:.2f} within {NEAR:.0%}", abs(split / SPLIT_GAIN - 1) <= NEAR,
              fails_if="a split's halos and its smaller pieces are priced otherwise than they cost"),
        Claim("SSD on 1,024 chips, batch 2,048: no split over the 4-way split that Google ran", P2, same, "above 1",
              same > 1, fails_if="the planner would not choose the layout that was submitted"),
        Claim("ResNet-50 on 1,024 chips, batch 32,768: a 4-way split over none, which Google ran", P2, whole,
              "above 1", whole > 1, fails_if="the planner would not choose the layout that was submitted"),
        Claim("Y first: the multipod's bytes on the busiest link fall by", f"closed form; {P1}", first,
              f"2 within {NEAR / 2:.0%}", abs(first / 2 - 1) <= NEAR / 2,
              fails_if="sums are priced with other loads of links"),
    ]  # fmt: skip


def _held_out() -> dict[str, dict[str, float]]:
    """By what a fit lacks: the relative errors of that, by row."""
    keeps: dict[str, Callable[[PublishedStep], bool]] = {
        **{model: partial(_is_other, model) for model in MODELS_OF_V06},
        "1,024 chips": lambda row: row.chips < 1024,
        "512 and 1,024 chips": lambda row: row.chips <= 256,
    }
    errors = {}
    for name, kept in keeps.items():
        machine = v3.fitted([row for row in V06 if kept(row)]).machine
        errors[name] = {_name(row): _error(row, machine) for row in V06 if not kept(row)}
    steps = _fit_without(lambda name: name.startswith("sum"))
    errors["sums"] = {
        f"{one.nbytes / 4e6:.1f} M parameters {one.chips}": v3.sum_s(one, steps) / one.seconds - 1
        for one in EFFICIENTNET
    }
    return errors


def _is_other(model: str, row: PublishedStep) -> bool:
    return row.model != model


def _name(row: PublishedStep) -> str:
    return f"{row.model} {row.chips}"


def _error(row: PublishedStep, machine: Machine) -> float:
    return v3.priced(row, machine).step_s / (row.step_ms / 1e3) - 1


def _fit_without(left_out: Callable[[str], bool]) -> Machine:
    """The machine of a fit to all measurements but those with such names."""
    return fit(v3.base(), [one for one in v3.measurements() if not left_out(one.name)], v3.NAMES, v3.LIMITS).machine


def _started(machine: Machine) -> Machine:
    return machine.calibrated(start_s=v3.start_s(machine))


def _bracket(run: PublishedRun, step_s: float, held_out: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    """The step by the largest held-out errors of rows whose replicas are split, or not, as those of the run are."""
    alike = {_name(row) for row in V06 if bool(str(row.layout.split)) == bool(str(run.layout.split))}
    left_out = (*MODELS_OF_V06, "512 and 1,024 chips")
    errors = [error for name in left_out for row, error in held_out[name].items() if row in alike]
    return step_s / (1 + max(*errors, 0.0)), step_s / (1 + min(*errors, 0.0))


def _evidence(machine: Machine, held_out: Mapping[str, Mapping[str, float]]) -> Evidence:
    def update_share(model: str, chips: int, batch: int, norm_group: int = 1) -> float:
        step = predict_step(MODELS[model], WHOLE, batch, machine.of(pod(chips).topology), norm_group)
        return step.update_s / step.step_s

    unsplit = v3.fitted([row for row in V06 if not str(row.layout.split)]).machine
    multipod = pod(4096).topology
    before = _started(_fit_without(lambda name: name.endswith(" 4096")))
    return Evidence(
        fitted={_name(row): _error(row, machine) for row in V06},
        scores={_name(row): v3.score_s(row, machine) / row.run_s - 1 for row in V06 if row.epochs},
        held_out=held_out,
        shares={
            "LARS": update_share("resnet50", 1024, 32768, norm_group=8),
            "Adam": update_share("transformer", 1024, 2048),
            "LAMB": update_share("bert", 512, 4096),
        },
        effects={
            "split": _step_s("ssd", unsplit, 256, 1, 2048) / _step_s("ssd", unsplit, 1024, 4, 2048),
            "split, same chips": _step_s("ssd", machine, 1024, 1, 2048) / _step_s("ssd", machine, 1024, 4, 2048),
            "resnet": _step_s("resnet50", machine, 1024, 4, 32768) / _step_s("resnet50", machine, 1024, 1, 32768),
            "one ring": _summed(machine, "ring") / _summed(machine, "torus-2d"),
            "Y first": cost(multipod, "multi-ring").vectors / cost(multipod, "torus-2d").vectors,
        },
        run_s=v3.predicted(V07[0], before, v3.irregular(before)).seconds,
    )


def _effects(found: Evidence) -> Section:
    text = (
        "Each technique switched off or on in an otherwise equal step. Shares of the update are of a step whose update "
        "is not sharded, which no step in the fit is. Where a number was published it is the target of a claim."
    )
    effects = found.effects
    rows = [
        *((f"share of {name}, not sharded", f"about {SHARES[name]:.0%}", f"{share:.1%}")
          for name, share in found.shares.items()),
        ("SSD: 256 chips over 1,024 with 4 devices a replica, by a fit without split rows",
         f"about 1.6 ({P2}); {SPLIT_GAIN:.2f} in the logs", f"{effects['split']:.2f}"),
        ("SSD on 1,024 chips: no split over 4 devices a replica", "above 1: it was run split",
         f"{effects['split, same chips']:.2f}"),
        ("ResNet-50 on 1,024 chips: 4 devices a replica over no split", "above 1: it was run whole",
         f"{effects['resnet']:.2f}"),
        ("gradient sum of ResNet-50, 1,024 chips: one ring over torus-2d", "no number, so no claim",
         f"{effects['one ring']:.1f}"),
        ("bytes on the busiest link of the multipod: X first over Y first", "2 (closed form)",
         f"{effects['Y first']:.2f}"),
    ]  # fmt: skip
    return Section("Effects", text, ("effect", "published", "predicted"), rows)


def _unseen(held_out: Mapping[str, Mapping[str, float]]) -> Section:
    rows = [(name, row, f"{error:+.1%}") for name, errors in held_out.items() for row, error in errors.items()]
    text = (
        "Fits that lack a part of the data, against that part. That constants describe three models at the sizes that "
        "they were fitted to does not say that they reach four times as far: what is a small part of every step in a "
        "fit is loosely known from it, and can be a large part of the short steps of more chips."
    )
    return Section("What a fit has not seen", text, ("left out of the fit", "row", "error"), rows)


WHOLE = Layout(sync=Sync("xla"))
"""Sums by XLA, and every device updates all weights."""


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
        "their sum is known. An operator's 14 microseconds are more than a kernel takes to start: they stand for all "
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


def _predictions(runs: dict[str, RunPrediction], brackets: dict[str, tuple[float, float]]) -> Section:
    rows = []
    for one in V07:
        found = runs[one.name]
        low, high = brackets[one.name]
        parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in found.step.split().items() if s > 5e-5)
        step = f"{1e3 * found.step.step_s:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"
        rows.append((one.name, step, parts, f"{found.updates:,.0f}", f"{found.seconds:.1f}", one.source))
    text = (
        "No step or score of these runs is in the fit, but two of its ten sums are not from v0.6: the gradient sums of "
        "4,096 chips derive from shares that arXiv:2011.03641 gives of v0.7's ResNet-50 and BERT. One score of these "
        f"runs is in the repository: ResNet-50 on 4,096 chips took {MULTIPOD_S} s for {MULTIPOD_UPDATES:,} updates, "
        f"{1e3 * MULTIPOD_S / MULTIPOD_UPDATES:.1f} ms each, the device time of `experiments/stragglers.py`; the claim "
        "on it is by a fit without those two sums. In brackets: the step by the largest errors, either way, of rows "
        "that a fit had not seen (a model, or sizes up to four times those in the fit), among rows whose replicas are "
        "split, or not, as the run's are. What compilers and libraries gain between two rounds cannot be known from "
        "the earlier one: these are predictions of v0.6's software on v0.7's machine. Parameters and FLOPs are those "
        "of the tables in `multipod.plan.tables.models`, the machine is `tpu-v3-multipod` (or 64 x 32, or a slice of a "
        "pod), gradients are summed by XLA (dimension after dimension), the update is sharded."
    )
    return Section(
        "Predictions of v0.7",
        text,
        ("run", "step, ms", "parts, ms", "updates", "run, s", "inputs and their source"),
        rows,
    )


def _choices(machine: Machine) -> Section:
    rows = []
    for one in choices(machine):
        laid = [f"{str(step.layout.split) or 'none'}: {1e3 * step.step_s:.2f} ms" for step in (one.published, one.ours)]
        verdict = "the same" if not one.cause else "a tie" if one.agrees else "**another**"
        rows.append(
            (one.published.workload, one.published.machine, f"{one.published.batch:,}", *laid, verdict, one.cause)
        )
    text = (
        "The split of a replica that was run, and the quickest of 1, 2, 4, 8 and 16 devices over the same axis, with "
        "the same sum and update. A tie is nearer than the error of a step; the last column is the part of the step "
        "that the published split is priced longer in. Mask R-CNN was run with two images a replica, which by the "
        "rule of tiles cost as much as four; its own choice of regions, which is not counted, may have spoken for "
        "fewer devices."
    )
    head = ("model", "machine", "batch", "published", "ours", "choice", "cause")
    return Section("Published choices", text, head, rows)


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
