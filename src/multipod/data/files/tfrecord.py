"""TFRecord files: framed records, each a `tf.train.Example`. Read by place, through an index of their offsets."""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from multipod.data.files.disk import Damaged, read_at
from multipod.data.files.example import decode, encode
from multipod.data.files.records import FilesOfRecords, Record, check_not_empty, index_of
from multipod.errors import DataError
from multipod.extras import import_optional, is_installed

HEAD, TAIL = 12, 4
"""Bytes before and after a record's own: its length and the length's checksum; the record's checksum."""


@dataclass(frozen=True, eq=False)
class TFRecords(FilesOfRecords):
    """All records of some files. Checksums are tested where the extra `data` is installed.

    Attributes:
      files: in order.
      offsets: for each file, int64 [records + 1]: where each record's frame begins, and where the last ends.
    """

    files: tuple[Path, ...]
    offsets: tuple[np.ndarray, ...]
    kind = "TFRecords"

    def counts(self) -> list[int]:
        """Records of each file."""
        return [len(offsets) - 1 for offsets in self.offsets]

    def record_in(self, file: int, place: int) -> Record:
        """The fields of the Example."""
        first, end = self.offsets[file][place : place + 2].tolist()
        frame = read_at(self.files[file], first, end - first)
        if len(frame) < end - first:
            raise Damaged(f"the file ends {end - first - len(frame):,} bytes early")
        data = frame[HEAD:-TAIL]
        check = checksum()
        if check is not None and mask_checksum(check(data)) != struct.unpack("<I", frame[-TAIL:])[0]:
            raise Damaged("its checksum does not fit its bytes")
        return decode(data)


def open_tfrecords(files: tuple[Path, ...]) -> TFRecords:
    """The records of these files. Each file's offsets are found once, by one read of 12 bytes a record, and kept.

    Raises:
      DataError: a file is not made of TFRecords, or there is no record.
    """
    records = TFRecords(files, tuple(index_of(path, "tfrecord", _offsets) for path in files))
    check_not_empty(records)
    return records


def _offsets(path: Path) -> np.ndarray:
    size, place, offsets = path.stat().st_size, 0, [0]
    with path.open("rb", buffering=0) as file:
        while place < size:
            head = os.pread(file.fileno(), HEAD, place)
            if len(head) < HEAD or not _is_head(head):
                raise DataError(
                    f"{path}: no TFRecord begins at byte {place:,} of {size:,}, after {len(offsets) - 1:,} records. "
                    "The file is cut, compressed or of another kind: write it again, or leave it out of the pattern."
                )
            place += HEAD + struct.unpack("<Q", head[:8])[0] + TAIL
            offsets.append(place)
    if place > size:  # the last one was not written to its end; all before it are whole
        offsets.pop()
    return np.array(offsets, np.int64)


def _is_head(head: bytes) -> bool:
    check = checksum()
    length, found = struct.unpack("<QI", head)
    return length < 2**40 if check is None else mask_checksum(check(head[:8])) == found


def write_tfrecord(file: "os.PathLike[str] | str", records: "list[Record]") -> None:
    """Appends records to a file. Needs the extra `data`, for the checksums.

    Raises:
      MissingPackageError: the extra is not installed.
    """
    check = import_optional("the checksums of TFRecords", "google_crc32c").value
    with open(file, "ab") as out:
        for record in records:
            data = encode(record)
            length = struct.pack("<Q", len(data))
            out.write(
                length
                + struct.pack("<I", mask_checksum(check(length)))
                + data
                + struct.pack("<I", mask_checksum(check(data)))
            )


def mask_checksum(crc: int) -> int:
    """A checksum as TFRecords keep it, so that one of bytes that hold a checksum is not degenerate."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def checksum() -> Callable[[bytes], int] | None:
    """CRC-32C (Castagnoli), or None where the extra `data` is not installed."""
    return import_optional("checksums", "google_crc32c").value if is_installed("google_crc32c") else None
