"""Checkpoints that are opened when they are first used, since all processes of a world meet for that."""

from collections.abc import Callable

from multipod.step.state import State
from multipod.train.checkpoints.checkpoint import Checkpoints


class LazyCheckpoints:
    """Opens `Checkpoints` when they are first needed; until then there is nothing to wait for, to close or to end.

    Args:
      open_them: makes the checkpoints; processes meet in it.
      look: called before each use; raises to end what the caller is in.
    """

    def __init__(self, open_them: Callable[[], Checkpoints], look: Callable[[], None]) -> None:
        self._open, self._look = open_them, look
        self._opened: Checkpoints | None = None

    def _use(self) -> Checkpoints:
        self._look()
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def updates(self) -> list[int]:
        """The numbers of updates of which there is a checkpoint, increasing."""
        return self._use().updates()

    def save(self, state: State, update: int) -> None:
        """Begins to save the state after `update` updates."""
        self._use().save(state, update)

    def restore(self, shapes: State, update: int | None = None, instead: Callable[[str], None] | None = None) -> State:
        """Returns the state after `update` updates, see `multipod.train.checkpoints.checkpoint.Checkpoints.restore`."""
        return self._use().restore(shapes, update, instead)

    @property
    def has_failed(self) -> bool:
        """Whether it is known by now that the last save failed."""
        self._look()
        return self._opened is not None and self._opened.has_failed

    def wait(self) -> None:
        """Returns when all saves are committed."""
        self._look()
        if self._opened is not None:
            self._opened.wait()

    def close(self) -> None:
        """Frees the threads of checkpoints that have been opened."""
        self._look()
        if self._opened is not None:
            self._opened.close()

    def abandon(self) -> None:
        """Ends what is being written by checkpoints that have been opened; does not look around first."""
        if self._opened is not None:
            self._opened.abandon()
