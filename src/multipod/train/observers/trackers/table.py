"""The experiment trackers that `--log` knows. Another one is a file here and a line in `TRACKERS`."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from multipod.errors import RunFolderError
from multipod.train.observers.trackers.comet import open_comet
from multipod.train.observers.trackers.mlflow import open_mlflow
from multipod.train.observers.trackers.tracker import OpenTracker
from multipod.train.observers.trackers.trackio import open_trackio
from multipod.train.observers.trackers.wandb import open_wandb


@dataclass(frozen=True)
class TrackerKind:
    """A tracker: the module that its package brings, and what opens a run there."""

    module: str
    open: OpenTracker


TRACKERS: dict[str, TrackerKind] = {
    "wandb": TrackerKind("wandb", open_wandb),
    "trackio": TrackerKind("trackio", open_trackio),
    "mlflow": TrackerKind("mlflow", open_mlflow),
    "comet": TrackerKind("comet_ml", open_comet),
}
"""Every tracker by the name that `--log` takes, which is also that of the extra that installs it."""


def refuse_missing_trackers(names: Iterable[str]) -> None:
    """Refuses trackers whose packages are not installed; names of others are passed over.

    Raises:
      RunFolderError: with what to install.
    """
    missing = [name for name in names if name in TRACKERS and find_spec(TRACKERS[name].module) is None]
    if missing:
        packages = ", ".join(TRACKERS[name].module for name in missing)
        raise RunFolderError(
            f"--log {','.join(missing)}: {packages} cannot be imported. "
            f"pip install 'multipod[{','.join(missing)}]' (or multipod[loggers], for all that --log knows)."
        )
