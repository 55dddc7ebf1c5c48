"""What the loop does about a bad update: once more, elsewhere, then as the recipe says."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from multipod.pytrees import Batch
from multipod.step.guard import Controls
from multipod.step.program import Program
from multipod.step.state import State, Sums
from multipod.train.clock import Clock
from multipod.train.events import Troubled
from multipod.train.loss_spikes import Watch, kind_of
from multipod.train.replay import verdict

NAMES = "loss", "gradient_norm"
PASSING = "good when done again on the same devices: a passing fault, not the batch"

Update = Callable[[State, Batch, Any], tuple[State, Sums]]


class Coped(NamedTuple):
    """An update after all: the state and the sums that count, and what happened, if anything did."""

    state: State
    sums: Sums
    troubled: Troubled | None


@dataclass
class Coping:
    """Looks at each update of a watched program."""

    program: Program
    clock: Clock = time.monotonic
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.program.recipe.trouble)

    def controls(self, stop: int, flip: int = 0) -> Controls:
        """What goes with the next update: the wish to stop, and what is usual."""
        return self.program.controls(stop, self.watch.limits(), flip)

    def __call__(
        self, update: Update, state: State, sums: Sums, batch: Batch, controls: Controls, again: Controls | None = None
    ) -> Coped:
        """Judges an update by its sums.

        Args:
          update: the compiled update; it is given the state up.
          state: what the update returned.
          sums: what it returned.
          batch: what it was given.
          controls: what it was told.
          again: what it is told when it is done once more; `controls` if None.
        """
        numbers = _numbers(sums)
        if not int(sums["bad"]):
            self.watch.saw(*numbers)
            return Coped(state, sums, None)
        start, number, trouble = self.clock(), int(state.update), self.program.recipe.trouble
        action: str = trouble.action
        found = ""
        if trouble.replay:
            state, sums, found = self._once_more(update, state, batch, controls if again is None else again)
            action = action if found else "repeated"
        if action != "repeated" and self.watch.is_too_much():
            action = "stop"
            found += f"; more than {trouble.most} bad updates among {trouble.window}"
        limits = tuple(float(limit) for limit in np.asarray(controls.limits))
        event = Troubled(
            number,
            kind_of(*numbers, (limits[0], limits[1])),
            dict(zip(NAMES, numbers, strict=True)),
            dict(zip(NAMES, limits, strict=True)),
            action,
            found.removeprefix("; ") or (PASSING if action == "repeated" else ""),
            number,
            self.clock() - start,
        )
        return Coped(state, sums, event)

    def _once_more(self, update: Update, state: State, batch: Batch, controls: Controls) -> tuple[State, Sums, str]:
        """The update done again in place; what was found out if it is bad again, else an empty text."""
        state, sums = update(_before(state), batch, controls)
        jax.block_until_ready((state, sums))
        if int(sums["bad"]):
            return state, sums, verdict(self.program, _before(state), batch, controls)
        self.watch.saw(*_numbers(sums))
        return state, sums, ""


def _before(state: State) -> State:
    """The state before a bad update: it kept all but its two numbers."""
    return state._replace(update=state.update - 1, position=state.position - 1)


def _numbers(sums: Sums) -> tuple[float, float]:
    """Loss and gradient norm of an update."""
    count = float(sums["count"])
    return float(sums["loss"]) / count, float(sums["gradient_norm"]) / count
