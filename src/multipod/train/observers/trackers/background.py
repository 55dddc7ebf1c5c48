"""The observer behind every experiment tracker: it tells events in a thread of its own, and never stops the run."""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multipod.errors import first_line
from multipod.train.events import Ended, Event
from multipod.train.observers.scalars import scalars
from multipod.train.observers.trackers.tracker import OpenTracker, Row, TrackedRun, Tracker

IDS = "trackers.json"
"""The file in a run's folder that says which run of each tracker is this one's."""

WAITING_ROWS = 100_000
"""Rows that may wait for a service that does not answer; what comes then is lost to it."""

AT_ONCE = 200
"""The most rows that are handed over in one call."""

LAST_S = 30.0
"""How long the end of a run waits for a tracker."""


@dataclass(frozen=True)
class _Finish:
    """The last entry of the queue."""

    ended: bool


class _GivenUp(Exception):
    """The tracker was given up while it was busy."""


def say(line: str) -> None:
    """Prints a warning, also where a run is quiet."""
    print(f"multipod: {line}", file=sys.stderr, flush=True)


class InBackground:
    """Tells a tracker the numbers of each event, from a thread.

    The tracker is opened in that thread too, so a service that is slow or gone holds no update up. What it raises is
    said once, with the name; from then on it is told no more, and training goes on. At the end the run waits for it,
    for `last_s` at most.

    Args:
      name: of the tracker, for messages.
      open_tracker: opens the run there.
      folder: the run's folder, which keeps the tracker's id of the run.
      config: the recipe's values.
      warn: is told what went wrong.
      last_s: how long `close` waits, in seconds.
    """

    def __init__(
        self,
        name: str,
        open_tracker: OpenTracker,
        folder: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None] = say,
        last_s: float = LAST_S,
    ) -> None:
        self._name, self._open, self._warn, self._last_s = name, open_tracker, warn, last_s
        self._folder, self._config = folder, config
        self._queue: queue.Queue[Row | _Finish] = queue.Queue(WAITING_ROWS)
        self._lost = self._ended = False
        self._losing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"multipod --log {name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Puts the event's numbers behind those that wait."""
        self._ended = self._ended or isinstance(event, Ended)
        values = scalars(event)
        if not values or self._lost:
            return
        try:
            self._queue.put_nowait((getattr(event, "update", 0), values))
        except queue.Full:
            self._lose(f"it has not answered while {WAITING_ROWS:,} rows came")

    def close(self) -> None:
        """Hands over what waits and ends the tracker's run; gives up after a while. Later calls do nothing."""
        if not self._thread.is_alive():
            return
        with suppress(queue.Full):
            self._queue.put_nowait(_Finish(self._ended))
        self._thread.join(self._last_s)
        if self._thread.is_alive():
            self._lose(f"it has not taken the last numbers within {self._last_s:g} s")

    def _run(self) -> None:
        try:
            with suppress(_GivenUp):
                known = known_ids(self._folder).get(self._name, "")
                tracker = self._open(TrackedRun(self._folder, self._config, known))
                remember_id(self._folder, self._name, tracker.id)
                while (finish := self._hand_over(tracker)) is None:
                    pass
                tracker.finish(finish.ended)
        except Exception as error:
            self._lose(f"{type(error).__name__}: {first_line(error)}")

    def _hand_over(self, tracker: Tracker) -> _Finish | None:
        """Waits for rows and hands over those that are there; returns the end if it came."""
        rows: list[Row] = []
        entry: Row | _Finish | None = self._queue.get()
        while entry is not None and not isinstance(entry, _Finish):
            rows.append(entry)
            entry = self._next() if len(rows) < AT_ONCE else None
        if self._lost:
            raise _GivenUp
        tracker.log(rows)
        return entry

    def _next(self) -> Row | _Finish | None:
        """What waits next; None if nothing does."""
        with suppress(queue.Empty):
            return self._queue.get_nowait()
        return None

    def _lose(self, reason: str) -> None:
        """Says once that the tracker is lost."""
        with self._losing:
            if self._lost:
                return
            self._lost = True
        self._warn(f"--log {self._name}: {reason}. It is told no more of this run; training goes on, and "
                   "metrics.jsonl in the run's folder has all numbers.")  # fmt: skip


def known_ids(folder: Path) -> dict[str, str]:
    """Returns the ids of this run at the trackers that it was told to; none where there is no such file."""
    with suppress(OSError, ValueError):
        known = json.loads((folder / IDS).read_text())
        return {str(name): str(known_id) for name, known_id in known.items()}
    return {}


_writing = threading.Lock()
"""Several trackers open at the same time, and write one file."""


def remember_id(folder: Path, name: str, tracker_id: str) -> None:
    """Writes down the id of this run at a tracker.

    Raises:
      OSError: it cannot be written.
    """
    with _writing:
        beside = folder / f".{IDS}.partial"
        beside.write_text(json.dumps(known_ids(folder) | {name: tracker_id}, indent=1) + "\n")
        os.replace(beside, folder / IDS)
