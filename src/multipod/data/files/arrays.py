"""NumPy files of one folder, mapped into memory: `image.npy`, `label.npy`, each with as many examples.

The form for recommendation data: one record, one batch, three arrays. Entries side by side are read as one copy from
the page cache, at about the speed of a copy in memory, whether an entry is a batch or an example
(`multipod.data.tables`).
"""

import mmap
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from multipod.data.files.disk import read_into
from multipod.data.files.records import Record, Records
from multipod.data.source import HostBatch, fingerprint
from multipod.errors import DataError

LARGE = 16384
"""Bytes of entries side by side from which it is worth asking whether their pages are there."""


_POPULATE_READ = 22
"""`madvise` of Linux 5.14: maps pages, with an error where touching them would end the process (SIGBUS)."""


@dataclass(frozen=True, eq=False)
class _Mapped:
    """A `.npy` file in memory's map.

    Attributes:
      values: its array, over the map. A plain view: slicing NumPy's `memmap` takes as long as copying 10 KB.
      file: the map, where the array lies in it side by side; else None.
      offset: bytes of the file before the array.
      entry: bytes of one.
    """

    path: Path
    values: np.ndarray
    file: mmap.mmap | None
    offset: int
    entry: int

    def take(self, numbers: np.ndarray, runs: list[tuple[int, int, int]]) -> np.ndarray:
        """A copy of these entries, which `_runs` found to lie so."""
        if self.file is None or self.entry * len(numbers) < LARGE * len(runs):
            return self.values[numbers]
        out = np.empty((len(numbers), *self.values.shape[1:]), self.values.dtype)
        for place, first, count in runs:
            if self.present(self.file, first, count):
                out[place : place + count] = self.values[first : first + count]
            else:
                read_into(self.path, self.offset + first * self.entry, out[place : place + count])
        return out

    def present(self, file: mmap.mmap, first: int, count: int) -> bool:
        """Whether these entries are in memory now, and mapped; False where the system cannot tell."""
        start, size = first * self.entry, count * self.entry
        in_map = self.offset % mmap.ALLOCATIONGRANULARITY + start
        page = in_map - in_map % mmap.PAGESIZE
        try:
            file.madvise(_POPULATE_READ, page, in_map + size - page)
            return file.size() >= self.offset + start + size  # the last page of a shorter file ends in zeros
        except OSError:
            return False


def _mapped(path: Path) -> _Mapped:
    array = np.load(path, mmap_mode="r")
    file = array.base if array.flags.c_contiguous and isinstance(array.base, mmap.mmap) else None
    return _Mapped(path, np.asarray(array), file, getattr(array, "offset", 0), array.nbytes // max(len(array), 1))


def _runs(numbers: np.ndarray) -> list[tuple[int, int, int]]:
    """Where numbers follow each other: the place of the first among all, itself, and how many there are."""
    if len(numbers) == 1:  # a record that is a batch
        return [(0, int(numbers[0]), 1)]
    cuts = np.flatnonzero(numbers[1:] - numbers[:-1] != 1) + 1
    places = [0, *cuts.tolist(), len(numbers)] if len(numbers) else [0]
    return [(place, int(numbers[place]), stop - place) for place, stop in pairwise(places)]


@dataclass(frozen=True, eq=False)
class ArrayFiles(Records):
    """One example is one entry of each array. Nothing is held in memory but what the system keeps of the files."""

    folder: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self._arrays[self.names[0]].values)

    def record(self, number: int) -> Record:
        """Entry `number` of each array."""
        return {name: array.values[number] for name, array in self._arrays.items()}

    def read(self, numbers: np.ndarray) -> HostBatch:
        """Copies, from the map; where the file has become shorter or its disk is away, as any reading would say."""
        runs = _runs(numbers)
        return {name: array.take(numbers, runs) for name, array in self._arrays.items()}

    def name(self, number: int) -> str:
        """The folder and the place."""
        return f"{self.folder}, entry {number:,}"

    @property
    def file_ends(self) -> np.ndarray:
        """One file."""
        return np.array([len(self)])

    def identity(self) -> str:
        """A fingerprint of names, shapes and dtypes."""
        parts = (f"{name} {a.values.shape} {a.values.dtype}".encode() for name, a in self._arrays.items())
        return f"{len(self):,} entries of arrays {fingerprint(parts)}"

    @cached_property
    def _arrays(self) -> dict[str, _Mapped]:
        return {name: _mapped(self.folder / f"{name}.npy") for name in self.names}

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "names": self.names}  # a map is made again where it is used


def open_arrays(folder: Path) -> ArrayFiles:
    """The arrays of a folder.

    Raises:
      DataError: there are none, one cannot be read, or they do not have as many entries.
    """
    names = tuple(sorted(path.stem for path in folder.glob("*.npy")))
    if not names:
        raise DataError(f"{folder} has no .npy files. Name the folder that holds the arrays.")
    try:
        files = ArrayFiles(folder, names)
        lengths = {name: len(array.values) for name, array in files._arrays.items()}
    except (ValueError, OSError, TypeError) as error:
        raise DataError(f"{folder}: an array cannot be read: {error}. Write the arrays again.") from error
    if len(set(lengths.values())) != 1 or not len(files):
        listed = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise DataError(f"{folder}: {listed} entries. Every array needs as many, and at least one.")
    return files
