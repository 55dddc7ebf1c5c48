"""What all formats have in common: records by number, each a dictionary of undecoded fields."""

import abc
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from multipod import runtime
from multipod.data.files.disk import Damaged
from multipod.data.source import HostBatch, fingerprint
from multipod.errors import DataError

Record = dict[str, Any]
"""Named fields: bytes (an encoded image, a text), numbers, or arrays."""


class Records(abc.ABC):
    """A data set in files. As a `Source` it gives encoded fields, bytes as arrays of objects."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many records there are."""

    @abc.abstractmethod
    def record(self, number: int) -> Record:
        """Record `number`, from 0.

        Raises:
          Damaged: it cannot be read or parsed; the others can.
          DataError: nothing can be read.
        """

    @abc.abstractmethod
    def name(self, number: int) -> str:
        """Where record `number` lies, for messages."""

    @property
    @abc.abstractmethod
    def file_ends(self) -> np.ndarray:
        """int64 [files]: how many records there are up to the end of each file, for orders that go file by file."""

    @abc.abstractmethod
    def identity(self) -> str:
        """A short text that changes when the records or their numbers do."""

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The records with these numbers.

        Raises:
          DataError: one of them is damaged.
        """
        records = []
        for number in numbers.tolist():
            try:
                records.append(self.record(number))
            except Damaged as error:
                raise DataError(f"{self.name(number)} is damaged: {error}. Mend or remove it.") from error
        return stack_records(records)

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch


class FilesOfRecords(Records):
    """Records of several files, one file after the other. A format says how many a file has, and reads one of them.

    `kind` is what `identity` calls the records; messages call one `unit`, the files `holders`, and count from `first`.
    """

    files: tuple[Path, ...]
    kind: ClassVar[str]
    unit: ClassVar[str] = "record"
    holders: ClassVar[str] = "files"
    first: ClassVar[int] = 0

    @abc.abstractmethod
    def counts(self) -> list[int]:
        """How many records each file has."""

    @abc.abstractmethod
    def record_in(self, file: int, place: int) -> Record:
        """Record `place` of a file, both from 0; raises what `record` does."""

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def record(self, number: int) -> Record:
        """Record `number`, from 0."""
        return self.record_in(*locate_record(self.file_ends, number))

    def name(self, number: int) -> str:
        """The file and the place in it."""
        file, place = locate_record(self.file_ends, number)
        return f"{self.files[file]}, {self.unit} {place + self.first:,}"

    @cached_property
    def file_ends(self) -> np.ndarray:
        """Records up to the end of each file."""
        return np.cumsum(self.counts())

    def identity(self) -> str:
        """A fingerprint of the names and sizes of the files."""
        return files_identity(self.kind, self.files, len(self))


def check_not_empty(records: FilesOfRecords) -> None:
    """Refuses files without a record.

    Raises:
      DataError: names them.
    """
    if not len(records):
        raise DataError(
            f"{records.files[0]} and the {len(records.files) - 1} other {records.holders} have no {records.unit}s. "
            "Name others."
        )


def stack_records(records: Sequence[Record]) -> HostBatch:
    """Records with the same fields as one batch. Bytes, and arrays of unequal shapes, become arrays of objects."""
    return {name: _column([record[name] for record in records]) for name in records[0]}


def _column(values: list[Any]) -> np.ndarray:
    if not isinstance(values[0], bytes | str) and len({np.shape(value) for value in values}) == 1:
        return np.asarray(values)
    column = np.empty(len(values), object)
    column[:] = values
    return column


def locate_record(ends: np.ndarray, number: int) -> tuple[int, int]:
    """Which file record `number` lies in, and its place there."""
    file = int(np.searchsorted(ends, number, side="right"))
    return file, number - (int(ends[file - 1]) if file else 0)


def files_identity(kind: str, files: Sequence[Path], count: int) -> str:
    """Identity of records in whole files: their number, and names and sizes of the files."""
    parts = (f"{path.name} {path.stat().st_size}".encode() for path in files)
    return f"{count:,} {kind} {fingerprint(parts)}"


def index_of(path: Path, kind: str, build: Callable[[Path], np.ndarray]) -> np.ndarray:
    """Where the records of a file lie, from the user's cache; built now and kept there if it is not in it.

    Found by the file's path, size and time of change. A cache that cannot be written costs time, and nothing else.
    """
    facts = path.stat()
    key = fingerprint([kind.encode(), str(path.resolve()).encode(), f"{facts.st_size} {facts.st_mtime_ns}".encode()])
    kept = runtime.index_cache() / f"{path.stem[:40]}-{key}.npy"
    try:
        return np.load(kept)
    except (OSError, ValueError):
        index = build(path)
    if facts.st_size > 2**20:
        keep(kept, index)
    return index


def keep(path: Path, array: np.ndarray) -> None:
    """Writes an array whole or not at all; a folder that cannot be written is no fault."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            np.save(file, array)
        os.replace(file.name, path)
    except OSError:
        pass
