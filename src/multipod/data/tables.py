"""Examples that are ready as arrays in files, mapped into memory and read block by block: recommendation data."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from multipod.data.files.formats import open_records
from multipod.data.files.records import Records
from multipod.data.order import InBlocks, epoch_of
from multipod.data.source import HostBatch
from multipod.errors import DataError


@dataclass(frozen=True, eq=False)
class TableRows:
    """The fields of records as they are: numbers and arrays of numbers, of one shape in all records.

    Attributes:
      records: the files.
      order: of blocks; None: all examples in random order.
    """

    records: Records
    order: InBlocks | None = None

    def __len__(self) -> int:
        return len(self.records)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers."""
        return self.records.read(numbers)

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def epoch_order(self, seed: int, epoch: int, batch: int) -> np.ndarray:
        """Block by block, or at random."""
        return epoch_of(self.order, self.records.file_ends, seed, epoch, batch)

    def identity(self) -> str:
        """The identity of the records."""
        return self.records.identity()


@dataclass(frozen=True)
class Tables:
    """Rows of arrays in files, as `multipod data convert CLICKS OUT --to arrays --shuffle 0` writes them.

    The fields go to the model by their names: `label`, `dense` and `ids` for `multipod.models.dlrm`.

    Attributes:
      train_files: a folder of arrays, or files of another format with such fields, to learn from.
      test_files: the same, to be judged by.
      format: a name of `FORMATS`; empty: by what is there.
      block: examples that are read in one go, best the batch; 0: each for itself, in random order.
    """

    train_files: str = ""
    test_files: str = ""
    format: str = ""
    block: int = 0

    def train(self) -> TableRows:
        """The examples to learn from."""
        return TableRows(self._opened("train_files"), InBlocks(self.block) if self.block else None)

    def test(self) -> TableRows:
        """The examples to be judged by, in order."""
        return TableRows(self._opened("test_files"))

    def _opened(self, part: str) -> Records:
        where = getattr(self, part)
        if not where:
            raise DataError(f"the recipe does not say where its tables are. Give --set data.{part}=FOLDER.")
        records = _opened(where, self.format)
        objects = [name for name, array in records.read(np.arange(1)).items() if array.dtype.kind not in "iufb"]
        if objects:
            raise DataError(f"{where}: {', '.join(objects)} hold no numbers. Name files whose fields all do.")
        return records


@lru_cache(maxsize=8)
def _opened(where: str, kind: str) -> Records:
    return open_records(where, kind)
