"""When a run saves, and what it does when storage fails: it tries again, goes on training, and says so."""

import time
from collections.abc import Callable
from typing import Protocol

import jax

from multipod.errors import CheckpointError
from multipod.step.state import State
from multipod.train.clock import Clock
from multipod.train.events import Event, Saved, SaveFailed

LONGEST_PAUSE = 1024
"""Updates between two tries, at most."""

LAST_TRIES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses between the tries to save the last state: nothing follows in which it could be saved later."""


class CheckpointStore(Protocol):
    """What a `RetryingSaver` needs of `multipod.train.checkpoints.checkpoint.Checkpoints`."""

    @property
    def has_failed(self) -> bool:
        """Whether it is known that the last save failed."""
        ...

    def save(self, state: State, update: int) -> None:
        """Begins to save; raises CheckpointError."""
        ...

    def wait(self) -> None:
        """Waits until all is committed; raises CheckpointError."""
        ...


class RetryingSaver:
    """Saves states in a store that may fail for a while.

    After a failure the next tries follow 1, 2, 4, ... updates later. They are counted in updates and not in seconds,
    because all processes must try at the same one. A save that fails in the background is noticed at the next try;
    by a run of one process at once.

    Args:
      store: of checkpoints; None saves nothing.
      notify: given each save, and each failure.
      clock: in seconds.
      sleep: waits.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        notify: Callable[[Event], None],
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._notify, self._clock, self._sleep = store, notify, clock, sleep
        self._failures = self._next = 0

    def is_owed(self, update: int) -> bool:
        """Whether a save that failed is to be tried again after this update."""
        if self._store is None:
            return False
        if self._failures == 0:
            return jax.process_count() == 1 and self._store.has_failed
        return update >= self._next

    def save(self, state: State, update: int) -> None:
        """Saves, or tells that it could not."""
        if self._store is None:
            return
        start = self._clock()
        try:
            self._store.save(state, update)
        except CheckpointError as error:
            self._next = update + min(2**self._failures, LONGEST_PAUSE)
            self._failures += 1
            self._notify(SaveFailed(update, str(error).splitlines()[0], self._next, self._clock() - start))
        else:
            self._failures = 0
            self._notify(Saved(update, self._clock() - start))

    def save_last(self, state: State, update: int) -> None:
        """Saves and waits until it is on disk.

        Raises:
          CheckpointError: it was tried for `LAST_TRIES_S`, in vain.
        """
        if self._store is None:
            return
        start = self._clock()
        for pause_s in (*LAST_TRIES_S, None):
            try:
                self._store.save(state, update)
                self._store.wait()
            except CheckpointError as error:
                if pause_s is None:
                    raise
                self._notify(SaveFailed(update, str(error).splitlines()[0], update, self._clock() - start))
                self._sleep(pause_s)
                start = self._clock()
            else:
                self._notify(Saved(update, self._clock() - start))
                return

    def settle(self, update: int) -> None:
        """Waits for what is being written; tells it if that failed."""
        start = self._clock()
        try:
            if self._store is not None:
                self._store.wait()
        except CheckpointError as error:
            self._notify(SaveFailed(update, str(error).splitlines()[0], update, self._clock() - start))
