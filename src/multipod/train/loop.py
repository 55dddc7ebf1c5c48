"""The training loop: compile, update, evaluate, save, tell the observers. Read this file from the top."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from multipod import runtime
from multipod.data.batches import Feed, TrainBatches
from multipod.data.feed import owned_rows
from multipod.data.reading import Reading, ledger_of
from multipod.data.source import HostBatch, Source, with_cache
from multipod.errors import PoisonedError
from multipod.layout.mesh import batch_sharding
from multipod.metrics.objective import finished
from multipod.pytrees import Batch
from multipod.step.fits import refuse_too_large
from multipod.step.guard import Controls
from multipod.step.memory_layout import InputFormats, input_formats
from multipod.step.program import Program
from multipod.step.state import State, Sums, device_bytes
from multipod.train.bad_updates import Coping
from multipod.train.checkpoint import Checkpoints
from multipod.train.clock import Clock, Times
from multipod.train.evaluation import Beside, check_examples, check_not_empty, evaluate
from multipod.train.events import Compiled, Ended, Evaluated, Event, Observer, Skipped, Started, Troubled, Updated
from multipod.train.goodput import Account
from multipod.train.hooks import Faults, Left, Pulse, no_faults, silent
from multipod.train.saving import Saving
from multipod.train.stop import StopRequest

REGROUP = 1 << 14
"""The wish to leave, among flags that are added over the devices: more than all wishes to stop (of 16,383 devices)."""


@dataclass(frozen=True)
class RunContext:
    """All that a run needs and that does not change what it learns.

    Attributes:
      checkpoints: where the state is saved; None saves nothing.
      observers: told every event; pass none on processes other than 0.
      on_phase: told every phase.
      stop: set by Ctrl-C.
      stop_after: stop, as if asked, after this many updates; 0 never does.
      reading: how this host makes batches.
      evaluate_beside: evaluate while training goes on, one batch behind each update, on a copy of the weights. An
        evaluation is told when it is done; before a checkpoint and at the end it is waited for.
      resume: the command that goes on with the run, for the summary.
      folder: the run's folder, for the observers.
      facts: what `run.json` holds, for the observers.
      barrier: waits until all processes are at the point of this name.
      past: seconds of the run before this process, by what they went into.
      repeated: updates that are done again from here on (`Started`).
      faults: what is to go wrong; nothing, but for `multipod chaos`.
      on_update: given the state after each update, and its event, before anything else is done with it; and whether
        all processes leave after this update. Returns the seconds that it copied for.
      wants_restart: whether this process wants all to leave after the update that is to be done, and come together
        anew.
      resume_with_due: begin with the evaluation and the save that are due at the update the run goes on from: they
        may not have been done.
      times: where the times of updates are collected.
      clock: a monotonic clock in seconds.
      began: what the clock said when the process started.
    """

    checkpoints: Checkpoints | None = None
    observers: Sequence[Observer] = ()
    on_phase: Pulse = silent
    barrier: Callable[[str], None] = lambda name: None
    on_update: Callable[[State, Updated, bool], float] = lambda state, event, regrouping: 0.0
    wants_restart: Callable[[], bool] = lambda: False
    resume_with_due: bool = False
    times: Times = field(default_factory=Times)
    stop: StopRequest = field(default_factory=StopRequest)
    stop_after: int = 0
    reading: Reading = field(default_factory=Reading)
    evaluate_beside: bool = False
    resume: str = ""
    folder: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    clock: Clock = time.monotonic
    began: float = field(default_factory=time.monotonic)
    past: dict[str, float] = field(default_factory=dict)
    repeated: int = 0
    faults: Faults = no_faults

    def tell(self, event: Event) -> None:
        """Passes the event to every observer."""
        for observer in self.observers:
            observer(event)


def train(program: Program, context: RunContext, state: State | None = None) -> tuple[State, Ended]:
    """Runs the program's recipe from `state` (from the start if None) to its end, or until asked to stop.

    Returns the last state, which is also the last checkpoint, and the summary.

    Raises:
      Left: all processes agreed to leave, after an update, evaluated and saved if that was due.
    """
    run = _Run(program, context, state)
    run.start()
    compiled = run.compile()
    with contextlib.closing(run.batches.start(int(run.state.position), context.reading)) as incoming:
        evaluated = run.updates_with(compiled, incoming)
    run.save_last()
    return run.state, run.ended(evaluated)


@dataclass(frozen=True)
class _UnderWay:
    """An update that the devices work on: what they were given, what they will say, and since when."""

    batch: Batch
    wish: int
    controls: Controls
    sums: Sums
    since_s: float


class _Run:
    """The moving parts of `train`: the state, and where its time went."""

    def __init__(self, program: Program, context: RunContext, state: State | None) -> None:
        self.program, self.recipe, self.context = program, program.recipe, context
        context.on_phase("starting", 0)
        self.state = program.init() if state is None else state
        self.update = int(self.state.update)
        self.times = context.times
        self.compile_s = 0.0
        self.formats: InputFormats | None = None
        self.stopped = self.reached = False
        self.skipped = 0
        self.copied_s = 0.0  # after the last update
        self.rows = owned_rows(batch_sharding(program.mesh), program.rows)
        self.account = Account()
        self.saving = Saving(context.checkpoints, self.tell, context.clock)
        self.coping = Coping(program, context.clock)
        source = with_cache(self.recipe.data.train(), context.reading.cache_bytes, context.reading.cache_folder)
        self.batches = TrainBatches(source, self.recipe.batch, self.recipe.seed, self.rows, program.padded)
        self.test = self.recipe.data.test()
        check_not_empty(self.test)
        self.evaluated: Evaluated | None = None  # the last
        self.evaluation: Beside | None = None
        self.unit = "images" if "image" in self.test.read(np.arange(1)) else "examples"

    def tell(self, event: Event) -> None:
        """Counts the event's time, and passes it on."""
        self.account(event)
        self.context.tell(event)

    def start(self) -> None:
        """Tells the observers where the run stands."""
        context, recipe = self.context, self.recipe
        began_s = context.clock() - context.began
        self.tell(
            Started(
                context.folder, self.update, recipe.updates, recipe.batch, context.facts, self.unit,
                began_s, context.past, context.repeated,
            )
        )  # fmt: skip

    def compile(self) -> Callable[[State, Batch, Any], tuple[State, Sums]]:
        self.context.on_phase("compiling", self.update)
        start = self.context.clock()
        order = self.context.reading.image_order
        compiled = self.program.compile_update(order)
        self.formats = input_formats(compiled) if order else None
        self.compile_s = self.context.clock() - start
        runtime.release_memory()
        refuse_too_large(self.program, compiled)
        self.context.barrier("compiled")
        self.tell(Compiled(self.compile_s))
        return compiled

    def updates_with(
        self, compiled: Callable[[State, Batch, Any], tuple[State, Sums]], incoming: Feed
    ) -> Evaluated | None:
        """All updates. While the devices work on one, the host reports the one before it and feeds the next."""
        clock = self.context.clock
        batch, waited = self.next_batch(incoming)
        self.account.lose("input", waited)
        news: Updated | None = None
        if self.context.resume_with_due:
            self.evaluate_and_save()
        ended = clock()
        while self.update < self.recipe.updates and not self.stopped and not self.reached:
            under_way = self.dispatch(compiled, batch)
            if news is not None:
                self.tell(news)
            self.evaluate_further()
            batch, waited = self.next_batch(incoming)
            if not under_way.sums["count"].is_ready():  # type: ignore[attr-defined]
                waited = 0.0  # the devices were busy meanwhile
            sums, troubled = self.settle(compiled, under_way)
            now = clock()
            self.times.add(now - ended, now - under_way.since_s - waited, waited)
            incoming.tell(waited, now - ended)
            done = news = self.count(sums, troubled, now - ended, waited)
            leaving = int(sums["stop"]) >= REGROUP and not self.stopped and self.update < self.recipe.updates
            self.copied_s = 0.0 if troubled else self.context.on_update(self.state, done, leaving)
            self.tell_skipped(self.batches.source)
            ended = now
            if troubled or self.is_due(self.recipe.evaluate_every) or self.saves():
                self.tell(done)
                news = None
                if troubled:
                    self.act(troubled)
                    self.context.on_update(self.state, done, leaving)
                self.evaluate_and_save()
                ended, self.copied_s = clock(), 0.0
            if leaving:
                self.leave(news)
        return self.close(news)

    def dispatch(self, compiled: Callable[[State, Batch, Any], tuple[State, Sums]], batch: Batch) -> _UnderWay:
        """Gives the devices an update to do, and does not wait for them."""
        self.context.on_phase("updating", self.update)
        flip = self.context.faults.before(self.update, self.given)
        since_s, wish = self.context.clock(), self.wish()
        controls = self.coping.controls(wish, flip)
        self.state, sums = compiled(self.state, batch, controls)
        return _UnderWay(batch, wish, controls, sums, since_s)

    def given(self) -> list[int]:
        """The numbers of the examples that this process gives to the next update."""
        rows = self.rows[self.rows < self.recipe.batch]  # without padding
        return self.batches.numbers(int(self.state.position))[rows].tolist()

    def settle(
        self, compiled: Callable[[State, Batch, Any], tuple[State, Sums]], given: _UnderWay
    ) -> tuple[Sums, Troubled | None]:
        """Waits for the update, and copes with a bad one."""
        jax.block_until_ready((self.state, given.sums))
        self.program.check(given.sums)
        if not self.program.watched:
            return given.sums, None
        again = None if self.context.faults.sticky else self.coping.controls(given.wish)
        self.state, sums, troubled = self.coping(compiled, self.state, given.sums, given.batch, given.controls, again)
        return sums, troubled

    def count(self, sums: Sums, troubled: Troubled | None, step_s: float, waited_s: float) -> Updated:
        """Counts the update that is done; returns what is told of it."""
        self.update += 1
        self.times.first_step_s = self.times.first_step_s or self.context.clock() - self.context.began
        self.stopped = self.agreed_to_stop(sums)
        self.context.faults.after(self.update)
        return self.updated(sums, bool(troubled), step_s, waited_s)

    def close(self, news: Updated | None) -> Evaluated | None:
        """What is left to tell, save and evaluate behind the last update."""
        if news is not None:
            self.tell(news)
        if self.stopped:
            self.save_last()  # first of all: whoever asked may not wait much longer
        self.conclude()
        if not self.stopped and (self.evaluated is None or self.evaluated.update != self.update):
            self.evaluate()
        return self.evaluated

    def updated(self, sums: Sums, troubled: bool, step_s: float, waited_s: float) -> Updated:
        """What is told of the update that is done."""
        if troubled and int(sums["bad"]):
            values = _bare(sums)
        else:  # a pipe that fills has nothing to tell yet
            values = self.finished(_values(sums)) if int(sums["count"]) else {}
        return Updated(self.update, values, step_s, waited_s, self.recipe.batch / step_s, self.copied_s)

    def leave(self, news: Updated | None) -> None:
        """Ends what is under way, for all processes to come together anew."""
        if news is not None:
            self.tell(news)
        self.conclude()
        self.saving.settle(self.update)
        raise Left(f"after update {self.update}")

    def evaluate_and_save(self) -> None:
        """What is due after this update. A run that goes on from a checkpoint finds all evaluations before it told."""
        saves = self.saves()
        if self.is_due(self.recipe.evaluate_every) or saves:
            self.conclude()
        if self.is_due(self.recipe.evaluate_every):
            if self.context.evaluate_beside and not saves:
                self.evaluation = Beside(self.program, self.state, self.test, self.context.reading, self.context.clock)
            else:
                self.evaluate()
        if saves:
            self.save()

    def next_batch(self, incoming: Iterator[dict[str, np.ndarray]]) -> tuple[Batch, float]:
        """The next batch on the mesh, and the seconds spent waiting for it to arrive from the host pipeline."""
        start = self.context.clock()
        host = next(incoming)
        waited = self.context.clock() - start
        check_examples(self.recipe.model, host)
        return self._placed(host), waited

    def _placed(self, host: HostBatch) -> Batch:
        return self.program.place_batch(host, self.rows, self.program.rows, self.formats)

    def agreed_to_stop(self, sums: Sums) -> bool:
        """Whether all processes stop here; one alone need not wait for an update that carries its wish."""
        return int(sums["stop"]) % REGROUP > 0 or (jax.process_count() == 1 and self.context.stop.asked)

    def wish(self) -> int:
        """What this process tells the others with the next update: 1 to stop, `REGROUP` to leave, or both added."""
        stop = self.context.stop.asked or 0 < self.context.stop_after <= self.update + 1 < self.recipe.updates
        return stop + REGROUP * self.context.wants_restart()

    def is_due(self, every: int) -> bool:
        return every > 0 and self.update % every == 0 and self.update < self.recipe.updates and not self.stopped

    def evaluate(self) -> None:
        self.context.on_phase("evaluating", self.update)
        start = self.context.clock()
        sums = evaluate(self.program, self.state, self.test, self.context.reading)
        values = self.finished(sums)
        count = int(sums.pop("count"))
        self.tell_evaluated(Evaluated(self.update, values, sums, count, self.context.clock() - start))

    def evaluate_further(self) -> None:
        """One batch more of an evaluation that goes on beside the updates."""
        event = self.evaluation.advance() if self.evaluation is not None else None
        if event is not None:
            self.evaluation = None
            self.tell_evaluated(event)

    def conclude(self) -> None:
        """Ends an evaluation that goes on beside the updates."""
        if self.evaluation is not None:
            self.context.on_phase("evaluating", self.update)
            event, self.evaluation = self.evaluation.conclude(), None
            self.tell_evaluated(event)

    def tell_evaluated(self, event: Evaluated) -> None:
        self.tell_skipped(self.test)
        self.tell(event)
        self.evaluated = event
        self.reached = getattr(self.recipe.objective, "reached", lambda values: False)(event.values)

    def tell_skipped(self, source: Source) -> None:
        for one in ledger_of(source).news():
            self.tell(Skipped(self.update, one.number, one.name, one.reason))
            self.skipped += 1

    def finished(self, sums: dict[str, Any]) -> dict[str, float]:
        """What the objective makes of the sums of this update, or of an evaluation behind it.

        Raises:
          PoisonedError: the objective found what is not finite; names the update and the last checkpoint before it.
        """
        try:
            return finished(self.recipe.objective, sums)
        except PoisonedError as error:
            if self.context.checkpoints is None:
                raise
            self.context.checkpoints.wait()
            # What this update met may be what the one before it left behind, and a checkpoint may hold that.
            good = [number for number in self.context.checkpoints.updates() if number < self.update - 1]
            way = f"Go on from there with --resume {self.context.folder} --at {good[-1]}" if good else "Start again"
            last = good[-1] if good else "none"
            raise PoisonedError(f"update {self.update}: {error} Last good checkpoint: {last}. {way}.") from error

    def saves(self) -> bool:
        """Whether a checkpoint is due, or one that failed is to be tried again."""
        due = self.is_due(self.recipe.checkpoint_every)
        return due or (self.update < self.recipe.updates and self.saving.is_owed(self.update))

    def save(self) -> None:
        self.context.on_phase("saving", self.update)
        self.saving.save(self.state, self.update)

    def save_last(self) -> None:
        self.context.on_phase("saving", self.update)
        self.saving.save_last(self.state, self.update)

    def act(self, troubled: Troubled) -> None:
        """Does what the recipe says about an update that stayed bad.

        Raises:
          PoisonedError: it says stop, or there were too many. The state before the update is saved.
        """
        start = self.context.clock()
        if troubled.action == "roll-back":
            self.roll_back()
        elif troubled.action == "stop":
            self.save_last()
        seconds = troubled.seconds + self.context.clock() - start
        self.tell(replace(troubled, back_to=self.update, seconds=seconds))
        if troubled.action == "stop":
            said = ", ".join(f"{name} {value:.4g}" for name, value in troubled.values.items())
            raise PoisonedError(
                f"update {troubled.update}: {troubled.kind} ({said}). {troubled.verdict or 'It was not tried again'}. "
                f"The weights before it are saved as update {self.update}. To leave its batch out, go on with --resume "
                f"{self.context.folder} --set trouble.action=skip."
            )

    def roll_back(self) -> None:
        """Goes back to the newest checkpoint, or to the start, and stays where it is in the data."""
        position, store = self.state.position, self.context.checkpoints
        self.saving.settle(self.update)
        known = [] if store is None else [update for update in store.updates() if update < self.update]
        restored = self.program.init() if store is None or not known else store.restore(self.program.shapes, known[-1])
        self.state = restored._replace(position=position)
        self.update = int(restored.update)

    def ended(self, evaluated: Evaluated | None) -> Ended:
        self.context.on_phase("ending", self.update)
        alone_s = sum_alone_s(self.program, self.state, self.context.clock)
        median = self.times.median_step_s
        interrupted = self.update < self.recipe.updates and not self.reached
        wall_s = self.context.clock() - self.context.began
        run_s = wall_s + sum(self.context.past.values())
        self.account.lose("other", run_s - self.account.told_s)
        event = Ended(
            update=self.update,
            interrupted=interrupted,
            accuracy=evaluated.values.get("accuracy") if evaluated else None,
            rate=self.times.rate(self.recipe.batch),
            median_step_s=median,
            first_step_s=self.times.first_step_s,
            compile_s=self.compile_s,
            gradient_sum_share=alone_s / median if median else 0.0,
            data_share=self.times.data_share,
            outside_share=self.times.outside_share,
            wall_s=wall_s,
            optimizer_bytes=device_bytes(self.program.state_parts["optimizer"]),
            resume=self.context.resume if interrupted else "",
            unit=self.unit,
            skipped=self.skipped,
            values=evaluated.values if evaluated else {},
            notes=getattr(self.recipe.model, "notes", lambda _: {})(self.state.statistics),
            goodput=self.account.goodput(run_s),
            lost_s=self.account.lost_s,
            run_s=run_s,
            repeated=self.account.repeated,
            troubled=self.account.troubled,
        )
        self.tell(event)
        return event


def sum_alone_s(program: Program, state: State, clock: Clock = time.monotonic, times: int = 10) -> float:
    """Median seconds of the gradient sum run on its own, with nothing to hide behind."""
    alone = program.sum_alone()
    jax.block_until_ready(alone(state.params))
    taken = []
    for _ in range(times):
        start = clock()
        jax.block_until_ready(alone(state.params))
        taken.append(clock() - start)
    return float(np.median(taken))


def _values(sums: Sums) -> dict[str, Any]:
    return {name: value for name, value in jax.device_get(sums).items() if name not in ("stop", "poisoned", "bad")}


def _bare(sums: Sums) -> dict[str, float]:
    """Means of an update that objectives may refuse to make anything of."""
    count = float(sums["count"])
    return {name: float(sums[name]) / count for name in ("loss", "gradient_norm")}
