"""One update after the other: given to the devices, waited for, judged."""

from dataclasses import dataclass

import jax

from multipod.pytrees import Batch
from multipod.step.guard import Controls
from multipod.step.program import Program
from multipod.step.state import State, Sums
from multipod.train.bad_numbers.bad_updates import BadUpdatePolicy, CompiledUpdate, JudgedUpdate
from multipod.train.bad_numbers.culprit import Numbers
from multipod.train.clock import Clock
from multipod.train.stop import ExitWish


@dataclass(frozen=True)
class InFlightUpdate:
    """An update that the devices work on: what they were given, what they will return, and since when."""

    batch: Batch
    wish: int
    controls: Controls
    state: State
    sums: Sums
    since_s: float

    @property
    def is_ready(self) -> bool:
        """Whether the devices are done with it."""
        ready: bool = self.sums["count"].is_ready()  # type: ignore[attr-defined]
        return ready


class UpdateRunner:
    """Runs the compiled update of a program, and judges what comes out if the program is watched."""

    def __init__(self, program: Program, compiled: CompiledUpdate, clock: Clock, numbers: Numbers) -> None:
        self.program, self.compiled, self.clock = program, compiled, clock
        self.policy = BadUpdatePolicy(program, numbers, clock)

    def dispatch(self, state: State, batch: Batch, wish: ExitWish, flip: int) -> InFlightUpdate:
        """Gives the devices an update to do, and the state up; does not wait for them."""
        since_s, number = self.clock(), wish.encode()
        controls = self.policy.controls(number, flip)
        state, sums = self.compiled(state, batch, controls)
        return InFlightUpdate(batch, number, controls, state, sums, since_s)

    def settle(self, update: InFlightUpdate, sticky: bool) -> JudgedUpdate:
        """Waits for the update, and repeats a bad one; a `sticky` fault happens in the repetition, too."""
        jax.block_until_ready((update.state, update.sums))
        self.program.check(update.sums)
        if not self.program.watched:
            return JudgedUpdate(update.state, update.sums, None)
        again = None if sticky else self.policy.controls(update.wish)
        return self.policy(self.compiled, update.state, update.sums, update.batch, update.controls, again)
