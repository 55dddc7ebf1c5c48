"""Reads bytes of files by place, from any number of threads, and waits for a disk that is away for a while."""

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from multipod.errors import DataError

T = TypeVar("T")


class Damaged(Exception):
    """One example cannot be read or decoded; the others can. What reads it leaves it out, counts it and names it."""


@dataclass(frozen=True)
class Patience:
    """How long reading waits for a disk that gives errors, as a network's does when its server starts again.

    Attributes:
      limit_s: then a `DataError` says so.
      first_s: the first pause; each is twice the one before, up to 5 s.
      sleep: waits so many seconds.
      clock: a monotonic clock in seconds.
    """

    limit_s: float = 120.0
    first_s: float = 0.1
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


PATIENCE = Patience()
_AWAY = {errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOTCONN, errno.ETIMEDOUT, errno.ENODEV, errno.EHOSTDOWN}


def with_patience(what: Path, read: Callable[[], T], patience: Patience = PATIENCE) -> T:
    """What `read` returns, once it does so without an error of the disk.

    A file that is missing while its folder is there is one damaged example. Where the folder is gone as well, or the
    disk gives input/output errors, everything is, and it may come back.

    Raises:
      Damaged: the file alone is gone.
      DataError: the disk did not come back in time, or refuses for good (permission).
    """
    started, pause_s = patience.clock(), patience.first_s
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno == errno.ENOENT and what.parent.is_dir() and not what.exists():
                raise Damaged(f"{what} is gone") from error
            waited_s = patience.clock() - started
            if error.errno not in _AWAY or waited_s >= patience.limit_s:
                raise DataError(
                    f"{what} cannot be read: {error.strerror or error}, after {waited_s:.0f} s of trying. "
                    "See to the disk; the last checkpoint is whole, and --resume goes on from it."
                ) from error
        patience.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


class _Descriptors:
    """The latest files that were read from, open: at most `limit`. A file in use is never closed under a reader."""

    def __init__(self, limit: int = 128) -> None:
        self._limit = limit
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path, work: Callable[[int], T]) -> T:
        """What `work` returns, given a descriptor of the file."""
        descriptor = self._take(path)
        try:
            done = work(descriptor)
        except OSError:
            os.close(descriptor)  # it may be of a disk that was unmounted: open it anew next time
            raise
        self._give_back(path, descriptor)
        return done

    def _take(self, path: Path) -> int:
        with self._lock:
            descriptor = self._open.pop(path, None)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor

    def _give_back(self, path: Path, descriptor: int) -> None:
        with self._lock:
            extra = [self._open.pop(path, None)]  # another thread's of the same file
            self._open[path] = descriptor
            if len(self._open) > self._limit:
                extra.append(self._open.popitem(last=False)[1])
        for one in extra:
            if one is not None:
                os.close(one)


_descriptors = _Descriptors()


def read_at(path: Path, offset: int, size: int, patience: Patience = PATIENCE) -> bytes:
    """`size` bytes of a large file from `offset` on; fewer where the file ends. The file stays open for the next."""
    return with_patience(path, lambda: _descriptors.read(path, lambda file: os.pread(file, size, offset)), patience)


def read_into(path: Path, offset: int, out: np.ndarray, patience: Patience = PATIENCE) -> None:
    """Fills `out`, contiguous, from `offset` on.

    Raises:
      DataError: the file ends before.
    """
    place = out.data.cast("B")
    done = 0
    while done < len(place):
        work = partial(_preadv, offset + done, place[done:])
        count = with_patience(path, partial(_descriptors.read, path, work), patience)
        if not count:
            raise DataError(f"{path} ends at byte {offset + done:,}, in the middle of an entry. Write the file again.")
        done += count


def _preadv(offset: int, into: memoryview, descriptor: int) -> int:
    return os.preadv(descriptor, [into], offset)


def read_whole(path: Path, patience: Patience = PATIENCE) -> bytes:
    """All bytes of a small file."""
    return with_patience(path, lambda: _whole(path), patience)


def _whole(path: Path) -> bytes:
    """The bytes of a file in a third of the time of `path.read_bytes()`: a run reads a million files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(descriptor, os.fstat(descriptor).st_size + 1)]
        while parts[-1]:
            parts.append(os.read(descriptor, 2**20))
    finally:
        os.close(descriptor)
    return parts[0] if len(parts) == 2 else b"".join(parts)
