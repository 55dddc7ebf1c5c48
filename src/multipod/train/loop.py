"""The training loop: compile, update, evaluate, save, tell the observers. Read this file from the top."""

import contextlib

import jax

from multipod import runtime
from multipod.data.batches import Prefetcher
from multipod.nn.model import WritesNotes
from multipod.pytrees import Batch
from multipod.step.fits import refuse_too_large
from multipod.step.memory_layout import input_formats
from multipod.step.program import Program
from multipod.step.several import SeveralUpdates
from multipod.step.state import State, device_bytes
from multipod.train.bad_numbers.acting import BadUpdateActions
from multipod.train.bad_numbers.bad_updates import CompiledUpdate, JudgedUpdate
from multipod.train.bad_numbers.told import told_values
from multipod.train.checkpoints.fitness import FiniteCheck
from multipod.train.checkpoints.saving import RetryingSaver
from multipod.train.context import RunContext
from multipod.train.due import DueDates
from multipod.train.evaluation import check_not_empty
from multipod.train.events import BadUpdate, Compiled, Ended, Updated
from multipod.train.hooks import WorldLeft
from multipod.train.input import TrainInput, WaitingBatches
from multipod.train.reporter import RunReporter, measure_sum_s
from multipod.train.scheduled_evaluation import ScheduledEvaluation
from multipod.train.stop import ExitWish
from multipod.train.updating import SettledUpdate, UpdateRunner


def train(program: Program, context: RunContext, state: State | None = None) -> tuple[State, Ended]:
    """Runs the program's recipe from `state` (from the start if None) to its end, or until asked to stop.

    Returns the last state, which is also the last checkpoint, and the summary.

    Raises:
      WorldLeft: all processes agreed to leave, after an update, evaluated and saved if that was due.
    """
    run = _Run(program, context, state)
    run.reporter.report_start(run.update)
    runner = UpdateRunner(program, *run.compile(), context.clock, run.input.batches.numbers)
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
        self.mark("state")
        self.update, self.position = int(self.state.update), int(self.state.position)
        self.stopped = self.leaving = False
        self.unreported: Updated | None = None
        self.ended_s = 0.0
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
        self.act_on = BadUpdateActions(program, context, self.saving, self.reporter.notify)
        self.evaluation = ScheduledEvaluation(program, context, test, self.reporter)
        self.due = DueDates(self.recipe, self.saving, context.stop_after)
        self.mark("data")

    def mark(self, part: str) -> None:
        """Counts the time until here to a part of the start."""
        self.context.start.mark(part, self.context.clock)

    def compile(self) -> tuple[CompiledUpdate, SeveralUpdates | None]:
        """Compiles the update, and several as one program if a call has several; waits until all processes have."""
        self.context.hooks.on_phase("compiling", self.update)
        start_s = self.context.clock()
        order = self.context.reading.image_order
        compiled, count = self.program.compile_update(order), self.context.steps_per_call
        together = self.program.compile_several(count) if count > 1 else None
        if self.context.checkpoints is not None:
            self.fitness.compile()
        self.input.formats = input_formats(compiled) if order else None
        self.reporter.compile_s = self.context.clock() - start_s
        runtime.release_memory()
        refuse_too_large(self.program, compiled)
        self.context.hooks.barrier("compiled")
        self.reporter.notify(Compiled(self.reporter.compile_s))
        self.mark("compile")
        return compiled, together

    def do_updates(self, runner: UpdateRunner, incoming: Prefetcher) -> None:
        """Does all updates. While the devices work on some, the host reports those before and feeds the next."""
        waiting, bad = WaitingBatches(self.input, incoming), None
        self.reporter.account.lose("input", waiting.fill(self.next_call(runner)))
        self.mark("data")
        if self.context.resumption.due_first:
            self.evaluate_and_save()
        self.ended_s = self.context.clock()
        while not self.is_over():
            self.dispatch(runner, waiting.take(self.next_call(runner)))
            self.report()
            self.evaluation.advance(self.update)
            waited_s = waiting.fill(self.next_call(runner))
            if runner.is_busy:
                waited_s = 0.0  # the devices were busy meanwhile
            while runner.calls > self.most_ahead(len(runner)):
                settled = self.settle(runner, incoming, waited_s)
                bad, waited_s = settled.judged.bad, 0.0
                waiting.give_back(settled.undone)
            if not len(runner):
                self.pause(bad)
        self.report()
        self.conclude()

    def is_over(self) -> bool:
        """Whether no update follows."""
        return self.update >= self.recipe.updates or self.stopped or self.evaluation.reached

    def next_call(self, runner: UpdateRunner) -> int:
        """How many updates are given to the devices next, at once: as many as a call has, or else one."""
        return self.due.call(self.update + len(runner), self.context.steps_per_call)

    def most_ahead(self, under_way: int) -> int:
        """How many calls may stay under way: none if the state is wanted as it is after the last of them."""
        wanted = self.is_over() or self.leaving or self.due.is_owed(self.update)
        return 0 if wanted or self.due.is_pause(self.update + under_way) else self.context.run_ahead

    def dispatch(self, runner: UpdateRunner, batches: list[Batch]) -> None:
        """Gives the devices the next update, or the next few at once."""
        hooks, update = self.context.hooks, self.update + len(runner)
        for k in range(len(batches)):
            hooks.on_phase("updating", update + k)
        flip = hooks.faults.before(update, lambda: self.input.example_numbers(self.position))
        wish = ExitWish(self.context.stop.asked or self.due.stops(update + len(batches)), hooks.wants_restart())
        self.state = runner.dispatch(self.state, batches, wish, flip)
        self.position += len(batches)

    def settle(self, runner: UpdateRunner, incoming: Prefetcher, waited_s: float) -> SettledUpdate:
        """Waits for the oldest update and counts it. Updates of one call have equal shares of its time."""
        reporter = self.reporter
        settled = runner.settle(self.state, self.context.hooks.faults.sticky)
        now_s = self.context.clock()
        step_s = (now_s - self.ended_s) / settled.together
        waited_s = min(waited_s, step_s)
        inside_s = (now_s - max(settled.since_s, self.ended_s)) / settled.together
        reporter.times.add(step_s, inside_s - waited_s, waited_s)
        incoming.adapt(waited_s, step_s)
        self.position -= len(settled.undone)
        self.report()
        self.unreported = self.count(settled.judged, step_s, waited_s, last=not len(runner))
        reporter.report_skipped(self.input.statistics, self.update)
        self.ended_s += step_s
        return settled

    def pause(self, bad: BadUpdate | None) -> None:
        """Nothing is under way: does what is due after this update, and leaves if all processes do."""
        if bad or self.due.evaluates(self.update) or self.due.saves(self.update):
            event = self.unreported
            self.report()
            if bad is not None and event is not None:
                self.state = self.act_on(bad, self.state, self.update)
                self.update = int(self.state.update)
                self.context.hooks.on_update(self.state, event, self.leaving)
            self.evaluate_and_save()
            self.ended_s, self.reporter.copied_s = self.context.clock(), 0.0
        if self.leaving:
            self.leave()

    def count(self, judged: JudgedUpdate, step_s: float, waited_s: float, last: bool) -> Updated:
        """Counts the update that is done and returns its event; `last` of those under way."""
        self.state = judged.state
        self.update += 1
        self.reporter.note_first_step()
        agreed = ExitWish.decode(int(judged.sums["stop"]))
        # A process alone need not wait for an update that carries its wish.
        self.stopped |= agreed.stop or (jax.process_count() == 1 and self.context.stop.asked)
        self.leaving |= agreed.leave
        self.leaving &= not self.is_over()
        hooks, reporter = self.context.hooks, self.reporter
        hooks.faults.after(self.update)
        rate, values = self.recipe.batch / step_s, told_values(self.context, self.recipe, judged, self.update)
        event = Updated(self.update, values, step_s, waited_s, rate, reporter.copied_s)
        reporter.copied_s = 0.0 if judged.bad else hooks.on_update(self.state, event, last and self.leaving)
        return event

    def report(self) -> None:
        """Tells the observers of the last update, if it was not told before."""
        if self.unreported is not None:
            self.reporter.notify(self.unreported)
            self.unreported = None

    def evaluate_and_save(self) -> None:
        """Does what is due after this update. A checkpoint has all evaluations before it told."""
        evaluates, saves = self.due.evaluates(self.update), self.due.saves(self.update)
        if self.stopped:
            return
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

    def leave(self) -> None:
        """Ends what is under way, for all processes to come together anew.

        Raises:
          WorldLeft: always.
        """
        self.report()
        self.evaluation.conclude(self.update)
        self.saving.settle(self.update)
        raise WorldLeft(f"after update {self.update}")

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
