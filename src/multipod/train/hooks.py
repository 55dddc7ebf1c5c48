"""Hooks that the loop calls, and what may end it from outside; it does not know who stands behind them."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

PhaseHook = Callable[[str, int], None]
"""`pulse(phase, update)`: the loop enters a phase, with `update` updates done.

`phase` is one of starting, compiling, updating, evaluating, saving, ending. Phase updating is
entered anew for each update.
"""


def ignore_phase(phase: str, update: int) -> None:
    """The pulse of a run without a launcher: does nothing."""


class WorldLeft(Exception):
    """A world is over for this process: raised in its loop, caught where the next world is joined."""


class Faults(Protocol):
    """Faults on purpose in a process; the loop asks for them around each update."""

    sticky: bool
    """Whether a bit that is flipped stays so when the update is done again."""

    flips: bool
    """Whether a bit is to flip in some process: the update must then be compiled for it."""

    def of_run(self, checkpoints: Path, world: int = 0) -> "Faults":
        """Notes where the run saves, and the number of its world; returns the faults."""
        ...

    def before(self, update: int, given: Callable[[], list[int]]) -> int:
        """Lets happen what is due after `update` updates; returns the bit to flip in the next (`step.guard.Controls`).

        `given` are the numbers of the examples that this process gives to the next.
        """
        ...

    def after(self, update: int) -> None:
        """Notes that `update` updates are done."""
        ...


class _NoFaults:
    sticky = flips = False

    def of_run(self, checkpoints: Path, world: int = 0) -> Faults:
        return self

    def before(self, update: int, given: Callable[[], list[int]]) -> int:
        return 0

    def after(self, update: int) -> None:
        return


no_faults: Faults = _NoFaults()
"""Nothing goes wrong."""
