"""`Tally`: sums over the sends of a schedule by some key, without a Python loop over millions of them."""

import numpy as np

WAITING = 1 << 21
"""Numbers that wait to be summed up; with them a tally stays below some 100 MB."""


class Tally:
    """Sums of `columns` counts for each key, an int of 0 or more."""

    def __init__(self, columns: int) -> None:
        self._sums = [np.zeros(0, np.int64) for _ in range(1 + columns)]
        self._new: list[tuple[np.ndarray, ...]] = []
        self._waiting = 0

    def add(self, keys: np.ndarray, *counts: np.ndarray) -> None:
        """Adds `counts[i][k]` to sum i of `keys[k]`; a key may be there several times."""
        self._new.append((keys, *counts))
        self._waiting += len(keys) + 100  # an array of one number takes as much memory as a hundred in a longer one
        if self._waiting > WAITING:
            self._fold()

    def sums(self) -> list[np.ndarray]:
        """The keys, rising, and their sums, as int64 arrays of one length."""
        self._fold()
        return self._sums

    def _fold(self) -> None:
        keys, *counts = (np.concatenate(columns) for columns in zip(self._sums, *self._new, strict=True))
        if len(keys):
            order = np.argsort(keys)
            keys = keys[order]
            begin = np.flatnonzero(np.diff(keys, prepend=-1))
            self._sums = [keys[begin], *(np.add.reduceat(count[order], begin) for count in counts)]
        self._new, self._waiting = [], 0
