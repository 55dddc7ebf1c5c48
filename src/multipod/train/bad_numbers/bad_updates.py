"""What the loop does about a bad update: it repeats it, looks for the cause, then does as the recipe says."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from multipod.errors import PoisonedError
from multipod.pytrees import Batch
from multipod.step.guard import Controls
from multipod.step.program import Program
from multipod.step.state import State, Sums
from multipod.train.bad_numbers.loss_spikes import SpikeDetector, kind_of
from multipod.train.bad_numbers.replay import find_cause
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.clock import Clock
from multipod.train.events import BadUpdate

NAMES = "loss", "gradient_norm"
PASSING = "good when done again on the same devices: a passing fault, not the batch"

CompiledUpdate = Callable[[State, Batch, Any], tuple[State, Sums]]


class JudgedUpdate(NamedTuple):
    """An update that is done: the state and the sums that count, and what was bad about it, if anything was."""

    state: State
    sums: Sums
    bad: BadUpdate | None


@dataclass
class BadUpdatePolicy:
    """Judges each update of a watched program, and repeats a bad one."""

    program: Program
    clock: Clock = time.monotonic
    spikes: SpikeDetector = field(init=False)

    def __post_init__(self) -> None:
        self.spikes = SpikeDetector(self.program.recipe.bad_updates)

    def controls(self, stop: int, flip: int = 0) -> Controls:
        """What goes with the next update: the wish to stop, and what is usual."""
        return self.program.controls(stop, self.spikes.limits(), flip)

    def __call__(
        self,
        update: CompiledUpdate,
        state: State,
        sums: Sums,
        batch: Batch,
        controls: Controls,
        again: Controls | None = None,
    ) -> JudgedUpdate:
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
            self.spikes.add(*numbers)
            return JudgedUpdate(state, sums, None)
        start, number, rules = self.clock(), int(state.update), self.program.recipe.bad_updates
        action: str = rules.action
        cause = ""
        if rules.replay:
            state, sums, cause = self._repeat(update, state, batch, controls if again is None else again)
            action = action if cause else "repeated"
        if action != "repeated" and self.spikes.count_bad():
            action = "stop"
            cause += f"; more than {rules.most} bad updates among {rules.window}"
        limits = tuple(float(limit) for limit in np.asarray(controls.limits))
        event = BadUpdate(
            number,
            kind_of(*numbers, (limits[0], limits[1])),
            dict(zip(NAMES, numbers, strict=True)),
            dict(zip(NAMES, limits, strict=True)),
            action,
            cause.removeprefix("; ") or (PASSING if action == "repeated" else ""),
            number,
            self.clock() - start,
        )
        return JudgedUpdate(state, sums, event)

    def _repeat(
        self, update: CompiledUpdate, state: State, batch: Batch, controls: Controls
    ) -> tuple[State, Sums, str]:
        """Does the update again in place; returns its cause too if it is bad again, else an empty text."""
        state, sums = update(_before(state), batch, controls)
        jax.block_until_ready((state, sums))
        if int(sums["bad"]):
            return state, sums, find_cause(self.program, _before(state), batch, controls)
        self.spikes.add(*_numbers(sums))
        return state, sums, ""


def roll_back(program: Program, store: Checkpoints | None, state: State, update: int) -> State:
    """The newest state saved before `update`, or that of the start; it stays where it is in the data."""
    known = [] if store is None else [number for number in store.updates() if number < update]
    restored = program.init() if store is None or not known else store.restore(program.shapes, known[-1])
    return restored._replace(position=state.position)


def refuse_bad_update(bad: BadUpdate, update: int, folder: str) -> None:
    """Ends a run whose update stayed bad; the weights before it are saved as those of `update`.

    Raises:
      PoisonedError: always; it says how to go on without the batch.
    """
    values = ", ".join(f"{name} {value:.4g}" for name, value in bad.values.items())
    raise PoisonedError(
        f"update {bad.update}: {bad.kind} ({values}). {bad.verdict or 'It was not tried again'}. "
        f"The weights before it are saved as update {update}. To leave its batch out, go on with --resume "
        f"{folder} --set bad_updates.action=skip."
    )


def _before(state: State) -> State:
    """The state before a bad update: it kept all but its two numbers."""
    return state._replace(update=state.update - 1, position=state.position - 1)


def _numbers(sums: Sums) -> tuple[float, float]:
    """Loss and gradient norm of an update."""
    count = float(sums["count"])
    return float(sums["loss"]) / count, float(sums["gradient_norm"]) / count
