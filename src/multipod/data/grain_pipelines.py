"""Grain's pipelines as our sources, and our sources as Grain's: both read examples by number.

data = GrainSource(grain.MapDataset.source(...).map(...))       # in a recipe
grain.MapDataset.source(SourceElements(recipe.data.train()))    # in a program of Grain's
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import numpy as np

from multipod.data.files.records import stack_records
from multipod.data.source import HostBatch, Source
from multipod.errors import DataError


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
