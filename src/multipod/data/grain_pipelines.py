"""Grain's pipelines as our sources, and our sources as Grain's: both read examples by number.

data = GrainSource(grain.MapDataset.source(...).map(...))       # in a recipe
grain.MapDataset.source(SourceElements(recipe.data.train()))    # in a program of Grain's
grain.DataLoader(data_source=..., sampler=ExactlyOnce(len(...), seed=0))   # our order there
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import numpy as np

from multipod.data.files.records import stack_records
from multipod.data.order import generator
from multipod.data.source import HostBatch, Source
from multipod.errors import DataError
from multipod.extras import import_optional

if TYPE_CHECKING:
    from grain.python import RecordMetadata


class Elements(Protocol):
    """What reads elements by number: a `grain.MapDataset`, or any of Grain's random-access data sources."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, number: Any) -> Any:
        """One of them."""
        ...


@dataclass(frozen=True, eq=False)
class GrainSource:
    """A `grain.MapDataset` whose elements are dictionaries of arrays, as a `Source`; our order reads it.

    Leave `shuffle`, `repeat` and `batch` out of the pipeline: the run's seed shuffles, and the recipe says the batch.
    Random maps draw by Grain's own seed and by the number of the element, so they are the same in every epoch.
    """

    elements: Elements

    def __len__(self) -> int:
        return len(self.elements)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The elements with these numbers.

        Raises:
          DataError: one is no dictionary, or was filtered out.
        """
        found = [self.elements[number] for number in numbers.tolist()]
        for number, element in zip(numbers.tolist(), found, strict=True):
            if not isinstance(element, Mapping):
                raise DataError(
                    f"element {number} of the Grain pipeline is {type(element).__name__}, not a dictionary of arrays. "
                    "Map it to one; filters leave elements out, so filter before, or mask."
                )
        return stack_records([dict(element) for element in found])

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch


@dataclass(frozen=True, eq=False)
class SourceElements:
    """A `Source` as a data source of Grain's: element k is example k, a dictionary of arrays."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: SupportsIndex) -> dict[str, np.ndarray]:
        """One example."""
        return {name: array[0] for name, array in self.source.read(np.array([number.__index__()])).items()}


@dataclass(frozen=True)
class ExactlyOnce:
    """The order of our runs as a sampler of `grain.DataLoader`: every record once an epoch, epochs without a gap.

    The record at a place is a pure function of the seed and of the place. The places of a loader are those of all
    processes together, dealt out in turn, so after any number of steps all processes together have read the first
    places, each once, whatever their number; one that is made again goes on by its `get_state`. Batch k of a loader
    in one process has the records of batch k of our own run with this seed (`multipod.data.batches.TrainBatches`).

    Attributes:
      records: how many there are.
      seed: of the order, and of what records' own generators draw.
      epochs: passes over the records; None: without end.
    """

    records: int
    seed: int = 0
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.records < 1 or (self.epochs is not None and self.epochs < 1):
            raise DataError(f"{self}: there is at least one record, and one epoch. Give 1 or more.")

    def __getitem__(self, index: int) -> "RecordMetadata":
        """The record at a place, and its random numbers."""
        metadata = import_optional("ExactlyOnce", "grain.python").RecordMetadata
        if index < 0 or (self.epochs is not None and index >= self.epochs * self.records):
            raise IndexError(f"{self} has no place {index}")
        epoch, within = divmod(index, self.records)
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 2, index]))
        return metadata(index=index, record_key=int(_order(self.records, self.seed, epoch)[within]), rng=rng)


@lru_cache(maxsize=4)
def _order(records: int, seed: int, epoch: int) -> np.ndarray:
    return generator(seed, epoch).permutation(records)
