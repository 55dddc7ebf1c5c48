"""WebDataset archives: tar files in which the members of an example share a name, `0001.jpg` and `0001.cls`."""

import json
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from multipod.data.files.disk import Damaged, read_at
from multipod.data.files.kept import unpacked
from multipod.data.files.records import FilesOfRecords, Record, check_not_empty, index_of
from multipod.errors import DataError

WHOLE_NUMBERS = ("cls", "cls2", "index", "label")
"""Members that are one whole number, written as text."""


@dataclass(frozen=True, eq=False)
class TarRecords(FilesOfRecords):
    """All examples of some archives; fields are named by what follows the first dot of a member's name.

    `cls`, `index` and `label` become numbers, the members of `json` fields of their own; all else stays bytes.

    Attributes:
      files: the archives, in order.
      members: of each archive, a structured array: example, field, offset, size.
      content: of each archive, the file that its members lie in: itself, or, if it is compressed, what it holds.
    """

    files: tuple[Path, ...]
    members: tuple[np.ndarray, ...]
    content: tuple[Path, ...]
    kind = "examples of archives"
    unit = "example"
    holders = "archives"

    @cached_property
    def _firsts(self) -> list[np.ndarray]:
        """The first member of each example, for each archive."""
        return [np.flatnonzero(np.diff(members["example"], prepend=-1)) for members in self.members]

    def counts(self) -> list[int]:
        """Examples of each archive."""
        return [len(firsts) for firsts in self._firsts]

    def record_in(self, file: int, place: int) -> Record:
        """The members of the example."""
        firsts, members = self._firsts[file], self.members[file]
        stop = firsts[place + 1] if place + 1 < len(firsts) else len(members)
        record: Record = {}
        for member in members[firsts[place] : stop]:
            data = read_at(self.content[file], int(member["offset"]), int(member["size"]))
            if len(data) < member["size"]:
                raise Damaged(f"the archive ends {int(member['size']) - len(data):,} bytes early")
            record |= _field(member["field"].decode(), data)
        return record


def open_tar(files: tuple[Path, ...]) -> TarRecords:
    """The examples of these archives. Each archive's heads are read once, and where its members lie is kept.

    Archives compressed by gzip are unpacked into the user's cache first, once, since examples are read by place.

    Raises:
      DataError: a file is no tar archive, or is compressed otherwise, or there is no example.
    """
    content = tuple(map(unpacked, files))
    records = TarRecords(files, tuple(index_of(path, "tar", _members) for path in content), content)
    check_not_empty(records)
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
                f"{path} cannot be read as a tar archive ({error}). Of compressed ones .tar.gz is read: unpack others."
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
