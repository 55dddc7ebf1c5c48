"""The time of a whole run: steps, evaluations, start, late hosts, checkpoints and failures."""

from dataclasses import dataclass
from typing import Any

from multipod.errors import PlanError
from multipod.plan.goodput import Failing, daly_s, goodput
from multipod.plan.machine import Machine
from multipod.plan.predict import Prediction


@dataclass(frozen=True)
class RunPrediction:
    """A run, in seconds.

    Attributes:
      step: of one update, with its share of evaluations.
      updates: to the target.
      start_s: before the first step, and what follows the last.
      last_s: until the metric of the last evaluation is known.
      checkpoints_s: spent on checkpoints.
      failures_s: work lost to failures, and restarts.
      price: in the machine's currency; 0 if it has none.
      every_s: of work between two checkpoints; 0: none.
    """

    step: Prediction
    updates: float
    start_s: float
    last_s: float
    checkpoints_s: float
    failures_s: float
    price: float
    every_s: float = 0.0

    @property
    def goodput(self) -> float:
        """The share of the time in training steps that is neither saving, nor lost, nor done twice."""
        training_s = self.updates * self.step.step_s
        return training_s / (training_s + self.checkpoints_s + self.failures_s)

    @property
    def seconds(self) -> float:
        """From the start to the target."""
        around = self.start_s + self.last_s + self.checkpoints_s + self.failures_s
        return self.updates * self.step.step_s + around

    def data(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        names = ("updates", "start_s", "last_s", "checkpoints_s", "failures_s", "price", "goodput")
        return {"run_s": self.seconds, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Saving:
    """Checkpoints and restarts.

    Attributes:
      every_s: of work between checkpoints; 0: none; None: what loses least (`goodput.daly_s`).
      seconds: that one stops training.
      restart_s: from a failure to the first step after it.
    """

    every_s: float | None = 0.0
    seconds: float = 0.0
    restart_s: float = 120.0


def predict_run(
    step: Prediction, machine: Machine, updates: float, last_s: float = 0.0, saving: Saving | None = None
) -> RunPrediction:
    """The run of `updates` such steps on `machine`.

    Failures come as a Poisson process of `chips * chip_failures_per_hour`. Each costs a restart and what was done since
    the last checkpoint, over and over if it must be (`goodput.goodput`); without checkpoints that is the whole run.

    Raises:
      PlanError: no updates.
    """
    if not updates > 0:
        raise PlanError(
            f"a run of {updates:g} updates is none. Give the updates, or the epochs, that the target takes."
        )
    saving = saving or Saving()
    training_s = updates * step.step_s
    rate = machine.chips * machine.chip_failures_per_hour / 3600
    every_s = saving.every_s
    if every_s is None:
        every_s = min(training_s, daly_s(Failing(1 / rate, saving.seconds, saving.restart_s))) if rate else 0.0
    checkpoints_s = training_s / every_s * saving.seconds if every_s else 0.0
    failures_s = _lost_s(training_s, every_s, rate, saving) - checkpoints_s if rate else 0.0
    start_s = machine.calibration.start_s
    total_s = training_s + checkpoints_s + failures_s + start_s + last_s
    price = machine.price * machine.topology.size * total_s / 3600
    return RunPrediction(step, updates, start_s, last_s, checkpoints_s, failures_s, price, every_s)


def _lost_s(training_s: float, every_s: float, rate: float, saving: Saving) -> float:
    """Beside the work itself: saving, restarts, and work that is done again.

    Raises:
      PlanError: failures come so fast that the run never ends.
    """
    failing = Failing(1 / rate, saving.seconds if every_s else 0.0, saving.restart_s)
    try:
        share = goodput(every_s or training_s, failing)
    except OverflowError:
        share = 0.0
    if share < 1e-6:
        raise PlanError(
            f"a failure each {1 / rate:.3g} s and {every_s or training_s:.3g} s of work between checkpoints: such a "
            "run never ends. Save more often, or take fewer or better chips."
        )
    return training_s / share - training_s


def save_s(step: Prediction, machine: Machine, bytes_per_s: float = 1e9) -> float:
    """What a checkpoint takes if every host writes its part of one replica's state, and `bytes_per_s` of it."""
    parts, sync = step.layout.weight_devices, step.layout.sync
    weights = step.memory.parameters * (machine.devices if sync.fsdp else parts)
    slots = step.memory.optimizer * (machine.devices if sync.shards_update else parts)
    return (weights + slots) / machine.hosts / bytes_per_s
