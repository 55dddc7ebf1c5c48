"""The order in which a run reads its data: a pure function of the seed and the batch's number."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import grain
import numpy as np

from multipod.data.source import HostBatch, Source


@dataclass(frozen=True)
class TrainBatches:
    """An endless sequence of shuffled batches that can be entered at any place.

    Every example is read once an epoch; epochs follow each other without a gap, each in a new
    order, so a batch may hold the end of one and the start of the next. Batch k is the same
    whatever the number of processes, and whether the run was stopped before it.

    Attributes:
      source: the examples.
      batch: examples in a batch, over all processes.
      seed: of the order and of the augmentation.
      rows: which rows of each batch this process reads, increasing. Rows from `batch` on are padding.
      padded: whether any process reads padding: batches then have a `mask`, bool [rows], false there.
    """

    source: Source
    batch: int
    seed: int
    rows: np.ndarray
    padded: bool = False

    def numbers(self, position: int) -> np.ndarray:
        """The numbers of the examples in batch `position`, all rows."""
        places = np.arange(position * self.batch, (position + 1) * self.batch)
        epochs, within = np.divmod(places, len(self.source))
        return np.concatenate(
            [_order(len(self.source), self.seed, int(epoch))[within[epochs == epoch]] for epoch in np.unique(epochs)]
        )

    def __getitem__(self, position: int) -> HostBatch:
        """This process's rows of batch `position`."""
        return self._load(position, self.numbers(position))

    def start(self, position: int, prefetch: int = 4) -> Iterator[HostBatch]:
        """The batches from `position` on, read ahead by a thread."""
        loaded = grain.MapDataset.range(position, 2**62).map(self.__getitem__)
        return iter(loaded.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))

    def _load(self, position: int, numbers: np.ndarray) -> HostBatch:
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, position]))
        rows = np.minimum(self.rows, self.batch - 1)  # padding repeats the last example
        batch = self.source.augment(self.source.read(numbers[rows]), rows, rng)
        return batch | {"mask": self.rows < self.batch} if self.padded else batch


@lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: 8 bytes an example."""
    # The counter keeps it apart from the draws of the augmentation. One call for each epoch: Grain's own
    # shuffle is computed element by element in Python, 4 ms for a batch of 128, as much as a tenth of an update.
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 1, epoch])).permutation(examples)


def evaluation_batches(source: Source, batch: int, rows: np.ndarray) -> Iterator[HostBatch]:
    """All examples in order, this process's `rows` of each batch; the last batch is padded.

    Each batch has a `mask`, bool [rows]: false for padding, which repeats the last example.
    """
    for first in range(0, len(source), batch):
        numbers = first + rows
        mask = numbers < len(source)
        yield source.read(np.minimum(numbers, len(source) - 1)) | {"mask": mask}
