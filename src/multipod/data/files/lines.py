"""Text files, one example a line."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multipod.data.files.disk import Damaged, read_at
from multipod.data.files.kept import unpacked
from multipod.data.files.records import FilesOfRecords, Record, check_not_empty, index_of


@dataclass(frozen=True, eq=False)
class TextLines(FilesOfRecords):
    """Field `text`: a line without its end, as a string. Empty lines count.

    Attributes:
      files: in order.
      offsets: of each file, int64 [lines + 1]: where each line begins, and where the last ends.
      content: of each file, where its lines lie: itself, or, if it is compressed, what it holds.
    """

    files: tuple[Path, ...]
    offsets: tuple[np.ndarray, ...]
    content: tuple[Path, ...]
    kind = "lines"
    unit = "line"
    first = 1

    def counts(self) -> list[int]:
        """Lines of each file."""
        return [len(offsets) - 1 for offsets in self.offsets]

    def record_in(self, file: int, place: int) -> Record:
        """The line."""
        first, end = self.offsets[file][place : place + 2].tolist()
        try:
            return {"text": read_at(self.content[file], first, end - first).decode().rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise Damaged(f"it is not UTF-8: {error}") from error


def open_lines(files: tuple[Path, ...]) -> TextLines:
    """The lines of these files.

    Raises:
      DataError: there are none.
    """
    content = tuple(map(unpacked, files))
    lines = TextLines(files, tuple(index_of(path, "lines", _offsets) for path in content), content)
    check_not_empty(lines)
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
