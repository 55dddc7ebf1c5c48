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
from multipod.step.state import HostSums, State, Sums, read_sums
from multipod.train.bad_numbers.culprit import Culprit, Numbers, find_culprit
from multipod.train.bad_numbers.loss_spikes import SpikeDetector, kind_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.clock import Clock
from multipod.train.events import BadUpdate

NAMES = "loss", "gradient_norm"
PASSING = "good when done again on the same devices: a passing fault, not the batch"

CompiledUpdate = Callable[[State, Batch, Any], tuple[State, Sums]]


class JudgedUpdate(NamedTuple):
    """An update that is done: the state and the sums that count, and what was bad about it, if anything was."""

    state: State
    sums: HostSums
    bad: BadUpdate | None


@dataclass
class BadUpdatePolicy:
    """Judges each update of a watched program, and repeats a bad one.

    Attributes:
      numbers: of the examples of a batch.
    """

    program: Program
    numbers: Numbers
    clock: Clock = time.monotonic
    spikes: SpikeDetector = field(init=False)

    def __post_init__(self) -> None:
        self.spikes = SpikeDetector(self.program.recipe.bad_updates)

    def controls(self, stop: int, flip: int = 0, halt: jax.Array | None = None) -> Controls:
        """What goes with the next update: the wish to stop, what is usual, and whether the one before was bad."""
        return self.program.controls(stop, self.spikes.limits(), flip, halt)

    def __call__(
        self,
        update: CompiledUpdate,
        state: State,
        sums: HostSums,
        batch: Batch,
        controls: Controls,
        again: Controls | None = None,
    ) -> JudgedUpdate:
        """Judges an update by its sums.

        Args:
          update: the compiled update; it is given the state up.
          state: what the update returned, or those behind it, which a bad one has halted.
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
        culprit, text = Culprit("", ""), ""
        if rules.replay:
            state, sums, found = self._repeat(update, state, batch, controls if again is None else again)
            action, culprit = (action, found) if found else ("repeated", Culprit("", PASSING))
            text = culprit.text
        if action not in ("repeated", "stop") and self.spikes.count_bad():
            action = "stop"
            text += f"; more than {rules.most} bad updates among {rules.window}"
        limits = tuple(float(limit) for limit in np.asarray(controls.limits))
        event = BadUpdate(
            number,
            kind_of(*numbers, (limits[0], limits[1])),
            dict(zip(NAMES, numbers, strict=True)),
            dict(zip(NAMES, limits, strict=True)),
            action,
            text.removeprefix("; "),
            number,
            self.clock() - start,
            culprit.fault,
            list(culprit.examples),
            list(culprit.tensors),
        )
        return JudgedUpdate(state, sums, event)

    def _repeat(
        self, update: CompiledUpdate, state: State, batch: Batch, controls: Controls
    ) -> tuple[State, HostSums, Culprit | None]:
        """Does the update again in place; returns whose fault it is, too, if it is bad again, else None."""
        state, on_devices = update(_before(state), batch, controls)
        jax.block_until_ready((state, on_devices))
        sums = read_sums(on_devices)
        if int(sums["bad"]):
            return state, sums, find_culprit(self.program, _before(state), batch, controls, self.numbers)
        self.spikes.add(*_numbers(sums))
        return state, sums, None


def roll_back(program: Program, store: Checkpoints | None, state: State, update: int) -> State:
    """The newest state saved before `update`, or that of the start; it stays where it is in the data."""
    known = [] if store is None else [number for number in store.updates() if number < update]
    restored = program.init() if store is None or not known else store.restore(program.shapes, known[-1])
    return restored._replace(position=state.position)


def keeps_weights(bad: BadUpdate) -> bool:
    """Whether the weights before an update that ends the run are worth a checkpoint: not if they are at fault."""
    return bad.fault != "weights"


def refuse_bad_update(bad: BadUpdate, update: int, folder: str, store: Checkpoints | None) -> None:
    """Ends a run whose update stayed bad; the weights before it are saved as those of `update`, or are at fault.

    Raises:
      PoisonedError: always; it says how to go on.
    """
    values = ", ".join(f"{name} {value:.4g}" for name, value in bad.values.items())
    what = f"update {bad.update}: {bad.kind} ({values}). {bad.verdict or 'It was not tried again'}. "
    if keeps_weights(bad):
        raise PoisonedError(
            f"{what}The weights before it are saved as update {update}. To leave its batch out, go on with --resume "
            f"{folder} --set bad_updates.action=skip."
        )
    saved = [] if store is None else store.updates()
    raise PoisonedError(
        f"{what}Its weights are not saved; saved before: {', '.join(map(str, saved)) or 'nothing'}. Train anew with a "
        "lower rate (--set optimizer.rate=...), a longer warm-up or clipping (optimizer.clip)."
    )


def _before(state: State) -> State:
    """The state before a bad update: it kept all but its two numbers."""
    return state._replace(update=state.update - 1, position=state.position - 1)


def _numbers(sums: HostSums) -> tuple[float, float]:
    """Loss and gradient norm of an update."""
    count = float(sums["count"])
    return float(sums["loss"]) / count, float(sums["gradient_norm"]) / count
