"""WebDataset archives: tar files in which the members of an example share a name, `0001.jpg` and `0001.cls`."""

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multipod.data.files.disk import Damaged, read_at
from multipod.data.files.records import Record, Records, files_identity, index_of, locate_record
from multipod.errors import DataError

WHOLE_NUMBERS = ("cls", "cls2", "index", "label")
"""Members that are one whole number, written as text."""


@dataclass(frozen=True, eq=False)
class TarRecords(Records):
    """All examples of some archives; fields are named by what follows the first dot of a member's name.

    `cls`, `index` and `label` become numbers, the members of `json` fields of their own; all else stays bytes.

    Attributes:
      files: the archives, in order; not compressed.
      members: of each archive, a structured array: example, field, offset, size.
    """

    files: tuple[Path, ...]
    members: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        firsts = tuple(np.flatnonzero(np.diff(one["example"], prepend=-1)) for one in self.members)
        object.__setattr__(self, "_firsts", firsts)
        object.__setattr__(self, "_ends", np.cumsum([len(first) for first in firsts]))

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def record(self, number: int) -> Record:
        """The members of the example."""
        file, place = locate_record(self.file_ends, number)
        firsts, members = self._firsts[file], self.members[file]  # type: ignore[attr-defined]
        stop = firsts[place + 1] if place + 1 < len(firsts) else len(members)
        record: Record = {}
        for member in members[firsts[place] : stop]:
            data = read_at(self.files[file], int(member["offset"]), int(member["size"]))
            if len(data) < member["size"]:
                raise Damaged(f"the archive ends {int(member['size']) - len(data):,} bytes early")
            record |= _field(member["field"].decode(), data)
        return record

    def name(self, number: int) -> str:
        """The archive and the place in it."""
        file, place = locate_record(self.file_ends, number)
        return f"{self.files[file]}, example {place:,}"

    @property
    def file_ends(self) -> np.ndarray:
        """Examples up to the end of each archive."""
        return self._ends  # type: ignore[attr-defined]

    def identity(self) -> str:
        """A fingerprint of the names and sizes of the archives."""
        return files_identity("examples of archives", self.files, len(self))


def open_tar(files: tuple[Path, ...]) -> TarRecords:
    """The examples of these archives. Each archive's heads are read once, and where its members lie is kept.

    Raises:
      DataError: a file is no tar archive, or is compressed, or there is no example.
    """
    records = TarRecords(files, tuple(index_of(path, "tar", _members) for path in files))
    if not len(records):
        raise DataError(f"{files[0]} and the {len(files) - 1} other archives have no examples. Name others.")
    return records


def _members(path: Path) -> np.ndarray:
    found, example, before = [], -1, None
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                stem, dot, field = file.partition(".")
                if not member.isfile() or not stem or not dot:
                    continue
                example += (folder, stem) != before
                before = (folder, stem)
                found.append((example, field.lower().encode(), member.offset_data, member.size))
    except tarfile.TarError as error:
        if not found:
            raise DataError(
                f"{path} cannot be read as a tar archive ({error}). Compressed ones cannot be read by place: unpack it."
            ) from error
    return np.array(found, [("example", np.int64), ("field", "S32"), ("offset", np.int64), ("size", np.int64)])


def _field(name: str, data: bytes) -> Record:
    try:
        if name in WHOLE_NUMBERS:
            return {name: int(data)}
        if name == "json":
            return json.loads(data)
    except ValueError as error:
        raise Damaged(f"its {name} cannot be read: {error}") from error
    return {name: data}
