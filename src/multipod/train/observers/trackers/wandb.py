"""Weights & Biases. `WANDB_MODE=offline` and its other variables and settings hold; `wandb sync` uploads later."""

import uuid
from collections.abc import Sequence
from typing import Any

from multipod.train.observers.trackers.tracker import PROJECT, Row, TrackedRun


class WandbRun:
    """A run of wandb, with `update` as the x-axis of all charts: wandb's own step could not go back to a checkpoint."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The id by which it is resumed."""
        return str(self._run.id)

    def log(self, rows: Sequence[Row]) -> None:
        """Logs a row of history for each."""
        for update, values in rows:
            self._run.log({**values, "update": update})

    def finish(self, ended: bool) -> None:
        """Waits for what is not yet uploaded; a failed run ends with exit code 1."""
        self._run.finish(exit_code=0 if ended else 1)


def open_wandb(run: TrackedRun) -> WandbRun:
    """Opens a run in the project of wandb's own settings, or in `PROJECT`; its files lie in the run's folder."""
    import wandb

    opened = wandb.init(
        project=wandb.setup().settings.project or PROJECT,
        dir=run.folder,
        id=run.known or uuid.uuid4().hex[:16],
        name=run.name,
        config=dict(run.config),
        allow_val_change=True,
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(console="off"),  # our terminal is not its to capture
    )
    opened.define_metric("update")
    opened.define_metric("*", step_metric="update")
    return WandbRun(opened)
