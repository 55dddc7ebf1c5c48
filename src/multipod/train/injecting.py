"""Faults that are made to happen inside a training process, at given updates: the inner half of `multipod chaos`."""

from typing import Protocol

from multipod.data.batches import TrainBatches


class Faults(Protocol):
    """What goes wrong in a process, asked by the loop around each update."""

    sticky: bool
    """Whether a bit that is flipped stays so when the update is done again."""

    def before(self, update: int) -> int:
        """Lets happen what is due after `update` updates; returns the bit to flip in the next (`step.guard.Asked`)."""
        ...

    def after(self, update: int, position: int, batches: TrainBatches) -> None:
        """Notes that `update` updates are done, the last of them with batch `position`."""
        ...


class _None:
    sticky = False

    def before(self, update: int) -> int:
        return 0

    def after(self, update: int, position: int, batches: TrainBatches) -> None:
        return


none: Faults = _None()
"""Nothing goes wrong."""
