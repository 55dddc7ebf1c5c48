"""Means of sums, or an error that names the last good checkpoint where they are not finite."""

import math
from typing import Any

from multipod.errors import PoisonedError
from multipod.metrics.objective import Objective, report_of
from multipod.recipe.recipe import Recipe
from multipod.train.context import RunContext


def means_of_training(context: RunContext, recipe: Recipe, sums: dict[str, Any], update: int) -> dict[str, float]:
    """What is told of update number `update`, whose program could not undo it if it was bad (pipeline stages).

    Raises:
      PoisonedError: the loss is not finite, and the recipe does not say to ignore that; or see `means_of_update`.
    """
    values = means_of_update(context, recipe.objective, sums, update)
    if recipe.bad_updates.watches and not math.isfinite(values["loss"]):
        raise _with_checkpoint(
            context, update, "the loss is not finite: its batch has what is not finite, or the rate is too high"
        )
    return values


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
        raise _with_checkpoint(context, update, str(error).removesuffix(".")) from error


def _with_checkpoint(context: RunContext, update: int, what: str) -> PoisonedError:
    """An error that says what was found at an update, and where to go on."""
    good: list[int] = []
    if context.checkpoints is not None:
        context.checkpoints.wait()
        # What this update met may be what the one before it left behind, and a checkpoint may hold that.
        good = [number for number in context.checkpoints.updates() if number < update - 1]
    way = f"Go on from there with --resume {context.info.folder} --at {good[-1]}" if good else "Start again"
    return PoisonedError(f"update {update}: {what}. Last good checkpoint: {good[-1] if good else 'none'}. {way}.")
