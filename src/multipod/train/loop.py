"""The training loop: compile, update, evaluate, save, tell the observers. Read this file from the top."""

import contextlib
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from multipod import runtime
from multipod.data.batches import Prefetcher
from multipod.nn.model import WritesNotes
from multipod.step.fits import refuse_too_large
from multipod.step.memory_layout import input_formats
from multipod.step.program import Program
from multipod.step.state import State, Sums, device_bytes
from multipod.train.bad_numbers.bad_updates import (
    CompiledUpdate,
    JudgedUpdate,
    keeps_weights,
    refuse_bad_update,
    roll_back,
)
from multipod.train.bad_numbers.poisoned import means_of_training
from multipod.train.checkpoints.fitness import FiniteCheck
from multipod.train.checkpoints.saving import RetryingSaver
from multipod.train.clock import Clock
from multipod.train.context import RunContext
from multipod.train.evaluation import check_not_empty
from multipod.train.events import BadUpdate, Compiled, Ended, Updated
from multipod.train.hooks import WorldLeft
from multipod.train.input import TrainInput
from multipod.train.reporter import RunReporter
from multipod.train.scheduled_evaluation import ScheduledEvaluation
from multipod.train.stop import ExitWish
from multipod.train.updating import InFlightUpdate, UpdateRunner


def train(program: Program, context: RunContext, state: State | None = None) -> tuple[State, Ended]:
    """Runs the program's recipe from `state` (from the start if None) to its end, or until asked to stop.

    Returns the last state, which is also the last checkpoint, and the summary.

    Raises:
      WorldLeft: all processes agreed to leave, after an update, evaluated and saved if that was due.
    """
    run = _Run(program, context, state)
    run.reporter.report_start(run.update)
    runner = UpdateRunner(program, run.compile(), context.clock, run.input.batches.numbers)
    with contextlib.closing(run.input.start(int(run.state.position))) as incoming:
        run.do_updates(runner, incoming)
    run.save_last()
    return run.state, run.sum_up()


class _Run:
    """The state of a run, and the parts that `train` moves: input, evaluation, saving, reports."""

    def __init__(self, program: Program, context: RunContext, state: State | None) -> None:
        self.program, self.recipe, self.context = program, program.recipe, context
        context.hooks.on_phase("starting", 0)
        self.state = program.init() if state is None else state
        self.update = int(self.state.update)
        self.stopped = False
        self.input = TrainInput(program, context.reading, context.clock)
        test = self.recipe.data.test()
        check_not_empty(test)
        self.reporter = RunReporter(context, self.recipe, test)
        self.fitness = FiniteCheck(program)
        self.saving = RetryingSaver(
            context.checkpoints,
            self.reporter.notify,
            context.clock,
            unfit=self.fitness,
            strict=self.recipe.bad_updates.watches,
        )
        self.evaluation = ScheduledEvaluation(program, context, test, self.reporter)

    def compile(self) -> CompiledUpdate:
        """Compiles the update, and waits until all processes have."""
        self.context.hooks.on_phase("compiling", self.update)
        start_s = self.context.clock()
        order = self.context.reading.image_order
        compiled = self.program.compile_update(order)
        if self.context.checkpoints is not None:
            self.fitness.compile()
        self.input.formats = input_formats(compiled) if order else None
        self.reporter.compile_s = self.context.clock() - start_s
        runtime.release_memory()
        refuse_too_large(self.program, compiled)
        self.context.hooks.barrier("compiled")
        self.reporter.notify(Compiled(self.reporter.compile_s))
        return compiled

    def do_updates(self, runner: UpdateRunner, incoming: Prefetcher) -> None:
        """Does all updates. While the devices work on one, the host reports the one before it and feeds the next."""
        clock, reporter = self.context.clock, self.reporter
        batch, waited_s = self.input.next_batch(incoming)
        reporter.account.lose("input", waited_s)
        unreported: Updated | None = None
        if self.context.resumption.due_first:
            self.evaluate_and_save()
        ended_s = clock()
        while self.update < self.recipe.updates and not self.stopped and not self.evaluation.reached:
            in_flight = self.dispatch(runner, batch)
            self.report(unreported)
            self.evaluation.advance(self.update)
            batch, waited_s = self.input.next_batch(incoming)
            if not in_flight.is_ready:
                waited_s = 0.0  # the devices were busy meanwhile
            judged = runner.settle(in_flight, self.context.hooks.faults.sticky)
            now_s = clock()
            reporter.times.add(now_s - ended_s, now_s - in_flight.since_s - waited_s, waited_s)
            incoming.adapt(waited_s, now_s - ended_s)
            event, leaving = self.count(judged, now_s - ended_s, waited_s)
            reporter.report_skipped(self.input.source, self.update)
            unreported, ended_s = event, now_s
            if judged.bad or self.is_due(self.recipe.evaluate_every) or self.saves():
                self.report(event)
                self.act_on(judged.bad, event, leaving)
                self.evaluate_and_save()
                unreported, ended_s, reporter.copied_s = None, clock(), 0.0
            if leaving:
                self.leave(unreported)
        self.report(unreported)
        self.conclude()

    def dispatch(self, runner: UpdateRunner, batch: Any) -> InFlightUpdate:
        """Gives the devices the next update, and holds what they will return."""
        hooks = self.context.hooks
        hooks.on_phase("updating", self.update)
        flip = hooks.faults.before(self.update, lambda: self.input.example_numbers(int(self.state.position)))
        in_flight = runner.dispatch(self.state, batch, self.wish(), flip)
        self.state = in_flight.state
        return in_flight

    def wish(self) -> ExitWish:
        """What this process tells the others with the next update."""
        context = self.context
        stop = context.stop.asked or 0 < context.stop_after <= self.update + 1 < self.recipe.updates
        return ExitWish(stop, context.hooks.wants_restart())

    def count(self, judged: JudgedUpdate, step_s: float, waited_s: float) -> tuple[Updated, bool]:
        """Counts the update that is done; returns its event, and whether all processes leave after it."""
        self.state = judged.state
        self.update += 1
        self.reporter.note_first_step()
        agreed = ExitWish.decode(int(judged.sums["stop"]))
        # A process alone need not wait for an update that carries its wish.
        self.stopped = agreed.stop or (jax.process_count() == 1 and self.context.stop.asked)
        hooks, reporter = self.context.hooks, self.reporter
        hooks.faults.after(self.update)
        rate, values = self.recipe.batch / step_s, self.values_of(judged)
        event = Updated(self.update, values, step_s, waited_s, rate, reporter.copied_s)
        leaving = agreed.leave and not self.stopped and self.update < self.recipe.updates
        reporter.copied_s = 0.0 if judged.bad else hooks.on_update(self.state, event, leaving)
        return event, leaving

    def values_of(self, judged: JudgedUpdate) -> dict[str, float]:
        """What is told of an update; a pipe that fills has nothing to tell yet."""
        sums = judged.sums
        if judged.bad and int(sums["bad"]):
            return _bare_means(sums)
        if not int(sums["count"]):
            return {}
        return means_of_training(self.context, self.recipe, _values(sums), self.update)

    def report(self, event: Updated | None) -> None:
        """Tells the observers of an update, if it was not told before."""
        if event is not None:
            self.reporter.notify(event)

    def is_due(self, every: int) -> bool:
        """Whether what is done each so many updates is done after this one."""
        return every > 0 and self.update % every == 0 and self.update < self.recipe.updates and not self.stopped

    def saves(self) -> bool:
        """Whether a checkpoint is due, or one that failed is to be tried again."""
        due = self.is_due(self.recipe.checkpoint_every)
        return due or (self.update < self.recipe.updates and self.saving.is_owed(self.update))

    def evaluate_and_save(self) -> None:
        """Does what is due after this update. A checkpoint has all evaluations before it told."""
        evaluates, saves = self.is_due(self.recipe.evaluate_every), self.saves()
        if evaluates or saves:
            self.evaluation.conclude(self.update)
        if evaluates and self.context.evaluate_beside and not saves:
            self.evaluation.begin_beside(self.state)
        elif evaluates:
            self.evaluation.evaluate(self.state, self.update)
        if saves:
            self.context.hooks.on_phase("saving", self.update)
            self.saving.save(self.state, self.update)

    def save_last(self) -> None:
        """Saves, and waits until it is on disk."""
        self.context.hooks.on_phase("saving", self.update)
        self.saving.save_last(self.state, self.update)

    def conclude(self) -> None:
        """Saves and evaluates after the last update what is left to be."""
        if self.stopped:
            self.save_last()  # first of all: whoever asked may not wait much longer
        self.evaluation.conclude(self.update)
        last = self.evaluation.last
        if not self.stopped and (last is None or last.update != self.update):
            self.evaluation.evaluate(self.state, self.update)

    def leave(self, unreported: Updated | None) -> None:
        """Ends what is under way, for all processes to come together anew.

        Raises:
          WorldLeft: always.
        """
        self.report(unreported)
        self.evaluation.conclude(self.update)
        self.saving.settle(self.update)
        raise WorldLeft(f"after update {self.update}")

    def act_on(self, bad: BadUpdate | None, event: Updated, leaving: bool) -> None:
        """Does what the recipe says about an update that stayed bad, if it did.

        Raises:
          PoisonedError: it says stop, or there were too many. The state before the update is saved.
        """
        if bad is None:
            return
        start_s = self.context.clock()
        if bad.action == "roll-back":
            self.saving.settle(self.update)
            self.state = roll_back(self.program, self.context.checkpoints, self.state, self.update)
            self.update = int(self.state.update)
        elif bad.action == "stop" and keeps_weights(bad):
            self.save_last()
        seconds = bad.seconds + self.context.clock() - start_s
        self.reporter.notify(replace(bad, back_to=self.update, seconds=seconds))
        if bad.action == "stop":
            refuse_bad_update(bad, self.update, self.context.info.folder, self.context.checkpoints)
        self.context.hooks.on_update(self.state, event, leaving)

    def sum_up(self) -> Ended:
        """Times the gradient sum on its own, and reports the end."""
        self.context.hooks.on_phase("ending", self.update)
        model = self.recipe.model
        return self.reporter.report_end(
            self.update,
            interrupted=self.update < self.recipe.updates and not self.evaluation.reached,
            evaluated=self.evaluation.last,
            sum_alone_s=measure_sum_s(self.program, self.state, self.context.clock),
            optimizer_bytes=device_bytes(self.program.state_parts["optimizer"]),
            unshared=self.program.unshared,
            notes=model.notes(self.state.statistics) if isinstance(model, WritesNotes) else {},
        )


def measure_sum_s(program: Program, state: State, clock: Clock = time.monotonic, times: int = 10) -> float:
    """Median seconds of the gradient sum run on its own, with nothing to hide behind."""
    alone = program.sum_alone()
    jax.block_until_ready(alone(state.params))
    seconds = []
    for _ in range(times):
        start_s = clock()
        jax.block_until_ready(alone(state.params))
        seconds.append(clock() - start_s)
    return float(np.median(seconds))


def _values(sums: Sums) -> dict[str, Any]:
    return {name: value for name, value in jax.device_get(sums).items() if name not in ("stop", "poisoned", "bad")}


def _bare_means(sums: Sums) -> dict[str, float]:
    """Means of an update that objectives may refuse to make anything of."""
    count = float(sums["count"])
    return {name: float(sums[name]) / count for name in ("loss", "gradient_norm")}
