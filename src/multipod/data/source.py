"""What a data set is: named arrays of examples, read by number."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

HostBatch = dict[str, np.ndarray]
"""Named NumPy arrays whose first dim counts examples."""


class Source(Protocol):
    """Examples by number. `augment` must be a pure function of its arguments."""

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers, int64 [n]."""
        ...

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The examples as training sees them.

        `rows` are their places in the whole batch: what is drawn from `rng` must be drawn for the
        whole batch and indexed by `rows`, so that it does not depend on who reads which rows.
        """
        ...


class Data(Protocol):
    """The data of a recipe."""

    def train(self) -> Source:
        """The examples to learn from."""
        ...

    def test(self) -> Source:
        """The examples to be judged by."""
        ...


@dataclass(frozen=True)
class ArraySource:
    """A source in memory: arrays of equal first dim, used as they are."""

    arrays: HostBatch

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers."""
        return {name: array[numbers] for name, array in self.arrays.items()}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch
