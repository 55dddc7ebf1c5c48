"""What the loop does about a bad update: once more, elsewhere, then as the recipe says."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from multipod.step.guard import Asked
from multipod.step.program import Batch, Program, Sums
from multipod.step.programs import AnyProgram
from multipod.step.state import State
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

    program: AnyProgram
    clock: Clock = time.monotonic
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.program.recipe.bad_updates)

    def asked(self, stop: int, flip: int = 0) -> Asked:
        """What goes with the next update: the wish to stop, and what is usual."""
        assert isinstance(self.program, Program)  # those in stages are not watched
        return self.program.asked(stop, self.watch.limits(), flip)

    def __call__(
        self, update: Update, state: State, sums: Sums, batch: Batch, asked: Asked, again: Asked | None = None
    ) -> Coped:
        """Judges an update by its sums.

        Args:
          update: the compiled update; it is given the state up.
          state: what the update returned.
          sums: what it returned.
          batch: what it was given.
          asked: what it was asked.
          again: what is asked when it is done once more; `asked` if None.
        """
        numbers = _numbers(sums)
        if not int(sums["bad"]):
            self.watch.saw(*numbers)
            return Coped(state, sums, None)
        start, number, policy = self.clock(), int(state.update), self.program.recipe.bad_updates
        action: str = policy.action
        found = ""
        if policy.replay:
            state, sums, found = self._once_more(update, state, batch, asked if again is None else again)
            action = action if found else "repeated"
        if action != "repeated" and self.watch.is_too_much():
            action = "stop"
            found += f"; more than {policy.most} bad updates among {policy.window}"
        limits = tuple(float(limit) for limit in np.asarray(asked.limits))
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

    def _once_more(self, update: Update, state: State, batch: Batch, asked: Asked) -> tuple[State, Sums, str]:
        """The update done again in place; what was found out if it is bad again, else an empty text."""
        state, sums = update(_before(state), batch, asked)
        jax.block_until_ready((state, sums))
        if int(sums["bad"]):
            assert isinstance(self.program, Program)
            return state, sums, verdict(self.program, _before(state), batch, asked)
        self.watch.saw(*_numbers(sums))
        return state, sums, ""


def _before(state: State) -> State:
    """The state before a bad update: it kept all but its two numbers."""
    return state._replace(update=state.update - 1, position=state.position - 1)


def _numbers(sums: Sums) -> tuple[float, float]:
    """Loss and gradient norm of an update."""
    count = float(sums["count"])
    return float(sums["loss"]) / count, float(sums["gradient_norm"]) / count
