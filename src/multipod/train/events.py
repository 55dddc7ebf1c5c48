"""What a run tells its observers: plain values, in the order in which they happen.

`metrics.jsonl` holds them one a line, with the class's name in `event`. Times are seconds; those of
updates are taken when the result of the update is there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Started:
    """A run begins, or goes on after `update` updates.

    Attributes:
      folder: the run's folder.
      update: updates done so far: 0, or those of the checkpoint that is resumed.
      updates: updates of the whole run.
      batch: examples in an update.
      facts: what `run.json` holds.
      unit: what an example is called: images, examples.
    """

    folder: str
    update: int
    updates: int
    batch: int
    facts: dict[str, Any] = field(default_factory=dict)
    unit: str = "examples"


@dataclass(frozen=True)
class Compiled:
    """The step is compiled, or was found in the cache."""

    seconds: float


@dataclass(frozen=True)
class Updated:
    """Update number `update` (from 1) is done.

    Attributes:
      values: means over the batch: `loss`, and what else the objective names.
      step_s: from the end of the update before it to its own end.
      data_s: of these, at most, with the devices idle because the next batch was not there.
      rate: examples a second.
    """

    update: int
    values: dict[str, float]
    step_s: float
    data_s: float
    rate: float


@dataclass(frozen=True)
class Evaluated:
    """The state after `update` updates was evaluated on all `count` test examples, each counted once."""

    update: int
    values: dict[str, float]
    sums: dict[str, float]
    count: int
    seconds: float


@dataclass(frozen=True)
class Skipped:
    """An example could not be read and was left out: another stands in its place, or, in evaluation, none.

    Each is told once, if process 0 read it. `number` is its place in the data, `name` where it lies.
    """

    update: int
    number: int
    name: str
    reason: str


@dataclass(frozen=True)
class Saved:
    """The state after `update` updates was handed to the checkpoint writer; `seconds` is what the run waited."""

    update: int
    seconds: float


@dataclass(frozen=True)
class Ended:
    """The run is over, or was asked to stop.

    Attributes:
      update: updates done.
      interrupted: it was asked to stop before its last update.
      accuracy: of the last evaluation, if the objective has one.
      rate: examples a second over all updates after the first.
      median_step_s: over all updates after the first.
      first_step_s: from the start of the process to the end of the first update.
      compile_s: of these, compiling the step.
      gradient_sum_share: time of the gradient sum, run alone, over the median step.
      data_share: time in which the devices waited for data over the time of all updates.
      outside_share: time of the loop outside the compiled step, over the time of all updates.
      wall_s: from the start of the process to now.
      optimizer_bytes: optimizer state, bytes on the fullest device.
      resume: the command that goes on from here; empty if the run is complete.
      unit: as in `Started`.
      skipped: examples left out since the process began, as far as process 0 read them.
      values: of the last evaluation.
      notes: what the model says of itself in a method `notes`, by name.
    """

    update: int
    interrupted: bool
    accuracy: float | None
    rate: float
    median_step_s: float
    first_step_s: float
    compile_s: float
    gradient_sum_share: float
    data_share: float
    outside_share: float
    wall_s: float
    optimizer_bytes: int
    resume: str = ""
    unit: str = "examples"
    skipped: int = 0
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


Event = Started | Compiled | Updated | Evaluated | Skipped | Saved | Ended

Observer = Callable[[Event], None]
"""Called with each event, by process 0 alone. What it raises ends the run."""
