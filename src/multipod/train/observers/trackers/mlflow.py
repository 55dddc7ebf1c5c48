"""MLflow. `MLFLOW_TRACKING_URI` says where: a server, or a database such as sqlite:///mlflow.db, the default."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from multipod.train.observers.trackers.tracker import PROJECT, Row, TrackedRun

METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100
"""The most that MLflow takes in one request."""

LONGEST_VALUE = 6000
"""Characters of a parameter's value that MLflow keeps."""


class MlflowRun:
    """A run of MLflow, through its client alone: no active run of the user's is touched."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    @property
    def id(self) -> str:
        """The run's id."""
        return self._run_id

    def configure(self, config: Mapping[str, Any]) -> None:
        """Logs parameters. One that is there with another value cannot be changed: its new value becomes a tag."""
        from mlflow.entities import Param, RunTag

        there = self._client.get_run(self._run_id).data.params
        values = {name: str(value)[:LONGEST_VALUE] for name, value in config.items()}
        new = [Param(name, value) for name, value in values.items() if name not in there]
        changed = [RunTag(name, value) for name, value in values.items() if there.get(name, value) != value]
        for part in _parts(new, PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=part)
        for part in _parts(changed, PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, tags=part)

    def log(self, rows: Sequence[Row]) -> None:
        """Logs each number at its update, many in one request."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, update) for update, values in rows for name, value in values.items()]
        for part in _parts(metrics, METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=part)

    def finish(self, ended: bool) -> None:
        """Ends the run as FINISHED or FAILED."""
        self._client.set_terminated(self._run_id, "FINISHED" if ended else "FAILED")


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def open_mlflow(run: TrackedRun) -> MlflowRun:
    """Opens a run in the experiment that `MLFLOW_EXPERIMENT_NAME` names, or in `PROJECT`."""
    from mlflow import MlflowClient
    from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

    client = MlflowClient()
    if run.known:
        client.update_run(run.known, status="RUNNING")
        opened = MlflowRun(client, run.known)
    else:
        experiment = _experiment(client, MLFLOW_EXPERIMENT_NAME.get() or PROJECT)
        opened = MlflowRun(client, client.create_run(experiment, run_name=run.name).info.run_id)
    opened.configure(run.config)
    return opened


def _experiment(client: Any, name: str) -> str:
    """Returns the id of an experiment, made if there is none; another run may make it at the same time."""
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):
        if client.get_experiment_by_name(name) is None:
            client.create_experiment(name)
    return str(client.get_experiment_by_name(name).experiment_id)
