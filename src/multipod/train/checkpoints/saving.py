"""When a run saves, and what it does when storage fails: it tries again, goes on training, and says so."""

import time
from collections.abc import Callable
from typing import Protocol

import jax

from multipod.errors import CheckpointError, PoisonedError
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

    def updates(self) -> list[int]:
        """The numbers of updates of which there is a checkpoint, increasing."""
        ...

    def save(self, state: State, update: int) -> None:
        """Begins to save; raises CheckpointError."""
        ...

    def wait(self) -> None:
        """Waits until all is committed; raises CheckpointError."""
        ...


class RetryingSaver:
    """Saves states in a store that may fail for a while, and none that holds what is not finite.

    After a failure the next tries follow 1, 2, 4, ... updates later. They are counted in updates and not in seconds,
    because all processes must try at the same one. A save that fails in the background is noticed at the next try;
    by a run of one process at once. The count begins anew when a save is known to be on disk, not when it has begun.

    Args:
      store: of checkpoints; None saves nothing.
      notify: given each save, and each failure.
      clock: in seconds.
      sleep: waits.
      unfit: names the tensors of a state that are not finite.
      strict: a state that is not finite ends the run; else it is told, and not saved.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        notify: Callable[[Event], None],
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        unfit: Callable[[State], list[str]] = lambda state: [],
        strict: bool = True,
    ) -> None:
        self._store, self._notify, self._clock, self._sleep = store, notify, clock, sleep
        self._unfit, self._strict = unfit, strict
        self._failures = self._next = 0
        self._begun = False  # a save is in the background, and nobody knows yet how it ends

    def is_owed(self, update: int) -> bool:
        """Whether a save that failed is to be tried again after this update."""
        if self._store is None:
            return False
        if self._failures == 0 or self._begun:
            return jax.process_count() == 1 and self._store.has_failed
        return update >= self._next

    def save(self, state: State, update: int) -> None:
        """Saves, or tells that it could not.

        Raises:
          PoisonedError: the state is not finite.
        """
        if self._store is None:
            return
        start = self._clock()
        if self._refuses(self._store, state, update, start):
            return
        try:
            self._store.save(state, update)
        except CheckpointError as error:
            self._put_off(update, str(error).splitlines()[0], start)
        else:
            self._failures = 0 if self._begun else self._failures  # to begin one waits for the one before
            self._begun = True
            self._notify(Saved(update, self._clock() - start))

    def save_last(self, state: State, update: int) -> None:
        """Saves and waits until it is on disk.

        Raises:
          CheckpointError: it was tried for `LAST_TRIES_S`, in vain.
          PoisonedError: the state is not finite.
        """
        if self._store is None:
            return
        start = self._clock()
        if self._refuses(self._store, state, update, start):
            return
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

    def _put_off(self, update: int, reason: str, start: float) -> None:
        """Tells that a save failed, and when it is tried again."""
        self._next = update + min(2**self._failures, LONGEST_PAUSE)
        self._failures += 1
        self._begun = False
        self._notify(SaveFailed(update, reason, self._next, self._clock() - start))

    def _refuses(self, store: CheckpointStore, state: State, update: int, start: float) -> bool:
        """Whether the state is unfit to be saved, which is told.

        Raises:
          PoisonedError: it is, and that ends the run.
        """
        names = self._unfit(state)
        if not names:
            return False
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        what = f"not finite after update {update}: {', '.join(names[:4])}{more}"
        if self._strict:
            self.settle(update)
            saved = ", ".join(map(str, store.updates())) or "none"
            raise PoisonedError(
                f"{what}. This state is not saved; still good: {saved}. Train anew with a lower rate (--set "
                "optimizer.rate=...), a longer warm-up or clipping (optimizer.clip)."
            )
        self._put_off(update, what, start)
        return True

    def settle(self, update: int) -> None:
        """Waits for what is being written; tells it if that failed."""
        start = self._clock()
        try:
            if self._store is not None:
                self._store.wait()
        except CheckpointError as error:
            self._notify(SaveFailed(update, str(error).splitlines()[0], update, self._clock() - start))
