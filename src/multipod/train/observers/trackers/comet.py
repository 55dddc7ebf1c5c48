"""Comet. With `COMET_START_ONLINE=false` it writes archives into the run's folder, which `comet upload` sends later."""

import uuid
from collections.abc import Sequence
from typing import Any

from multipod.train.observers.trackers.tracker import PROJECT, Row, TrackedRun


class CometRun:
    """An experiment of Comet's."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    @property
    def id(self) -> str:
        """The experiment's key."""
        return str(self._experiment.get_key())

    def log(self, rows: Sequence[Row]) -> None:
        """Logs each row at its update."""
        for update, values in rows:
            self._experiment.log_metrics(dict(values), step=update)

    def finish(self, ended: bool) -> None:
        """Ends the experiment; one that failed is tagged so."""
        if not ended:
            self._experiment.add_tag("failed")
        self._experiment.end()


def open_comet(run: TrackedRun) -> CometRun:
    """Opens an experiment in the project of Comet's own settings, or in `PROJECT`, and watches nothing by itself."""
    import comet_ml

    experiment = comet_ml.start(
        project_name=comet_ml.get_config("comet.project_name") or PROJECT,
        experiment_key=run.known or uuid.uuid4().hex,
        mode="get_or_create",
        experiment_config=comet_ml.ExperimentConfig(
            name=run.name,
            offline_directory=str(run.folder / "comet"),
            auto_output_logging=False,
            auto_param_logging=False,
            auto_metric_logging=False,
            log_code=False,
            log_graph=False,
            log_git_metadata=False,
            log_git_patch=False,
            parse_args=False,
            display_summary_level=0,
        ),
    )
    experiment.log_parameters({name: str(value) for name, value in run.config.items()})
    return CometRun(experiment)
