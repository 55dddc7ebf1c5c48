"""What a recipe may say and the step has no way for."""

import math
from collections.abc import Callable
from dataclasses import replace

from multipod.errors import LayoutError, RecipeError
from multipod.layout.compatible import LayoutUse, check_compatible
from multipod.nn.model import Rearranging
from multipod.optim.optimizer import clip_of
from multipod.recipe.recipe import Recipe
from multipod.step.agreement import check_ids


def layout_use(recipe: Recipe) -> LayoutUse:
    """The layout of a recipe with what else it asks for, for the table of what goes with what."""
    layout, optimizer = recipe.layout, recipe.optimizer
    return LayoutUse(
        layout.split,
        layout.pipeline,
        layout.sync,
        layout.failed,
        accumulate=recipe.accumulate,
        clip=clip_of(optimizer),
        clip_before_sum=getattr(optimizer, "clip_before_sum", False),
        sparse=getattr(optimizer, "sparse", False),
        bad_updates=recipe.bad_updates.action if recipe.bad_updates.needs_gradients else "",
        late_warmup=recipe.pipemare.warmup,
        layer_decay=getattr(optimizer, "layer_decay", None),
        ema=recipe.ema is not None,
    )


def check_recipe(recipe: Recipe, *, converts: bool = False) -> None:
    """Refuses what does not go with the layout of a recipe, and data that do not go with its model.

    converts: whether its state is taken over from another layout, or by one.

    Raises:
      RecipeError: the data have ids that the model has no place for (`multipod.step.agreement`).
      LayoutError: all that does not go with the layout, a line each.
    """
    check_ids(recipe)
    _check_average(recipe)
    check_compatible(replace(layout_use(recipe), converts=converts))


def _check_average(recipe: Recipe) -> None:
    """Refuses to average rows that are replaced between updates.

    Raises:
      RecipeError: names the model.
    """
    model = recipe.model
    if recipe.ema is not None and isinstance(model, Rearranging) and model.rearranged_params():
        raise RecipeError(
            f"recipe {recipe.name}: ema with {type(model).__name__}, which moves rows of its tables between updates: "
            "an average would mix rows. Set ema=none, or model.hot.share=0."
        )


def check_step(recipe: Recipe, rows: Callable[[], int]) -> None:
    """Refuses what the step of whole models has no way for; `rows()` of a batch are on each device.

    Raises:
      LayoutError: names the fields.
    """
    layout = recipe.layout
    if layout.stages > 1:
        raise LayoutError(
            f"layout.stage={layout.stages}: what was asked for works on whole models, which have no stages. Set it to "
            "1."
        )
    check_recipe(recipe)
    if recipe.accumulate > 1 and rows() % recipe.accumulate:
        raise LayoutError(
            f"accumulate={recipe.accumulate} does not divide the {rows()} rows of a device. Take "
            f"{math.gcd(rows(), recipe.accumulate)}, or another batch."
        )
