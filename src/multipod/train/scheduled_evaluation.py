"""The evaluations of a run: at once, or beside the updates that follow."""

from multipod.data.reading import statistics_of
from multipod.data.source import Source
from multipod.recipe.target import is_reached
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.bad_numbers.poisoned import means_of_update
from multipod.train.context import RunContext
from multipod.train.evaluation import BackgroundEvaluation, evaluate
from multipod.train.events import Evaluated
from multipod.train.reporter import RunReporter


class ScheduledEvaluation:
    """Evaluates the state of a run and reports it.

    Attributes:
      last: the newest evaluation that is done.
      reached: it reached what the recipe's target asks for, and the run ends.
    """

    def __init__(self, program: Program, context: RunContext, test: Source, reporter: RunReporter) -> None:
        self.program, self.context, self.test, self.reporter = program, context, test, reporter
        self.last: Evaluated | None = None
        self.reached = False
        self._background: BackgroundEvaluation | None = None

    def evaluate(self, state: State, update: int) -> None:
        """Evaluates now."""
        self.context.hooks.on_phase("evaluating", update)
        start_s = self.context.clock()
        sums = evaluate(self.program, state, self.test, self.context.reading)
        values = means_of_update(self.context, self.program.recipe.objective, sums, update)
        count = int(sums.pop("count"))
        self._report(Evaluated(update, values, sums, count, self.context.clock() - start_s), update)

    def begin_beside(self, state: State) -> None:
        """Begins an evaluation that goes on beside the updates."""
        context = self.context
        self._background = BackgroundEvaluation(self.program, state, self.test, context.reading, context.clock)

    def advance(self, update: int) -> None:
        """Goes one batch further with an evaluation that goes on beside the updates."""
        event = self._background.advance() if self._background is not None else None
        if event is not None:
            self._background = None
            self._report(event, update)

    def conclude(self, update: int) -> None:
        """Ends an evaluation that goes on beside the updates."""
        if self._background is not None:
            self.context.hooks.on_phase("evaluating", update)
            event, self._background = self._background.conclude(), None
            self._report(event, update)

    def _report(self, event: Evaluated, update: int) -> None:
        self.reporter.report_skipped(statistics_of(self.test), update)
        self.reporter.notify(event)
        self.last = event
        self.reached = is_reached(self.program.recipe.target, event.values)
