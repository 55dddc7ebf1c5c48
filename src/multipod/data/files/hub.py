"""Data sets of the Hugging Face hub, by name or from a folder, through the library `datasets` (extra `hub`)."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.files.disk import Damaged, read_whole
from multipod.data.files.records import Record, Records
from multipod.data.source import fingerprint
from multipod.errors import DataError
from multipod.extras import import_optional

PREFIX = "hub:"
"""Begins the name of a data set of the hub: `hub:NAME:SPLIT`, or `hub:NAME:CONFIG:SPLIT`."""
SAVED = "dataset_info.json"
"""In a folder that `Dataset.save_to_disk` wrote."""


@dataclass(frozen=True, eq=False)
class HubRecords(Records):
    """The rows of a `datasets.Dataset`, read by place in our order; images stay encoded, as in files.

    Attributes:
      where: as the user named them.
      rows: the data set, whose images are not decoded.
    """

    where: str
    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, number: int) -> Record:
        """The columns of the row."""
        return {name: _value(value) for name, value in self.rows[number].items()}

    def name(self, number: int) -> str:
        """The data set and the place."""
        return f"{self.where}, row {number:,}"

    @property
    def file_ends(self) -> np.ndarray:
        """One file."""
        return np.array([len(self)])

    def identity(self) -> str:
        """How many rows there are, their columns, and some of them."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        some = [self.rows[number] for number in sorted({0, len(self) // 2, len(self) - 1})]
        parts = [repr(self.rows.features).encode(), *(repr(row).encode() for row in some)]
        return f"{len(self):,} rows of a hub {fingerprint(parts)}"


def open_hub(where: str) -> HubRecords:
    """The rows behind `hub:NAME:SPLIT` (NAME may be a folder), or of a folder that `save_to_disk` wrote.

    Raises:
      DataError: there is no such data set or split, or it is empty.
      MissingPackageError: `datasets` is not installed.
    """
    datasets = import_optional(where, "datasets")
    try:
        rows = _loaded(datasets, where)
    except Exception as error:  # the library raises errors of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{where} cannot be loaded: {reason.rstrip('.')}. Write hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT; without a "
            "network only what was loaded before, or a folder, can be read."
        ) from error
    if not hasattr(rows, "features"):
        raise DataError(f"{where} has several splits: {', '.join(rows)}. Name the folder of one of them.")
    if not len(rows):
        raise DataError(f"{where} has no rows. Name another split.")
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return HubRecords(where, rows)


def is_saved(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote this folder."""
    return (folder / SAVED).is_file()


def _loaded(datasets: Any, where: str) -> Any:
    if not where.startswith(PREFIX):
        return datasets.load_from_disk(where)
    name, *config, split = where.removeprefix(PREFIX).split(":")
    return datasets.load_dataset(name, *config, split=split)


def _value(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        if value["bytes"] is None and not value["path"]:
            raise Damaged("its image is empty")
        return value["bytes"] if value["bytes"] is not None else read_whole(Path(value["path"]))
    if value is None:
        raise Damaged("a column is empty there")
    return np.asarray(value) if isinstance(value, list) else value
