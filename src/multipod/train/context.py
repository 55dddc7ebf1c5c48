"""What a run is handed: all that it needs and that does not change what it learns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from multipod.data.reading import InputOptions
from multipod.step.state import State
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.clock import Clock, StartTimes, UpdateTimes
from multipod.train.events import Event, EventSink, Updated
from multipod.train.hooks import Faults, PhaseHook, ignore_phase, no_faults
from multipod.train.stop import StopRequest


@dataclass(frozen=True)
class LoopHooks:
    """What the loop calls on its way; by default nothing happens there.

    Attributes:
      on_phase: told every phase.
      barrier: waits until all processes are at the point of this name.
      on_update: given the state after each update, and its event, before anything else is done with it; and whether
        all processes leave after this update. Returns the seconds that it copied for. Where updates run ahead, the
        state is that of the newest of them.
      wants_restart: whether this process wants all to leave after the update that is to be done, and come together
        anew.
      faults: what is to go wrong; nothing, but for `multipod chaos`.
    """

    on_phase: PhaseHook = ignore_phase
    barrier: Callable[[str], None] = lambda name: None
    on_update: Callable[[State, Updated, bool], float] = lambda state, event, leaving: 0.0
    wants_restart: Callable[[], bool] = lambda: False
    faults: Faults = no_faults


@dataclass(frozen=True)
class Resumption:
    """What a run brings along that goes on where other processes ended.

    Attributes:
      past: seconds of the run before this process, by what they went into.
      repeated: updates that are done again from here on (`Started`).
      due_first: begin with the evaluation and the save that are due at the update the run goes on from: they may not
        have been done.
    """

    past: dict[str, float] = field(default_factory=dict)
    repeated: int = 0
    due_first: bool = False


@dataclass(frozen=True)
class RunInfo:
    """What observers are told of a run.

    Attributes:
      folder: the run's folder.
      facts: what `run.json` holds.
      resume_command: the command that goes on with the run, for the summary.
    """

    folder: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    resume_command: str = ""


@dataclass(frozen=True)
class RunContext:
    """All that a run needs and that does not change what it learns.

    Attributes:
      checkpoints: where the state is saved; None saves nothing.
      observers: told every event; pass none on processes other than 0.
      hooks: called on the way.
      resumption: what the processes before left to this one.
      info: what observers are told of the run.
      stop: set by Ctrl-C.
      stop_after: stop, as if asked, after this many updates; 0 never does.
      run_ahead: how many calls are given to the devices ahead of the one that is waited for; the same in all
        processes. It changes no result.
      steps_per_call: how many updates are given to the devices in one call (`Program.compile_several`), where nothing
        is due between them; the same in all processes.
      reading: how this host makes batches.
      evaluate_beside: evaluate while training goes on, one batch behind each update, on a copy of the weights. An
        evaluation is told when it is done; before a checkpoint and at the end it is waited for.
      times: where the times of updates are collected.
      start: where the time went until here, and goes until the first update is done.
      clock: a monotonic clock in seconds.
      began_s: what the clock said when the process started.
    """

    checkpoints: Checkpoints | None = None
    observers: Sequence[EventSink] = ()
    hooks: LoopHooks = field(default_factory=LoopHooks)
    resumption: Resumption = field(default_factory=Resumption)
    info: RunInfo = field(default_factory=RunInfo)
    stop: StopRequest = field(default_factory=StopRequest)
    stop_after: int = 0
    run_ahead: int = 0
    steps_per_call: int = 1
    reading: InputOptions = field(default_factory=InputOptions)
    evaluate_beside: bool = False
    times: UpdateTimes = field(default_factory=UpdateTimes)
    start: StartTimes = field(default_factory=StartTimes)
    clock: Clock = time.monotonic
    began_s: float = field(default_factory=time.monotonic)

    def notify(self, event: Event) -> None:
        """Passes the event to every observer."""
        for observer in self.observers:
            observer(event)
