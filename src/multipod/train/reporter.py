"""What a run tells its observers, and what it counts for its summary."""

import time
from typing import Any

import jax
import numpy as np

from multipod.data.reading import ReadStatistics
from multipod.data.source import Source
from multipod.recipe.recipe import Recipe
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.clock import Clock
from multipod.train.context import RunContext
from multipod.train.events import Ended, Evaluated, Event, Skipped, Started
from multipod.train.goodput import GoodputAccount


class RunReporter:
    """Passes the events of a run on, counts their time, and sums the run up.

    Attributes:
      unit: what an example is called.
      skipped: examples left out so far.
      copied_s: seconds that the state was copied to memory for, after the last update.
    """

    def __init__(self, context: RunContext, recipe: Recipe, test: Source) -> None:
        self.context, self.recipe = context, recipe
        self.unit = "images" if "image" in test.read(np.arange(1)) else "examples"
        self.account, self.times = GoodputAccount(), context.times
        self.compile_s = self.copied_s = 0.0
        self.skipped = 0

    def notify(self, event: Event) -> None:
        """Counts the event's time, and passes it on."""
        self.account(event)
        self.context.notify(event)

    def report_start(self, update: int) -> None:
        """Tells the observers where the run stands."""
        context, recipe, resumption = self.context, self.recipe, self.context.resumption
        began_s = context.clock() - context.began_s
        self.notify(
            Started(
                context.info.folder, update, recipe.updates, recipe.batch, context.info.facts, self.unit,
                began_s, resumption.past, resumption.repeated,
            )
        )  # fmt: skip

    def report_skipped(self, reading: ReadStatistics, update: int) -> None:
        """Tells of the examples that were left out since the last time."""
        for example in reading.news():
            self.notify(Skipped(update, example.number, example.name, example.reason))
            self.skipped += 1

    def note_first_step(self) -> None:
        """Notes the time to the first update, after it."""
        self.context.start.mark("update", self.context.clock)
        self.times.first_step_s = self.times.first_step_s or self.context.clock() - self.context.began_s

    def report_end(
        self,
        update: int,
        interrupted: bool,
        evaluated: Evaluated | None,
        sum_alone_s: float,
        optimizer_bytes: int,
        unshared: dict[str, int],
        notes: dict[str, str],
    ) -> Ended:
        """Tells the observers the summary of the run, and returns it."""
        median_s = self.times.median_step_s
        wall_s = self.context.clock() - self.context.began_s
        run_s = wall_s + sum(self.context.resumption.past.values())
        self.account.lose("other", run_s - self.account.told_s)
        values: dict[str, Any] = evaluated.values if evaluated else {}
        event = Ended(
            update=update,
            interrupted=interrupted,
            accuracy=values.get("accuracy"),
            rate=self.times.rate(self.recipe.batch),
            median_step_s=median_s,
            first_step_s=self.times.first_step_s,
            compile_s=self.compile_s,
            gradient_sum_share=sum_alone_s / median_s if median_s else 0.0,
            data_share=self.times.data_share,
            outside_share=self.times.outside_share,
            wall_s=wall_s,
            optimizer_bytes=optimizer_bytes,
            unshared=unshared,
            resume=self.context.info.resume_command if interrupted else "",
            unit=self.unit,
            skipped=self.skipped,
            values=values,
            notes=notes,
            goodput=self.account.goodput(run_s),
            lost_s=self.account.lost_s,
            run_s=run_s,
            repeated=self.account.repeated,
            troubled=self.account.troubled,
            start_s=self.context.start.parts_s,
        )
        self.notify(event)
        return event


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
