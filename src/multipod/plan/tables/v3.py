"""TPU v3's constants, fitted to published steps: what `multipod reproduce planner` prints and `find` hands out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from multipod.plan.calibration.fit import Fit, Measurement, fit
from multipod.plan.machine import Machine, find
from multipod.plan.network import all_reduce_s
from multipod.plan.predict import Prediction, predict_step, with_evaluations
from multipod.plan.run import RunPrediction, predict_run
from multipod.plan.tables.published import (
    EFFICIENTNET,
    EXAMPLES,
    LINKS,
    MASK_RCNN,
    V06,
    MeasuredSum,
    PublishedRun,
    PublishedStep,
    pod,
)
from multipod.plan.workload import Workload

NAMES = ("convolution", "matmul", "memory", "op_s", "link", "hop_s", "message_s")
"""What is fitted. `vector` is not: 1,024 lanes x 2 operations x 0.94 GHz are 1.9 of a core's 61.5 TFLOP/s."""

LIMITS = {"memory": (0.3, 1.0), "hop_s": (0.5e-6, 1.5e-6), "message_s": (1e-6, 1e-4)}
"""No memory is faster than its peak; the latency of a hop is within a factor of the scaling book's microsecond, and no
collective starts in less than one."""

SUM_WEIGHT = 0.3
"""Of a measured sum beside a measured step: shares of a step in percent, noted second-hand."""


def base() -> Machine:
    """TPU v3 before the fit."""
    return find("tpu-v3-pod").calibrated(vector=0.03)


def priced(row: PublishedStep, machine: Machine) -> Prediction:
    """The step of a row, with its evaluations."""
    on = row.machine(machine)
    step = predict_step(row.workload, row.layout, row.batch, on, row.norm_group)
    return with_evaluations(step, row.workload, on, row.evaluate_every)[0]


def sum_s(one: MeasuredSum, machine: Machine) -> float:
    """A measured sum, priced."""
    return all_reduce_s(machine.of(pod(one.chips).topology), "xla", one.nbytes)


def measurements(rows: Sequence[PublishedStep] = V06) -> list[Measurement]:
    """What the constants are fitted to."""
    steps = [Measurement(f"{row.model} {row.chips}", row.step_ms / 1e3, partial(_step_s, row)) for row in rows]
    sums = [
        Measurement(f"sum of {one.nbytes / 1e6:.0f} MB {one.chips}", one.seconds, partial(sum_s, one), weight)
        for group, weight in ((EFFICIENTNET, SUM_WEIGHT), (LINKS, 1.0))
        for one in group
    ]
    return steps + sums


def _step_s(row: PublishedStep, machine: Machine) -> float:
    return priced(row, machine).step_s


def fitted(rows: Sequence[PublishedStep] = V06) -> Fit:
    """The constants of TPU v3 from those rows, and from the sums."""
    return fit(base(), measurements(rows), NAMES, LIMITS)


def start_s(machine: Machine) -> float:
    """Seconds of a run beside its steps: the one number that suits the scores of ResNet-50 best, by relative errors."""
    rows = [row for row in V06 if row.epochs]
    steps_s = np.array([row.epochs * EXAMPLES[row.model] / row.batch * priced(row, machine).step_s for row in rows])
    scores_s = np.array([row.run_s for row in rows])
    weights = 1 / scores_s
    return max(0.0, float(((scores_s - steps_s) * weights**2).sum() / (weights**2).sum()))


def score_s(row: PublishedStep, machine: Machine) -> float:
    """A row's run, end to end, from its epochs."""
    updates = row.epochs * EXAMPLES[row.model] / row.batch
    return predict_run(priced(row, machine), machine, updates).seconds


@dataclass(frozen=True)
class Irregular:
    """What Mask R-CNN's steps of v0.6 hold beside the counted operators: one number an example, one an evaluation."""

    example_s: float
    evaluation_s: float
    errors: tuple[float, ...]


def irregular(machine: Machine) -> Irregular:
    """Two constants for its three rows: operators that no split divided then, and the hosts' scoring of masks."""
    left = np.array([row.step_ms / 1e3 - priced(row, machine).step_s for row in MASK_RCNN])
    measured = np.array([row.step_ms / 1e3 for row in MASK_RCNN])
    examples = [row.batch / (2 * row.chips / row.layout.replica_devices) for row in MASK_RCNN]
    terms = np.array([[n, 1 / row.evaluate_every] for n, row in zip(examples, MASK_RCNN, strict=True)])
    found, *_ = np.linalg.lstsq(terms / measured[:, None], left / measured, rcond=None)
    errors = (terms @ found - left) / measured
    return Irregular(float(max(found[0], 0)), float(max(found[1], 0)), tuple(map(float, errors)))


def predicted(run: PublishedRun, machine: Machine, beside: Irregular) -> RunPrediction:
    """A run of v0.7. Mask R-CNN's irregular operators were split by then, and its scoring ran beside training."""
    on = machine.of(pod(run.chips).topology)
    workload, last_s = run.workload, run.last_s
    if run.model == "maskrcnn":
        workload = _with(workload, beside)
        last_s = beside.evaluation_s
    step = predict_step(workload, run.layout, run.batch, on, run.norm_group)
    step, _ = with_evaluations(step, workload, on, run.evaluate_every)
    return predict_run(step, on, run.updates, last_s)


def _with(workload: Workload, beside: Irregular) -> Workload:
    return replace(workload, unsplit_s=beside.example_s, splits_all=True)
