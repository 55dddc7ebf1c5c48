"""The observers that a run can have, by name. Another one is a file here and a line in `OBSERVERS`."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from multipod.errors import RunFolderError
from multipod.extras import has_extra, packages_of, require
from multipod.mlperf.lines import FILE as MLPERF_LOG
from multipod.train.events import Event, EventSink, Observer
from multipod.train.observers.csv import CsvTable
from multipod.train.observers.jsonl import JsonLines
from multipod.train.observers.progress import make_progress
from multipod.train.observers.summary import Summary
from multipod.train.observers.trackers.background import InBackground
from multipod.train.observers.trackers.table import TRACKERS
from multipod.train.observers.trackers.tracker import OpenTracker

if TYPE_CHECKING:
    from multipod.recipe.recipe import Recipe
    from multipod.train.run_folder import RunFolder  # which imports JAX, and commands that list loggers do not


@dataclass(frozen=True)
class ObservedRun:
    """What an observer is made for.

    Attributes:
      folder: the run's folder.
      console: where it prints.
      recipe: what is run; None for observers that are to print alone.
    """

    folder: "RunFolder"
    console: Console
    recipe: "Recipe | None" = None


def _tensorboard(run: ObservedRun) -> Observer:
    """Scalars for TensorBoard."""
    from multipod.train.observers.tensorboard import TensorBoard  # which imports PyTorch where there is one: seconds

    return TensorBoard(run.folder.tensorboard)


def _mlperf(run: ObservedRun) -> Observer:
    """The log of an MLPerf run."""
    from multipod.train.observers.mlperf import MlperfLog  # which imports JAX with the models

    assert run.recipe is not None  # it does not only print
    return MlperfLog(run.folder.path / MLPERF_LOG, run.recipe)


def _tracked(name: str, open_tracker: OpenTracker) -> Callable[[ObservedRun], Observer]:
    """What makes the observer of an experiment tracker."""

    def make(run: ObservedRun) -> Observer:
        from multipod.recipe.text import flat_fields, to_text  # which imports JAX with the recipes' parts

        config = {} if run.recipe is None else flat_fields(to_text(run.recipe))
        return InBackground(name, open_tracker, run.folder.path, config)

    return make


MLPERF = "mlperf"
"""The observer that only runs of MLPerf's benchmarks can have."""

OBSERVERS: dict[str, Callable[[ObservedRun], Observer]] = {
    "jsonl": lambda run: JsonLines(run.folder.metrics),
    "tensorboard": _tensorboard,
    MLPERF: _mlperf,
    "csv": lambda run: CsvTable(run.folder.path / "metrics.csv"),
    **{name: _tracked(name, open_tracker) for name, open_tracker in TRACKERS.items()},
    "progress": lambda run: make_progress(run.console),
    "summary": lambda run: Summary(run.console, run.folder.path),
}
"""How each observer is made, in the order in which they are told and closed last to first."""

FILES = ("jsonl", "tensorboard")
"""What every run has, the second where its extra is installed: `--resume` and the report read the first."""

PRINTED = ("progress", "summary")
"""What a run has besides, unless it is to be quiet."""


def names_in(texts: Iterable[str]) -> tuple[str, ...]:
    """The names that `--log` was given: several may stand in one text, with commas between them."""
    return tuple(name for text in texts for part in text.split(",") if (name := part.strip()))


def files_of_runs() -> list[str]:
    """The observers of `FILES` whose packages are installed."""
    return [name for name in FILES if has_extra(name)]


def make_observers(run: ObservedRun, names: Iterable[str]) -> list[Observer]:
    """The observers of these names, each once; whoever asks for them closes them.

    Raises:
      RunFolderError: there is no observer of a name.
      MissingPackageError: the package of one is not installed.
      OSError: a file cannot be opened.
    """
    wanted = list(dict.fromkeys(names))
    refuse_observers(wanted)
    return [OBSERVERS[name](run) for name in wanted]


def refuse_observers(names: Iterable[str]) -> None:
    """Refuses names that stand for no observer, or for one whose package is not installed.

    Raises:
      RunFolderError: with the nearest name, and all there are.
      MissingPackageError: with the extra to install, which has the name of its observer.
    """
    wanted = list(names)
    for name in wanted:
        if name not in OBSERVERS:
            near = difflib.get_close_matches(name, OBSERVERS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise RunFolderError(f"--log {name}: there is no such logger.{hint} Known: {', '.join(OBSERVERS)}.")
    require(f"--log {','.join(wanted)}", *(package for name in wanted for package in packages_of(name)))


class CallOnly:
    """An observer of a function that has nothing to close."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink

    def __call__(self, event: Event) -> None:
        """Passes the event on."""
        self._sink(event)

    def close(self) -> None:
        """Does nothing."""


def as_observer(sink: EventSink) -> Observer:
    """The sink itself if it can be closed; else an observer that passes events on to it."""
    return sink if isinstance(sink, Observer) else CallOnly(sink)
