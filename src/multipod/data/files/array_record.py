"""ArrayRecord files, made for access by place; each record is a `tf.train.Example`. Read by Google's own library."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multipod.data.files.disk import Damaged, with_patience
from multipod.data.files.example import decode, encode
from multipod.data.files.records import FilesOfRecords, Record, check_not_empty
from multipod.errors import DataError
from multipod.extras import import_optional

_open = threading.local()


@dataclass(frozen=True, eq=False)
class ArrayRecords(FilesOfRecords):
    """All records of some files. Each thread has readers of its own: one reader serves one call at a time."""

    files: tuple[Path, ...]
    kind = "ArrayRecords"

    def counts(self) -> list[int]:
        """Records of each file."""
        return [_count(path) for path in self.files]

    def record_in(self, file: int, place: int) -> Record:
        """The fields of the Example."""
        path = self.files[file]
        try:
            [data] = with_patience(path, lambda: _reader(path).read([place]))
        except (ValueError, IndexError, RuntimeError) as error:
            raise Damaged(str(error).splitlines()[0]) from error
        return decode(data)


def open_array_records(files: tuple[Path, ...]) -> ArrayRecords:
    """The records of these files.

    Raises:
      DataError: a file is no ArrayRecord file, or there is no record.
      MissingPackageError: the library is not installed.
    """
    records = ArrayRecords(files)
    check_not_empty(records)
    return records


def write_array_record(path: Path, records: Sequence[Record]) -> None:
    """A file of these records, one a group, so that each can be read alone."""
    writer = _library().ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(encode(record))
    writer.close()


def _library() -> Any:
    return import_optional("ArrayRecords", "array_record.python.array_record_module")


def _count(path: Path) -> int:
    try:
        return _reader(path).num_records()
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"{path} cannot be read as ArrayRecords: {str(error).splitlines()[0]}. Write it again, or name others."
        ) from error


def _reader(path: Path) -> Any:
    readers = _open.__dict__.setdefault("readers", {})
    if path not in readers:
        if len(readers) >= 64:
            readers.pop(next(iter(readers)))
        path.open("rb").close()  # for a plain OSError if it is not there
        readers[path] = _library().ArrayRecordReader(str(path))
    return readers[path]
