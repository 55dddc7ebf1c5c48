"""Means of sums, or an error that names the last good checkpoint where they are not finite."""

from typing import Any

from multipod.errors import PoisonedError
from multipod.metrics.objective import Objective, report_of
from multipod.train.context import RunContext


def means_of_update(context: RunContext, objective: Objective, sums: dict[str, Any], update: int) -> dict[str, float]:
    """What the objective makes of the sums of update number `update`, or of an evaluation after it.

    Raises:
      PoisonedError: the objective found what is not finite; names the update and the last checkpoint before it.
    """
    try:
        return report_of(objective, sums)
    except PoisonedError as error:
        if context.checkpoints is None:
            raise
        context.checkpoints.wait()
        # What this update met may be what the one before it left behind, and a checkpoint may hold that.
        good = [number for number in context.checkpoints.updates() if number < update - 1]
        way = f"Go on from there with --resume {context.info.folder} --at {good[-1]}" if good else "Start again"
        last = good[-1] if good else "none"
        raise PoisonedError(f"update {update}: {error} Last good checkpoint: {last}. {way}.") from error
