"""What a run needs of an experiment tracker: one protocol, and what a tracker's run is opened with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROJECT = "multipod"
"""The project, or experiment, of runs whose user has not named one in the tracker's own settings."""

Row = tuple[int, Mapping[str, float]]
"""Updates done, and the numbers of an event after them (`scalars`)."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker's run is opened with.

    Attributes:
      folder: the run's folder; what a tracker writes without its service lies there.
      config: the recipe's values, by the names that `--set` takes.
      known: the id that this run had at the tracker before, to go on in it; empty for a new one.
    """

    folder: Path
    config: Mapping[str, Any]
    known: str = ""

    @property
    def name(self) -> str:
        """How a person recognises the run: its folder's name."""
        return self.folder.name


class Tracker(Protocol):
    """A run that is open at an experiment tracker. Whatever it raises is told once, and ends its part alone."""

    @property
    def id(self) -> str:
        """By which the same run is opened again."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Hands over the numbers of some events, in order."""
        ...

    def finish(self, ended: bool) -> None:
        """Ends the run there, as done or stopped on request if `ended`, else as failed."""
        ...


OpenTracker = Callable[[TrackedRun], Tracker]
"""Opens a run at a tracker; imports the tracker's package."""
