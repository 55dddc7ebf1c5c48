"""The table of experiments. A new one is a module with `run(report) -> Outcome`, a line here, and cases of its claims.

The cases are in `tests/claim_cases.py`: of each kind of claim a result by which it holds, and one by which it does not.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multipod.errors import RecipeError, nearest
from multipod.experiments.outcome import Outcome
from multipod.extras import require

Report = Callable[[str], None]
"""Takes a line about what goes on now, for the terminal."""


@dataclass(frozen=True)
class Experiment:
    """An experiment that `multipod reproduce` offers.

    Attributes:
      about: what it tries, in one line.
      place: `module:function`; the module is imported when the experiment is run.
      minutes: about how long it takes on two cores that do nothing else.
      cpu_devices: virtual devices that it needs on a CPU.
      counted: what `--count` counts; empty if there is nothing to count. Such a one also takes `--keep`.
    """

    about: str
    place: str
    minutes: float
    cpu_devices: int = 8
    counted: str = ""

    def run(self, report: Report, count: int | None = None, keep: Path | None = None) -> Outcome:
        """Runs it; `report` is told what goes on. `count` is how many there are to be of what is `counted`.

        What is done is kept in the folder `keep`, and not done again by a later run with the same folder.

        Raises:
          RecipeError: there is nothing to count, or to keep.
          MissingPackageError: Matplotlib is not installed.
        """
        given = {"count": count, "keep": keep}
        asked = {name: value for name, value in given.items() if value is not None}
        if asked and not self.counted:
            raise RecipeError(f"this experiment has nothing to {next(iter(asked))}: leave out --{next(iter(asked))}.")
        require("multipod reproduce", "matplotlib")
        module, function = self.place.split(":")
        return getattr(importlib.import_module(module), function)(report, **asked)


EXPERIMENTS: dict[str, Experiment] = {
    "availability": Experiment(
        "random faults in real runs, goodput with failures, and what a hole in the mesh costs",
        "multipod.experiments.availability.run:run",
        minutes=15,
        cpu_devices=16,
        counted="faults",
    ),
    "layouts": Experiment(
        "three models in every layout of eight devices: what they learn, hold, send and take",
        "multipod.experiments.layouts:run",
        minutes=8,
    ),
    "length-buckets": Experiment(
        "batches of like lengths: what they gain, and what hosts lose that choose lengths for themselves",
        "multipod.experiments.length_buckets:run",
        minutes=3,
    ),
    "mlperf": Experiment(
        "the multipod paper's curves from the planner: time, speed-up and share of sums on 16 to 4,096 chips",
        "multipod.experiments.mlperf:run",
        minutes=0.5,
    ),
    "pipemare": Experiment(
        "PipeMare: limits, delays, memory, and asynchronous pipelines with the quality of synchronous ones",
        "multipod.experiments.pipemare.run:run",
        minutes=10,
        cpu_devices=1,
    ),
    "planner": Experiment(
        "the planner against MLPerf v0.6, its predictions of v0.7, and large runs from small ones",
        "multipod.experiments.planner:run",
        minutes=1.5,
    ),
    "planner-host": Experiment(
        "the planner on this host: constants from ten small steps, predictions of six others",
        "multipod.experiments.planner_host:run",
        minutes=3,
    ),
    "shuffle-buffer": Experiment(
        "what a small shuffle buffer does to batches and to the spread of runs",
        "multipod.experiments.shuffle_buffer:run",
        minutes=0.5,
    ),
    "stragglers": Experiment(
        "the straggler model of host input against real readers, and its predictions for 16 to 512 hosts",
        "multipod.experiments.stragglers:run",
        minutes=0.5,
    ),
    "adasum": Experiment(
        "Adasum reaches the small batch's loss in fewer epochs than the sum, perceptrons",
        "multipod.experiments.adasum:run",
        7,
        cpu_devices=1,
    ),
    "batch-epochs": Experiment(
        "epochs to the target against the batch, a small ResNet beside MLPerf's reference convergence points",
        "multipod.experiments.batch_epochs:run",
        8,
        cpu_devices=1,
    ),
    "batch-norm-tiles": Experiment(
        "accuracy of a perceptron against the batch-norm tile, and against what evaluation normalises with",
        "multipod.experiments.batch_norm_tiles:run",
        3,
        cpu_devices=1,
    ),
    "lars": Experiment(
        "LARS unscaled, LARS scaled and plain momentum at a large batch, a perceptron",
        "multipod.experiments.lars:run",
        6,
        cpu_devices=1,
    ),
    "tt-rec": Experiment(
        "tensor-train tables for DLRM: compression, quality, cache, time, and MLPerf's sizes",
        "multipod.experiments.tt_rec.run:run",
        minutes=6,
    ),
    "st-moe": Experiment(
        "claims of ST-MoE on routers, experts and fine-tuning", "multipod.experiments.st_moe.run:run", 20
    ),
}


def experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
      RecipeError: there is none, with the nearest names.
    """
    if name not in EXPERIMENTS:
        raise RecipeError(f"no experiment {name!r}. {nearest(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
