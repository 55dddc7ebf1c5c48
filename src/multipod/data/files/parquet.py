"""Parquet files, as Hugging Face keeps data sets in. Needs the extra `data`."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.files.disk import Damaged, with_patience
from multipod.data.files.records import FilesOfRecords, Record, check_not_empty, locate_record
from multipod.errors import DataError
from multipod.extras import import_optional

GROUPS_KEPT = 4
"""Row groups that each thread keeps decompressed: reading one row means reading its group."""

_kept = threading.local()


@dataclass(frozen=True, eq=False)
class ParquetRecords(FilesOfRecords):
    """All rows of some files. A column of structs `{bytes, path}` becomes the bytes.

    Access by place costs a whole row group unless it is among the last few read, so shuffle file by file
    (`multipod.data.order.FilesThenBuffer`), or convert to ArrayRecords first.

    Attributes:
      files: in order.
      groups: of each file, int64 [row groups]: rows up to the end of each.
    """

    files: tuple[Path, ...]
    groups: tuple[np.ndarray, ...]
    kind = "rows of Parquet"
    unit = "row"

    def counts(self) -> list[int]:
        """Rows of each file."""
        return [int(groups[-1]) if len(groups) else 0 for groups in self.groups]

    def record_in(self, file: int, place: int) -> Record:
        """The row's columns."""
        group, row = locate_record(self.groups[file], place)
        path = self.files[file]
        table = with_patience(path, lambda: _group(path, group))
        return {
            name: _value(column[row].as_py()) for name, column in zip(table.column_names, table.columns, strict=True)
        }


def open_parquet(files: tuple[Path, ...]) -> ParquetRecords:
    """The rows of these files.

    Raises:
      DataError: a file is no Parquet file, or there is no row.
      MissingPackageError: PyArrow is not installed.
    """
    records = ParquetRecords(files, tuple(_rows(path) for path in files))
    check_not_empty(records)
    return records


def parquet_module() -> Any:
    """PyArrow's module for Parquet.

    Raises:
      MissingPackageError: it is not installed.
    """
    return import_optional("Parquet files", "pyarrow.parquet")


def write_parquet(path: Path, records: list[Record]) -> None:
    """A file of these records, in row groups of 64, so that reading one row reads few others."""
    names = records[0]
    columns = {name: [_plain(record[name]) for record in records] for name in names}
    table = import_optional("Parquet files", "pyarrow").table(columns)
    parquet_module().write_table(table, path, row_group_size=64)


def _rows(path: Path) -> np.ndarray:
    try:
        facts = parquet_module().ParquetFile(path).metadata
    except (ValueError, OSError) as error:  # PyArrow's own errors are of these
        raise DataError(f"{path} cannot be read as Parquet: {error}. Write it again, or name others.") from error
    return np.cumsum([facts.row_group(group).num_rows for group in range(facts.num_row_groups)])


def _group(path: Path, group: int) -> Any:
    """A row group, among the last few that this thread read."""
    kept: OrderedDict[tuple[Path, int], Any] = _kept.__dict__.setdefault("groups", OrderedDict())
    if (path, group) not in kept:
        module = parquet_module()
        try:
            with module.ParquetFile(path) as file:
                kept[path, group] = file.read_row_group(group, use_threads=False)
        except ValueError as error:
            raise Damaged(f"row group {group}: {error}") from error
        if len(kept) > GROUPS_KEPT:
            kept.popitem(last=False)
    kept.move_to_end((path, group))
    return kept[path, group]


def _value(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return value["bytes"]
    if value is None:
        raise Damaged("a column is empty there")
    return np.asarray(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
