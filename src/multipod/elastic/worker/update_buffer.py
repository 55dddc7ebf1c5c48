"""What the process that writes `metrics.jsonl` may not have written when it dies: the others remember it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multipod.train.events import Updated
from multipod.train.observers import jsonl

KEPT_S = 3 * jsonl.FLUSH_S
FEW = 4


class UpdateBuffer:
    """The updates that a process saw done in the last `KEPT_S`, and a `FEW` at least."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Updated]] = deque()

    def add(self, event: Updated, now_s: float) -> None:
        """Remembers an update that was done at `now_s`."""
        self._seen.append((now_s, event))
        while len(self._seen) > FEW and now_s - self._seen[0][0] > KEPT_S:
            self._seen.popleft()

    def last_updates(self, all_of_them: bool) -> list[dict[str, Any]]:
        """Returns all updates as plain values, or the last `FEW`, in which one process may be ahead of another."""
        events = [asdict(event) for _, event in self._seen]
        return events if all_of_them else events[-FEW:]


def read_updates(events: Iterable[dict[str, Any]]) -> dict[int, Updated]:
    """The updates by number, from plain values that have been JSON, which has no NaN."""
    decoded = (jsonl.decode({"event": "updated", **event}) for event in events)
    return {event.update: event for event in decoded if isinstance(event, Updated)}


def append_missing(metrics: Path, recent: dict[int, Updated], update: int) -> None:
    """Adds to the file the updates up to this one that its last writer did not get to write."""
    if not metrics.exists():
        return
    there = [record["update"] for record in jsonl.read(metrics) if record["event"] == "updated"]
    missing = [recent[number] for number in sorted(recent) if max(there, default=0) < number <= update]
    if missing:
        with open(metrics, "ab") as file:
            file.writelines(map(jsonl.encode, missing))
