"""What a run tells its observers: plain values, in the order in which they happen.

`metrics.jsonl` holds them one a line, with the class's name in `event`. Times are seconds; those of
updates are taken when the result of the update is there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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
      began_s: from the start of the process to here.
      past: seconds of the run before this process, by what they went into (`train.goodput`).
      repeated: updates that were done before and are done again from here on, all such times counted.
    """

    folder: str
    update: int
    updates: int
    batch: int
    facts: dict[str, Any] = field(default_factory=dict)
    unit: str = "examples"
    began_s: float = 0.0
    past: dict[str, float] = field(default_factory=dict)
    repeated: int = 0


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
      copy_s: of `step_s`, copying the state to memory after the update before, in a run that survives.
    """

    update: int
    values: dict[str, float]
    step_s: float
    data_s: float
    rate: float
    copy_s: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """The state after `update` updates was evaluated on all `count` test examples, each counted once.

    `beside` says that updates went on meanwhile.
    """

    update: int
    values: dict[str, float]
    sums: dict[str, float]
    count: int
    seconds: float
    beside: bool = False


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
class SaveFailed:
    """The state after `update` updates could not be saved: training goes on without it.

    Attributes:
      update: updates done.
      reason: one line.
      retry: after how many updates it is tried again; `update` itself if at once.
      seconds: what the run waited.
    """

    update: int
    reason: str
    retry: int
    seconds: float


@dataclass(frozen=True)
class BadUpdate:
    """Update number `update` was bad, and this was done about it (`recipe.bad_updates`).

    Attributes:
      update: number of the update, from 1.
      kind: `not finite`, `loss spike` or `gradient spike`.
      values: loss and gradient norm that it had; NaN where they were not finite.
      limits: the highest that these could have been.
      action: `repeated` (it was good when done again), `skip`, `roll-back` or `stop`.
      verdict: what was found out about the cause, one line; empty if nothing was tried.
      back_to: updates done from which the run goes on; `update` unless it was rolled back.
      seconds: what all this took, the bad update itself left out.
      fault: `chip`, `batch` or `weights`; empty if that was not found out.
      examples: numbers of the examples that are at fault.
      tensors: names of the parameters whose gradient is not finite.
    """

    update: int
    kind: str
    values: dict[str, float]
    limits: dict[str, float]
    action: str
    verdict: str
    back_to: int
    seconds: float
    fault: str = ""
    examples: list[int] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Regrouped:
    """The run goes on with other processes, after `update` updates: some died or were let go, or some came.

    Told with the first update that they made together.

    Attributes:
      update: updates done when they began.
      generation: how often the processes have changed.
      processes: how many there are now, of `seats`.
      seats: how many there are on a whole mesh.
      lost: ranks that are no more, with why.
      came: ranks that are new.
      source: where the state came from: memory (all had it), peers (some had it and gave it to the others), mirror
        (also from copies that were kept for the dead), checkpoint, or start.
      repeated: updates that had been done and were done again.
      seconds: from the end of the last good update before to the end of the first one after.
      planned: nobody died: a process was waited for or let go between two updates.
    """

    update: int
    generation: int
    processes: int
    seats: int
    lost: dict[str, str]
    came: list[int]
    source: str
    repeated: int
    seconds: float
    planned: bool = False


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
      start_s: all of these, by what they went into (`train.clock.StartTimes`); empty where it is not known.
      gradient_sum_share: time of the gradient sum, run alone, over the median step.
      data_share: time in which the devices waited for data over the time of all updates.
      outside_share: time of the loop outside the compiled step, over the time of all updates.
      wall_s: from the start of the process to now.
      optimizer_bytes: optimizer state, bytes on the fullest device.
      unshared: bytes on a device that ZeRO-1 or FSDP cost beyond equal shares, by what they are (`step.unshared`).
      resume: the command that goes on from here; empty if the run is complete.
      unit: as in `Started`.
      skipped: examples left out since the process began, as far as process 0 read them.
      values: of the last evaluation.
      notes: what the model says of itself in a method `notes`, by name.
      goodput: time in good updates over the time of the whole run, its interruptions included.
      lost_s: the rest, by what it went into.
      run_s: time of the whole run; 0 where it is not known.
      repeated: updates done more than once, because a process died or the run was rolled back.
      troubled: updates whose numbers were bad, by what was done about them; of this process.
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
    unshared: dict[str, int] = field(default_factory=dict)
    resume: str = ""
    unit: str = "examples"
    skipped: int = 0
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    goodput: float = 0.0
    lost_s: dict[str, float] = field(default_factory=dict)
    run_s: float = 0.0
    repeated: int = 0
    troubled: dict[str, int] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)


Event = Started | Compiled | Updated | Evaluated | Skipped | Saved | SaveFailed | BadUpdate | Regrouped | Ended

EventSink = Callable[[Event], None]
"""Given each event, by process 0 alone. What it raises ends the run."""


@runtime_checkable
class Observer(Protocol):
    """An `EventSink` that holds something: a file, the terminal. `multipod.train.observers.table` has them."""

    def __call__(self, event: Event) -> None:
        """Takes an event."""
        ...

    def close(self) -> None:
        """Writes what is left, and gives back what it holds. No event follows; later calls do nothing."""
        ...
