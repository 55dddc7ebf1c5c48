"""Criteo's text files to click records: streaming, in bounded memory, and resumable.

The text is read in chunks, each parsed at once. Every `part_lines` lines a part is written and renamed, then
`progress.json`, so that a run that was interrupted (Ctrl-C, a full disk, a crash) goes on behind its last part
when it is started again with the same arguments. Files ending in .gz are decompressed as they are read.

Ids of a field, of which there may be billions of values, become rows of a table in one of three ways:

- `hash`: a multiplicative hash of the value, scaled to the table's rows;
- `modulo`: the value modulo the table's rows, as MLPerf's own preparation begins;
- `frequent`: values seen `threshold` times or more get rows of their own, in the order in which they first come, until
  the table is full; row 0 is for all others. Takes a pass of its own, which counts in a sketch of fixed size: 4 MiB for
  each field, counts too high for a few values and never too low (Cormode and Muthukrishnan, 2005: count-min).
"""

import contextlib
import errno
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from multipod.data.clicks.records import write_description
from multipod.data.clicks.text import COLUMNS, FIELDS, REASONS, Lines, parse
from multipod.errors import DataError

Ids = Literal["hash", "modulo", "frequent"]
Report = Callable[[str, int, int], None]
"""Takes what is going on, the bytes done and all bytes of the files."""

PROGRESS = "progress.json"
CHUNK = 8 << 20
NAMED = 20
SKETCH = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How text becomes records; part of what a resumed run must have the same.

    Attributes:
      files: the text files, one a day; or one, which is cut into `days`.
      rows: of each of the 26 tables.
      ids: see the module.
      threshold: of `frequent`.
      days: that a single file is cut into.
      bad_share: the largest share of malformed lines; more stop the run, after the first thousand lines and at the end.
      part_lines: lines in a part.
    """

    files: tuple[str, ...]
    rows: tuple[int, ...]
    ids: Ids = "hash"
    threshold: int = 8
    days: int = 7
    bad_share: float = 0.001
    part_lines: int = 1_000_000

    def __post_init__(self) -> None:
        wrong = []
        if not self.files:
            wrong.append("no files")
        if len(self.rows) != FIELDS or min(self.rows, default=0) < 2 or max(self.rows, default=0) >= 2**31:
            wrong.append(f"rows are {len(self.rows)} numbers, not {FIELDS} from 2 to 2^31 - 1")
        least = {"threshold": 1, "days": 2, "part_lines": 1}
        wrong += [
            f"{name}={getattr(self, name)} (at least {n})" for name, n in least.items() if getattr(self, name) < n
        ]
        if not 0 <= self.bad_share <= 1:
            wrong.append(f"bad_share={self.bad_share} is no share, 0 to 1")
        missing = [name for name in self.files if not Path(name).is_file()]
        if missing:
            wrong.append(f"there is no file {', '.join(missing)}")
        if wrong:
            raise DataError(f"clicks: {'; '.join(wrong)}. Change the arguments.")


@dataclass
class Progress:
    """Where a run is: lines of `file` up to byte `offset` of its text are in the parts.

    Attributes:
      pass_: "count" (of `frequent`) or "write".
      lines: read in this pass, over all files.
      malformed: of these.
      named: the first malformed lines, as `file:line: reason`.
      parts: records in each part, by name.
      days: records of each file.
    """

    pass_: str
    file: int = 0
    offset: int = 0
    file_lines: int = 0
    lines: int = 0
    malformed: int = 0
    named: list[str] | None = None
    parts: dict[str, int] | None = None
    days: list[int] | None = None


def prepare(settings: Settings, folder: Path, report: Report = lambda what, done, total: None) -> dict[str, int]:
    """Writes the records of the files to `folder`, or goes on with it. Returns `examples`, `lines` and `malformed`.

    Raises:
      DataError: files or arguments that cannot be, too many malformed lines (the first are named), a compressed file
        that ends early, a folder of other settings, or a full disk; what is done by then is kept.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        progress = _resumed(settings, folder)
        mapping = _mapping(settings, folder)
        if progress.pass_ == "count":
            assert isinstance(mapping, _Frequent)
            _count(settings, folder, progress, mapping, report)
            progress = Progress("write", named=[], parts={}, days=[0] * len(settings.files))
            _save(settings, folder, progress, mapping)
        _write(settings, folder, progress, mapping, report)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"{folder}: {error.strerror}. Make room and start the same command again: it goes on behind the last part."
        ) from error
    days = progress.days or []
    if len(days) == 1:
        days = [len(part) for part in np.array_split(np.arange(days[0]), settings.days)]
    found = {"examples": sum(days), "lines": progress.lines, "malformed": progress.malformed}
    used = mapping.used(settings)
    write_description(
        folder, progress.parts or {}, days, used, **found, named=progress.named, settings=_plain(settings)
    )
    for left in (PROGRESS, _Frequent.SKETCH_FILE, _Frequent.ROWS_FILE):
        (folder / left).unlink(missing_ok=True)
    return found


def _count(settings: Settings, folder: Path, progress: Progress, mapping: "_Frequent", report: Report) -> None:
    """The first pass of `frequent`: how often each value comes."""
    for lines in _lines(settings, progress, report, "counting"):
        mapping.count(lines.fields)
        if progress.lines // settings.part_lines != (progress.lines - len(lines)) // settings.part_lines:
            _save(settings, folder, progress, mapping)


def _write(settings: Settings, folder: Path, progress: Progress, mapping: "_Mapping", report: Report) -> None:
    """The pass that writes the parts."""
    waiting: list[np.ndarray] = []
    day = progress.file
    assert progress.parts is not None
    assert progress.days is not None

    def flush() -> None:
        records = np.concatenate(waiting) if waiting else np.empty((0, COLUMNS), np.int32)
        waiting.clear()
        if len(records):
            _write_part(folder, progress, records)
        _save(settings, folder, progress, mapping)

    for lines in _lines(settings, progress, report, "writing"):
        if len(lines.labels):
            ids = mapping.ids(lines.fields)
            waiting.append(np.concatenate([lines.labels[:, None], lines.counts, ids], 1, dtype=np.int32))
        day = progress.file
        progress.days[day] += len(lines.labels)
        if sum(map(len, waiting)) >= settings.part_lines:
            flush()
    flush()


def _write_part(folder: Path, progress: Progress, records: np.ndarray) -> None:
    assert progress.parts is not None
    name = f"part-{len(progress.parts):05}.bin"
    made = folder / f".{name}"
    try:
        with made.open("wb") as file:
            file.write(records.tobytes())
    except OSError:
        made.unlink(missing_ok=True)
        raise
    made.replace(folder / name)
    progress.parts[name] = len(records)


def _lines(settings: Settings, progress: Progress, report: Report, what: str) -> Iterator[Lines]:
    """The parsed chunks of all files from where `progress` is, which follows them; malformed lines are counted."""
    sizes = [Path(name).stat().st_size for name in settings.files]
    while progress.file < len(settings.files):
        path = Path(settings.files[progress.file])
        with _opened(path) as (text, raw):
            _skip(text, progress.offset)
            for chunk, taken in _chunks(text, path):
                lines = parse(chunk)
                _note(settings, progress, lines, path)
                progress.offset += taken
                progress.file_lines += len(lines)
                progress.lines += len(lines)
                yield lines
                report(what, sum(sizes[: progress.file]) + raw.tell(), sum(sizes))
        if progress.file + 1 == len(settings.files):
            break
        progress.file, progress.offset, progress.file_lines = progress.file + 1, 0, 0
    _judge(settings, progress, least=1)


def _note(settings: Settings, progress: Progress, lines: Lines, path: Path) -> None:
    wrong = np.flatnonzero(lines.codes)
    named = progress.named if progress.named is not None else []
    for place in wrong[: NAMED - len(named)]:
        named.append(f"{path}:{progress.file_lines + int(place) + 1}: {REASONS[lines.codes[place]]}")
    progress.named = named
    progress.malformed += len(wrong)
    _judge(settings, progress, least=1000, more=len(lines))


def _judge(settings: Settings, progress: Progress, least: int, more: int = 0) -> None:
    read = progress.lines + more
    if read >= least and progress.malformed > settings.bad_share * read:
        shown = "\n  ".join(progress.named or [])
        raise DataError(
            f"clicks: {progress.malformed:,} of {read:,} lines are malformed, more than {settings.bad_share:.2%}. The "
            f"first are\n  {shown}\nMend the files, or allow a larger share of malformed lines."
        )
    if not read:
        raise DataError(f"clicks: {', '.join(settings.files)} have no lines. Give files with text.")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The text of a file, and the file itself, whose position tells how far the reading is."""
    with path.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not compressed:
            yield raw, raw
            return
        with gzip.GzipFile(fileobj=raw) as text:
            yield text, raw  # type: ignore[misc]


def _skip(text: IO[bytes], offset: int) -> None:
    """Moves to byte `offset`; a compressed file is read up to there."""
    text.seek(offset)


def _chunks(text: IO[bytes], path: Path) -> Iterator[tuple[bytes, int]]:
    """Whole lines, about `CHUNK` bytes at a time, and the bytes of the file in them.

    A line without end is cut there, so that garbage takes no memory.
    """
    rest = b""
    while True:
        try:
            block = text.read(CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path} is damaged or ends early: {error}. Copy it again and start the same command: it goes on "
                "behind the last part."
            ) from error
        if not block:
            break
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end], len(rest) + end
            rest = block[end:]
        elif len(rest) + len(block) > CHUNK:
            yield rest + block + b"\n", len(rest) + len(block)
            rest = b""
        else:
            rest += block
    if rest:
        yield rest + b"\n", len(rest)  # the last line had no end


class _Mapping:
    """From values to rows, without memory of what came before."""

    def __init__(self, settings: Settings) -> None:
        self.rows = np.array(settings.rows, np.uint64)
        self.modulo = settings.ids == "modulo"

    def ids(self, fields: np.ndarray) -> np.ndarray:
        """The rows of values uint32 [n, 26], int32."""
        values = fields.astype(np.uint64)
        if self.modulo:
            return (values % self.rows).astype(np.int32)
        return ((_mixed(values) * self.rows) >> np.uint64(32)).astype(np.int32)

    def used(self, settings: Settings) -> tuple[int, ...]:
        """Rows of each table."""
        return settings.rows

    def save(self, folder: Path) -> None:
        """Nothing to save."""


class _Frequent(_Mapping):
    """Counts values in a sketch, then gives the frequent ones rows as they come."""

    SKETCH_FILE, ROWS_FILE = "sketch.npy", "rows.npz"

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings)
        self.threshold = settings.threshold
        sketch, rows = folder / self.SKETCH_FILE, folder / self.ROWS_FILE
        # Two rows of counters of 16 bits; the least of a value's two is its count, or more.
        self.sketch = np.load(sketch) if sketch.exists() else np.zeros((FIELDS, 2, SKETCH), np.uint16)
        self.known: list[dict[int, int]] = [{} for _ in range(FIELDS)]
        if rows.exists():
            with np.load(rows) as stored:
                for field in range(FIELDS):
                    self.known[field] = {int(value): row for row, value in enumerate(stored[str(field)], 1)}

    def _places(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = values.astype(np.uint64)
        mixed = _mixed(wide)
        return mixed % SKETCH, _mixed(wide ^ np.uint64(0x5BD1E995)) % SKETCH

    def count(self, fields: np.ndarray) -> None:
        """Counts values uint32 [n, 26]."""
        for field in range(FIELDS):
            values, times = np.unique(fields[:, field], return_counts=True)
            for counters, places in zip(self.sketch[field], self._places(values), strict=True):
                sums = counters.astype(np.int64)
                np.add.at(sums, places, times)
                counters[:] = np.minimum(sums, 65535)

    def ids(self, fields: np.ndarray) -> np.ndarray:
        """The rows of values; new frequent ones get the next free row."""
        found = np.zeros(fields.shape, np.int32)
        for field, known in enumerate(self.known):
            values, first, inverse = np.unique(fields[:, field], return_index=True, return_inverse=True)
            one, two = self._places(values)
            counts = np.minimum(self.sketch[field][0][one], self.sketch[field][1][two])
            rows = np.array([known.get(int(value), 0) for value in values], np.int32)
            fresh = np.flatnonzero((rows == 0) & (counts >= self.threshold))
            for place in fresh[np.argsort(first[fresh])]:
                if len(known) + 1 >= self.rows[field]:
                    break
                rows[place] = known[int(values[place])] = len(known) + 1
            found[:, field] = rows[inverse.reshape(-1)]
        return found

    def used(self, settings: Settings) -> tuple[int, ...]:
        """Rows in use, and row 0."""
        return tuple(max(len(known) + 1, 2) for known in self.known)

    def save(self, folder: Path) -> None:
        """Writes the sketch and the rows beside the parts."""
        for name, write in ((self.SKETCH_FILE, self._write_sketch), (self.ROWS_FILE, self._write_rows)):
            made = folder / f".{name}"
            with made.open("wb") as file:
                write(file)
            made.replace(folder / name)

    def _write_sketch(self, file: IO[bytes]) -> None:
        np.save(file, self.sketch)

    def _write_rows(self, file: IO[bytes]) -> None:
        arrays = {str(f): np.fromiter(known, np.uint32, len(known)) for f, known in enumerate(self.known)}
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _mixed(values: np.ndarray) -> np.ndarray:
    """Values below 2^32, uint64, mixed so that every bit depends on all (Murmur3's finalizer)."""
    mask = np.uint64(0xFFFFFFFF)
    values = ((values ^ (values >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & mask
    values = ((values ^ (values >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & mask
    return values ^ (values >> np.uint64(16))


def _mapping(settings: Settings, folder: Path) -> _Mapping:
    return _Frequent(settings, folder) if settings.ids == "frequent" else _Mapping(settings)


def _plain(settings: Settings) -> dict[str, object]:
    return json.loads(json.dumps(asdict(settings)))


def _resumed(settings: Settings, folder: Path) -> Progress:
    """Where an earlier run stopped, or the start."""
    path = folder / PROGRESS
    if (folder / "clicks.json").exists():
        raise DataError(f"{folder} holds finished records already. Choose another folder, or remove it.")
    if not path.exists():
        for stale in (_Frequent.SKETCH_FILE, _Frequent.ROWS_FILE):
            (folder / stale).unlink(missing_ok=True)
        first = "count" if settings.ids == "frequent" else "write"
        return Progress(first, named=[], parts={}, days=[0] * len(settings.files))
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["settings"] != _plain(settings):
        changed = [name for name, value in _plain(settings).items() if stored["settings"].get(name) != value]
        raise DataError(
            f"{folder} was begun with other arguments: {', '.join(changed)}. Go on with the "
            "same, or choose another folder."
        )
    return Progress(**stored["progress"])


def _save(settings: Settings, folder: Path, progress: Progress, mapping: _Mapping) -> None:
    mapping.save(folder)
    made = folder / f".{PROGRESS}"
    made.write_text(json.dumps({"settings": _plain(settings), "progress": asdict(progress)}), encoding="utf-8")
    made.replace(folder / PROGRESS)


def default_rows(rows: Sequence[int]) -> tuple[int, ...]:
    """The table rows of each field: one number for all, or 26."""
    return tuple(rows) * FIELDS if len(rows) == 1 else tuple(rows)
