"""The experiment trackers that `--log` knows. Another one is a file here and a line in `TRACKERS`."""

from multipod.train.observers.trackers.comet import open_comet
from multipod.train.observers.trackers.mlflow import open_mlflow
from multipod.train.observers.trackers.tracker import OpenTracker
from multipod.train.observers.trackers.trackio import open_trackio
from multipod.train.observers.trackers.wandb import open_wandb

TRACKERS: dict[str, OpenTracker] = {
    "wandb": open_wandb,
    "trackio": open_trackio,
    "mlflow": open_mlflow,
    "comet": open_comet,
}
"""What opens a run at each tracker, by the name that `--log` takes, which is also that of the extra that it needs."""
