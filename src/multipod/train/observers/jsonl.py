"""Events as lines of JSON, and the way back."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from multipod.errors import RunFolderError
from multipod.train.events import (
    BadUpdate,
    Compiled,
    Ended,
    Evaluated,
    Event,
    Regrouped,
    Saved,
    SaveFailed,
    Skipped,
    Started,
    Updated,
)

FLUSH_S = 1.0
WAITING_BYTES = 64 << 20
"""Most bytes of lines that wait for a disk that refuses them."""

_KINDS: dict[str, type[Event]] = {
    "started": Started,
    "compiled": Compiled,
    "updated": Updated,
    "evaluated": Evaluated,
    "skipped": Skipped,
    "saved": Saved,
    "savefailed": SaveFailed,
    "troubled": BadUpdate,
    "regrouped": Regrouped,
    "ended": Ended,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_FLOATS = {  # the fields in which null stands for NaN; elsewhere it is None
    kind: {field.name for field in fields(kind) if field.type in (float, dict[str, float])} for kind in _KINDS.values()
}


class JsonLines:
    """Appends each event to `path` as one line: {"event": "updated", ...its fields}.

    Numbers that JSON does not have (NaN and the infinities) are written as null. What is written
    reaches the file about each second, and with each `Evaluated`, `Saved` and `Ended`. The end of a
    line that a crash cut short is removed on opening, so that the next line starts on its own.

    A disk that refuses for a while loses nothing: lines wait in memory, up to `WAITING_BYTES`, and are tried again
    with the next flush. Only `close` gives up.

    Raises:
      OSError: the file cannot be opened; from `close`, that it could not be written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic):
        self._file: BinaryIO = open(path, "ab+", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._clock = clock
        self._flushed = clock()
        self._waiting = bytearray()
        _remove_cut_line(self._file)

    def __call__(self, event: Event) -> None:
        """Writes one event."""
        self._waiting += encode(event)
        if isinstance(event, Evaluated | Saved | Regrouped | Ended) or self._clock() - self._flushed >= FLUSH_S:
            with contextlib.suppress(OSError):
                self._flush()
            self._flushed = self._clock()
            if len(self._waiting) > WAITING_BYTES:
                self._flush()

    def _flush(self) -> None:
        while self._waiting:
            written = self._file.write(self._waiting)  # may be a part: the rest follows when there is room
            del self._waiting[:written]

    def close(self) -> None:
        """Writes what is left and closes the file; later calls do nothing."""
        if self._file.closed:
            return
        try:
            self._flush()
        finally:
            self._file.close()


def encode(event: Event) -> bytes:
    """One line, with its newline."""
    # msgspec writes NaN and infinities as null, as a test of ours holds it to.
    return msgspec.json.encode({"event": _NAMES[type(event)], **vars(event)}) + b"\n"


def decode(record: dict[str, Any]) -> Event | None:
    """The event that `record` was made from, null numbers as NaN; None for a kind that is not known here.

    Raises:
      ValueError: a field is missing or of the wrong type.
    """
    kind = _KINDS.get(record["event"])
    if kind is None:
        return None
    floats = _FLOATS[kind]
    return msgspec.convert({name: _nan(value) if name in floats else value for name, value in record.items()}, kind)


def _nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nan(inner) for name, inner in value.items()}
    return float("nan") if value is None else value


def read(path: Path) -> list[dict[str, Any]]:
    """All events of the file in order, without a last line that a crash cut short: it has no newline.

    Raises:
      RunFolderError: the file is missing, cannot be read, or another line is not an event.
    """
    return [record for _, record in _lines(path)]


def keep_until(path: Path, update: int, again: Sequence[str] = ()) -> None:
    """Removes what happened after `update` updates, and every `Ended`: a run that goes on adds its own.

    Events of the kinds `again` at that update go too: they will be told again.

    The file is replaced in one move: a crash leaves the old one or the new one. A missing file stays missing.

    Raises:
      RunFolderError: a line is not an event.
      OSError: the new file cannot be written; the old one is as it was.
    """
    if path.exists():
        kept = (
            line
            for line, record in _lines(path)
            if record["event"] == "regrouped"  # time that is lost stays lost
            or (
                record["event"] != "ended"
                and record.get("update", 0) <= update
                and not (record["event"] in again and record["update"] == update)
            )
        )
        replace_file(path, b"".join(kept))


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` to `path` in one move: readers see the old file or the new one, never a part.

    Raises:
      OSError: the disk is full or the folder cannot be written; the old file is as it was.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power failure could keep the move and lose the content
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be read ({error.strerror}). Name the folder of a run that has started."
        ) from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield line, _record(path, number, line)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        record = error
    if isinstance(record, dict) and isinstance(record.get("event"), str) and isinstance(record.get("update", 0), int):
        return record
    raise RunFolderError(
        f"{path}, line {number}: not an event: {line[:60].decode(errors='replace').strip()!r}. "
        "Only a last line may be cut short; remove this line, or restore the file from a copy."
    )


def _remove_cut_line(file: BinaryIO, block_bytes: int = 65536) -> None:
    """Truncates the file after its last newline."""
    end = size = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block_bytes)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(0, os.SEEK_END)
