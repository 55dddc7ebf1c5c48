"""What a recipe may say and the step of whole models has no way for."""

import math
from collections.abc import Callable

from multipod.errors import LayoutError
from multipod.recipe.recipe import Recipe


def check_step(recipe: Recipe, rows: Callable[[], int]) -> None:
    """Refuses it; `rows()` of a batch are on each device.

    Raises:
      LayoutError: names the fields.
    """
    layout = recipe.layout
    if layout.stage > 1:
        raise LayoutError(
            f"layout.stage={layout.stage}: what was asked for works on whole models, which have no stages. Set it to 1."
        )
    if layout.shard_weights and getattr(recipe.optimizer, "clip_before_sum", False):
        raise LayoutError(
            "layout.shard_weights sums gradients where they are made, so clip_before_sum has none to clip. "
            "Set one of them to false."
        )
    if recipe.accumulate > 1 and rows() % recipe.accumulate:
        raise LayoutError(
            f"accumulate={recipe.accumulate} does not divide the {rows()} rows of a device. Take "
            f"{math.gcd(rows(), recipe.accumulate)}, or another batch."
        )
