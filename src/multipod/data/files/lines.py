"""Text files, one example a line."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multipod.data.files.disk import Damaged, read_at
from multipod.data.files.kept import unpacked
from multipod.data.files.records import FilesOfRecords, Record, check_not_empty, index_of

_BLOCK = 2**20


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
    size, place, ends = path.stat().st_size, 0, [np.zeros(1, np.int64)]
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (place + 1))
            place += len(block)
    offsets = np.concatenate(ends)
    return offsets if offsets[-1] == size else np.append(offsets, size)
