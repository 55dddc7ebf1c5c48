"""Click records as `multipod clicks` writes them, as records of any other format: to be converted or looked at."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from multipod.data.clicks.records import ClickRecords, read_description
from multipod.data.files.records import Record, Records, files_identity
from multipod.data.source import HostBatch


@dataclass(frozen=True, eq=False)
class ClickFiles(Records):
    """All days of a folder; fields `label`, `dense` (log(1 + count), float32 [13]) and `ids` (int32 [26])."""

    examples: ClickRecords

    def __len__(self) -> int:
        return len(self.examples)

    def record(self, number: int) -> Record:
        """One example."""
        return {name: array[0] for name, array in self.examples.read(np.array([number])).items()}

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers, at once."""
        return self.examples.read(numbers)

    def name(self, number: int) -> str:
        """The folder and the place."""
        return f"{self.examples.parts[0].parent}, example {number:,}"

    @cached_property
    def file_ends(self) -> np.ndarray:
        """Examples up to the end of each part."""
        return self.examples.ends

    def identity(self) -> str:
        """A fingerprint of the names and sizes of the parts."""
        return files_identity("clicks", self.examples.parts, len(self))


def open_clicks(folder: Path) -> ClickFiles:
    """The click records of a folder.

    Raises:
      DataError: it has none, or they are not whole.
    """
    described = read_description(folder)
    parts = tuple(folder / name for name in described["parts"])
    return ClickFiles(ClickRecords(parts, tuple(described["rows"]), 0, sum(described["parts"].values())))
