"""Lines of an MLPerf log, version 0.7 and later: `:::MLLOG {json}`, one an event."""

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec

from multipod.errors import MlperfError

TOKEN = ":::MLLOG "
FILE = "mllog.txt"
"""The log's name in a run's folder."""

Kind = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]


@dataclass(frozen=True)
class Line:
    """One event of a log.

    Attributes:
      key: what it tells.
      value: of any type that JSON has.
      time_ms: when, in milliseconds since 1970.
      metadata: `file` and `lineno`, the line of the program that tells it, and more.
    """

    key: str
    value: Any
    time_ms: int
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """Whether an interval begins or ends with it, as the key's ending says."""
        if self.key.endswith("_start"):
            return "INTERVAL_START"
        return "INTERVAL_END" if self.key.endswith("_stop") else "POINT_IN_TIME"

    def encode(self) -> str:
        """Returns its text, with its newline."""
        fields = {
            "namespace": "",
            "time_ms": self.time_ms,
            "event_type": self.kind,
            "key": self.key,
            "value": self.value,
            "metadata": self.metadata,
        }
        return TOKEN + msgspec.json.encode(fields).decode() + "\n"


def place_of_caller(frames: int = 1) -> dict[str, Any]:
    """Returns `file` and `lineno` of whoever called the caller, that many frames up."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(frames + 1):
        frame = frame.f_back if frame else None
    return {"file": Path(frame.f_code.co_filename).name, "lineno": frame.f_lineno} if frame else {}


def read_lines(path: Path) -> list[Line]:
    """Returns the events of a log in order, wherever in a line they begin; not a last line that was cut short.

    Raises:
      MlperfError: the file cannot be read, or a line is damaged.
    """
    try:
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise MlperfError(
            f"{path}: cannot be read ({error.strerror}). Train with --log mlperf, and name the run's folder."
        ) from error
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        found = re.search(f"{TOKEN}(.*)\n", line)
        if found is None:
            continue
        try:
            record = msgspec.json.decode(found[1])
            lines.append(Line(record["key"], record["value"], int(record["time_ms"]), record["metadata"]))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise MlperfError(f"{path}, line {number}: no event of MLPerf's: {found[1][:60]!r} ({error}).") from error
    return lines
