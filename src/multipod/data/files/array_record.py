"""ArrayRecord files, made for access by place; each record is a `tf.train.Example`. Read by Google's own library."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.files.disk import Damaged, with_patience
from multipod.data.files.example import decode, encode
from multipod.data.files.records import Record, Records, files_identity, locate_record
from multipod.errors import DataError

_open = threading.local()


@dataclass(frozen=True, eq=False)
class ArrayRecords(Records):
    """All records of some files. Each thread has readers of its own: one reader serves one call at a time."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def record(self, number: int) -> Record:
        """The fields of the Example."""
        file, place = locate_record(self.file_ends, number)
        path = self.files[file]
        try:
            [data] = with_patience(path, lambda: _reader(path).read([place]))
        except (ValueError, IndexError, RuntimeError) as error:
            raise Damaged(str(error).splitlines()[0]) from error
        return decode(data)

    def name(self, number: int) -> str:
        """The file and the place in it."""
        file, place = locate_record(self.file_ends, number)
        return f"{self.files[file]}, record {place:,}"

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([_count(path) for path in self.files])

    @property
    def file_ends(self) -> np.ndarray:
        """Records up to the end of each file."""
        return self._ends

    def identity(self) -> str:
        """A fingerprint of the names and sizes of the files."""
        return files_identity("ArrayRecords", self.files, len(self))


def open_array_records(files: tuple[Path, ...]) -> ArrayRecords:
    """The records of these files.

    Raises:
      DataError: a file is no ArrayRecord file, or there is no record.
    """
    records = ArrayRecords(files)
    if not len(records):
        raise DataError(f"{files[0]} and the {len(files) - 1} other files have no records. Name others.")
    return records


def write_array_record(path: Path, records: Sequence[Record]) -> None:
    """A file of these records, one a group, so that each can be read alone."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(encode(record))
    writer.close()


def _count(path: Path) -> int:
    try:
        return _reader(path).num_records()
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"{path} cannot be read as ArrayRecords: {str(error).splitlines()[0]}. Write it again, or name others."
        ) from error


def _reader(path: Path) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader  # comes with Grain

    readers = _open.__dict__.setdefault("readers", {})
    if path not in readers:
        if len(readers) >= 64:
            readers.pop(next(iter(readers)))
        path.open("rb").close()  # for a plain OSError if it is not there
        readers[path] = ArrayRecordReader(str(path))
    return readers[path]
