"""Text files, one example a line."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from multipod.data.files.disk import Damaged, read_at
from multipod.data.files.records import Record, Records, files_identity, index_of, locate_record
from multipod.errors import DataError


@dataclass(frozen=True, eq=False)
class TextLines(Records):
    """Field `text`: a line without its end, as a string. Empty lines count.

    Attributes:
      files: in order.
      offsets: of each file, int64 [lines + 1]: where each line begins, and where the last ends.
    """

    files: tuple[Path, ...]
    offsets: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def record(self, number: int) -> Record:
        """The line."""
        file, place = locate_record(self.file_ends, number)
        first, end = self.offsets[file][place : place + 2].tolist()
        try:
            return {"text": read_at(self.files[file], first, end - first).decode().rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise Damaged(f"it is not UTF-8: {error}") from error

    def name(self, number: int) -> str:
        """The file and the line's number, from 1."""
        file, place = locate_record(self.file_ends, number)
        return f"{self.files[file]}, line {place + 1:,}"

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(offsets) - 1 for offsets in self.offsets])

    @property
    def file_ends(self) -> np.ndarray:
        """Lines up to the end of each file."""
        return self._ends

    def identity(self) -> str:
        """A fingerprint of the names and sizes of the files."""
        return files_identity("lines", self.files, len(self))


def open_lines(files: tuple[Path, ...]) -> TextLines:
    """The lines of these files.

    Raises:
      DataError: there are none.
    """
    lines = TextLines(files, tuple(index_of(path, "lines", _offsets) for path in files))
    if not len(lines):
        raise DataError(f"{files[0]} and the {len(files) - 1} other files have no lines. Name others.")
    return lines


def _offsets(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if not size:
        return np.zeros(1, np.int64)
    content = np.memmap(path, np.uint8, "r")
    block = 2**26
    ends = [np.flatnonzero(content[at : at + block] == 10) + at + 1 for at in range(0, size, block)]
    offsets = np.concatenate([[0], *ends])
    return offsets if offsets[-1] == size else np.append(offsets, size)
