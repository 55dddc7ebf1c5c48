"""Barriers of a checkpoint that nobody waits in for a process that has failed.

Orbax lets its processes meet while a save goes on in the background. If one of them cannot write, the others wait for
it until `AsyncOptions.timeout_secs`: 20 minutes. JAX's own barrier cannot be left before its time is up, so these count
arrivals, and look now and then.
"""

import sys
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from multipod.train.jax_service import service

SOON_S, POLL_S = 0.01, 0.5
WORD = "failed"


class Barriers:
    """Barriers in JAX's coordination service that end for all when one process has failed.

    For `AsyncOptions.barrier_sync_fn`. All processes make them at the same point, in the thread that begins the saves,
    for the same folder and number.

    Args:
      folder: of the checkpoints.
      number: tells one set of barriers for this folder from the next. A set that has failed serves no more.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._client: Any = service() if jax.process_count() > 1 else None
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._thread = threading.get_ident()
        self._uses: dict[str, int] = {}
        self._prefix = f"multipod/checkpoints/{zlib.crc32(str(folder).encode()):08x}/{number}"
        self._failed = False

    def leave(self) -> None:
        """Lets nobody wait any more here: the others are gone."""
        self._failed = True

    def fail(self) -> None:
        """Lets nobody wait any more, here or in another process."""
        self._failed = True
        if self._client is not None:
            with suppress(jax.errors.JaxRuntimeError):  # the service is gone, and all barriers with it
                self._client.key_value_set(f"{self._prefix}/{WORD}", str(self._process), allow_overwrite=True)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes at the barrier `key`.

        Raises:
          Exception: what went wrong in this process: Orbax's threads come here with an error on its way, to tell the
            others that they are done.
          OSError: another process has failed.
          TimeoutError: some process did not come in time.
        """
        error = sys.exc_info()[1]
        if error is not None and threading.get_ident() != self._thread:
            self.fail()
            raise error
        if self._client is None:
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        counter, all_of_them = f"{self._prefix}/{key}", self._uses[key] * self._processes
        here, pause_s = self._client.key_value_increment(counter, 1), SOON_S
        until_s = time.monotonic() + timeout_ms / 1000
        while here < all_of_them:
            if self._over():
                raise OSError("another process could not write its part")
            if time.monotonic() > until_s:
                raise TimeoutError(f"{here} of {all_of_them} processes came to {key} in {timeout_ms / 1000:g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, POLL_S)
            here = int(self._client.key_value_try_get(counter))

    def _over(self) -> bool:
        """Whether some process has failed."""
        if not self._failed:
            try:
                self._failed = bool(self._client.key_value_try_get(f"{self._prefix}/{WORD}"))
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" not in str(error):
                    raise
        return self._failed
