"""The layouts that were run, held against those that the planner would have chosen for the same batch and machine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from multipod.errors import PlanError
from multipod.layout.split import UNSPLIT, ModelSplit
from multipod.plan.machine import Machine
from multipod.plan.predict import Prediction, predict_step
from multipod.plan.rank import tied
from multipod.plan.search import SPLITS
from multipod.plan.tables.published import V06, V07, PublishedRun, PublishedStep, pod


@dataclass(frozen=True)
class Choice:
    """A published layout beside the planner's.

    Attributes:
      published: the step as it was laid out, priced.
      ours: the quickest of the splits of one axis, summed and sharded as the published one.
      agrees: whether they are the same, or a tie.
      cause: the part of the step in which the published one is priced longest against ours; "" where they are the same.
    """

    published: Prediction
    ours: Prediction
    agrees: bool
    cause: str


def choices(machine: Machine) -> Iterator[Choice]:
    """The choice of each published run of v0.6 on 512 chips and more, and of v0.7, by the constants of `machine`."""
    runs: list[PublishedStep | PublishedRun] = [row for row in V06 if row.chips >= 512]
    for run in (*runs, *V07):
        on = machine.of(pod(run.chips).topology)
        steps = {str(split): step for split in _splits(run) if (step := _priced(run, split, on)) is not None}
        published, ours = steps[str(run.layout.split)], min(steps.values(), key=lambda step: step.step_s)
        lost = {name: seconds - ours.split()[name] for name, seconds in published.split().items()}
        part = max(lost, key=lambda name: lost[name])
        cause = "" if ours is published else f"{part} {1e3 * lost[part]:+.2f} ms"
        yield Choice(published, ours, ours is published or tied(ours, published, on), cause)


def _splits(run: PublishedStep | PublishedRun) -> list[ModelSplit]:
    if "spatial" in run.workload.axes:
        return [UNSPLIT, *(ModelSplit(spatial=(n,)) for n in SPLITS[1:])]
    return [ModelSplit(model=n) for n in SPLITS]


def _priced(run: PublishedStep | PublishedRun, split: ModelSplit, on: Machine) -> Prediction | None:
    """The step split so, with as many devices to a batch norm as in the run; None where there are too few examples."""
    layout, group = replace(run.layout, split=split), max(run.norm_group, split.devices)
    try:
        return predict_step(run.workload, layout, run.batch, on, group)
    except PlanError:
        return None
