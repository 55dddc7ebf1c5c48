"""Click records on disk, memory-mapped: 40 int32 an example, in parts, with a small description beside them.

A record is a label, 13 counts and 26 ids, 160 bytes: the form of MLPerf's own binary files. The logarithm of the counts
is taken when they are read. A folder has `clicks.json` and `part-00000.bin` and so on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.clicks.text import COLUMNS, DENSE, FIELDS
from multipod.data.files.addresses import refuse_address
from multipod.data.source import HostBatch
from multipod.errors import DataError
from multipod.pytrees import IdRange

DESCRIPTION = "clicks.json"
FORMAT = "multipod-clicks-1"
RECORD_BYTES = 4 * COLUMNS


@dataclass(frozen=True)
class ClickRecords:
    """A source of click records: three arrays, `label` int32 [n], `dense` float32 [n, 13], `ids` int32 [n, 26].

    Dense features are log(1 + count), negative counts taken as 0. Ids are checked against `rows`.

    Attributes:
      parts: the files, in order.
      rows: of each field's table.
      first: number of the first example of this source among all in the parts.
      count: its examples.
    """

    parts: tuple[Path, ...]
    rows: tuple[int, ...]
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers; each part is read where it lies, whatever their order.

        Raises:
          DataError: an id outside its table, with the field and the example.
        """
        places = np.asarray(numbers, np.int64) + self.first
        part = np.searchsorted(self.ends, places, side="right")
        found = np.empty((len(places), COLUMNS), np.int32)
        for number in np.unique(part):
            mine = part == number
            begin = self.ends[number - 1] if number else 0
            found[mine] = self._maps[number][places[mine] - begin]
        ids = np.ascontiguousarray(found[:, 1 + DENSE :])
        self._check(ids, numbers)
        dense = np.log1p(np.maximum(found[:, 1 : 1 + DENSE], 0).astype(np.float32))
        return {"label": found[:, 0].copy(), "dense": dense, "ids": ids}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def _check(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        outside = (ids < 0) | (ids >= np.array(self.rows))
        if outside.any():
            example, column = map(int, np.argwhere(outside)[0])
            raise DataError(
                f"{self.parts[0].parent}: field {column + 1} of example {int(numbers[example]):,} has id "
                f"{ids[example, column]}, outside its {self.rows[column]:,} rows. Prepare the records anew."
            )

    @cached_property
    def _maps(self) -> list[np.ndarray]:
        return [np.memmap(part, np.int32, "r").reshape(-1, COLUMNS) for part in self.parts]

    @cached_property
    def ends(self) -> np.ndarray:
        """Examples up to the end of each part."""
        return np.cumsum([part.stat().st_size // RECORD_BYTES for part in self.parts])


@dataclass(frozen=True)
class Clicks:
    """The click records in a folder, as `multipod clicks` wrote them, split by days.

    All days but the last are to learn from. The last is cut in two: the first half is the test set (of an odd number,
    the larger half), the second the validation set, as in DLRM's own code.

    Attributes:
      folder: with `clicks.json`.
      sets_tables: whether a model found with these records has tables of their `rows`, in place of its own; where the
        folder is not there yet, it keeps its own.
    """

    folder: str
    sets_tables: bool = False

    def train(self) -> ClickRecords:
        """All days but the last."""
        days = self.description["days"]
        return self._records(0, sum(days[:-1]))

    def test(self) -> ClickRecords:
        """The first half of the last day."""
        days = self.description["days"]
        return self._records(sum(days[:-1]), -(-days[-1] // 2))

    def validation(self) -> ClickRecords:
        """The second half of the last day."""
        days = self.description["days"]
        half = -(-days[-1] // 2)
        return self._records(sum(days[:-1]) + half, days[-1] - half)

    def ids_given(self) -> dict[str, IdRange]:
        """The ids of each field; nothing where the folder is not there yet."""
        return {"ids": IdRange(self.rows, "")} if self._is_here else {}

    def table_rows(self) -> tuple[int, ...]:
        """The rows that `clicks.json` says, if they are to be the model's."""
        return self.rows if self.sets_tables and self._is_here else ()

    def example(self) -> HostBatch:
        """An example's shapes and types."""
        return example_of_clicks(FIELDS)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each field's table: what a model of these records needs."""
        return tuple(self.description["rows"])

    @cached_property
    def description(self) -> dict[str, Any]:
        """What `clicks.json` says.

        Raises:
          DataError: there is none, it is of another format, or a part is missing or truncated.
        """
        return read_description(Path(self.folder))

    @property
    def _is_here(self) -> bool:
        return (Path(self.folder) / DESCRIPTION).is_file()

    def _records(self, first: int, count: int) -> ClickRecords:
        folder = Path(self.folder)
        if count < 1:
            raise DataError(f"{folder}: there is nothing to read in this split of days {self.description['days']}.")
        parts = tuple(folder / name for name in self.description["parts"])
        return ClickRecords(parts, self.rows, first, count)


def example_of_clicks(ids: int) -> HostBatch:
    """One example with so many ids, all zero: for its shapes and types."""
    dense, own = np.zeros((1, DENSE), np.float32), np.zeros((1, ids), np.int32)
    return {"label": np.zeros(1, np.int32), "dense": dense, "ids": own}


def read_description(folder: Path) -> dict[str, Any]:
    """`clicks.json` of a folder, its parts checked for their sizes; see `Clicks.description`."""
    refuse_address(str(folder))
    try:
        found = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} has no readable {DESCRIPTION} ({error}). Prepare the records with `multipod clicks`."
        ) from error
    if found.get("format") != FORMAT:
        raise DataError(f"{folder}/{DESCRIPTION} is of format {found.get('format')!r}, not {FORMAT}. Prepare it anew.")
    wrong = []
    for name, count in found["parts"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != count * RECORD_BYTES:
            what = "is missing" if size < 0 else f"has {size:,} bytes, not {count * RECORD_BYTES:,}"
            wrong.append(f"{name} {what}")
    if wrong:
        raise DataError(f"{folder}: {'; '.join(wrong)}. Copy it again, or prepare the records anew.")
    return found


def write_description(
    folder: Path, parts: dict[str, int], days: Sequence[int], rows: Sequence[int], **more: Any
) -> None:
    """Writes `clicks.json` whole or not at all."""
    value = {"format": FORMAT, "days": list(days), "rows": list(rows), "parts": parts, "fields": FIELDS} | more
    made = folder / f".{DESCRIPTION}"
    made.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    made.replace(folder / DESCRIPTION)
