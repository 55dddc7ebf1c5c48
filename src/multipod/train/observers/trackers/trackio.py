"""Trackio: a table in SQLite under `TRACKIO_DIR`, or a Space of Hugging Face's; `trackio show` draws it."""

import uuid
from collections.abc import Sequence
from typing import Any

from multipod.train.observers.trackers.tracker import PROJECT, Row, TrackedRun


class TrackioRun:
    """A run of Trackio, which resumes by name: the name is the id."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The run's name."""
        return str(self._run.name)

    def log(self, rows: Sequence[Row]) -> None:
        """Logs each row at its update."""
        for update, values in rows:
            self._run.log(dict(values), step=update)

    def finish(self, ended: bool) -> None:
        """Writes what waits. Trackio does not tell failed runs from others."""
        self._run.finish()


def open_trackio(run: TrackedRun) -> TrackioRun:
    """Opens a run in the project `PROJECT`, named by the folder and by what sets it apart from others of that name."""
    import trackio

    return TrackioRun(
        trackio.init(
            project=PROJECT,
            name=run.known or f"{run.name}-{uuid.uuid4().hex[:6]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
    )
