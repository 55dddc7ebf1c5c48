"""What a name on the command line stands for, to be planned: a recipe, the table of a published model, or both."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from multipod.errors import PlanError, RecipeError, nearest
from multipod.plan.tables.convergence import epochs_to_target, updates_at
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import EXAMPLES
from multipod.plan.traced.fields import norm_moving_of
from multipod.plan.traced.program import workload_of
from multipod.plan.traced.remembered import remember_traces
from multipod.plan.traced.splits import Splits
from multipod.plan.workload import Workload
from multipod.recipe.recipe import Recipe
from multipod.recipe.scaling import preset_remarks
from multipod.recipe.tables import override_with_tables
from multipod.recipes.find import RECIPES, load


class ToPlan(NamedTuple):
    """What is planned.

    Attributes:
      name: as on the command line.
      workload: of the recipe, or the table of a published model.
      batch: examples in an update.
      updates: of the run; 0 if nobody knows.
      every: updates between evaluations; 0: none.
      recipe: that can be trained so, with the changes that were asked for and the batch; None for a table alone.
      remarks: on the recipe's preset.
    """

    name: str
    workload: Workload
    batch: int
    updates: float
    every: float
    recipe: Recipe | None = None
    remarks: Sequence[str] = ()


def recipe_to_plan(
    name: str, batch: int | None, sets: Sequence[str], cache: Path | None, tell: Callable[[str], None] | None = None
) -> ToPlan:
    """What a name stands for: a table of a published model, a recipe, or a recipe with the price of a table.

    Args:
      name: of a table or a recipe.
      batch: examples in an update; None takes the recipe's, if no table has its name.
      sets: changes to the recipe.
      cache: the folder of traces and compiled programs; None keeps none.
      tell: asks XLA what splits of the model cost, and hears what is being compiled; None asks nothing.

    Raises:
      PlanError: nothing of this name; a table without a batch, or with changes.
      RecipeError: changes that do not fit, or a file that is no recipe.
    """
    if name in MODELS and batch is None:
        raise PlanError(f"{name} is a published model and has no batch of its own. Give --batch, as --batch 4096.")
    if name in MODELS and name not in RECIPES:
        assert batch is not None
        if sets:
            raise PlanError(f"{name} is a table of layers, which has no fields. Leave --set out, or plan a recipe.")
        return ToPlan(name, MODELS[name], batch, known_updates(name, batch), 0.0)
    try:
        recipe = load(name)
    except RecipeError as error:
        if ".py:" in name:
            raise
        raise PlanError(f"nothing to plan is called {name!r}. {nearest(name, [*MODELS, *RECIPES])}") from error
    base, recipe = recipe, override_with_tables(recipe, [*sets, *([f"batch={batch}"] if batch else [])])
    remarks = preset_remarks(recipe)
    same = (base.model, base.accumulate, type(base.optimizer)) == (
        recipe.model,
        recipe.accumulate,
        type(recipe.optimizer),
    )
    if name in MODELS and same:
        table = replace(MODELS[name], norm_moving=norm_moving_of(recipe))
        return ToPlan(name, table, recipe.batch, recipe.updates, 0.0, recipe, remarks)
    remember_traces(None if cache is None else cache / "traces")
    programs = None if cache is None else cache / "programs"
    workload = workload_of(recipe, Splits(recipe, programs, tell) if tell else None)
    return ToPlan(name, workload, recipe.batch, recipe.updates, recipe.evaluate_every, recipe, remarks)


def known_updates(name: str, batch: int) -> float:
    """The updates that a published model took to its target, by Google's logs or else by MLPerf's reference points.

    0 if nobody noted them.
    """
    for count in (_logged_updates, updates_at):
        with suppress(PlanError):
            return count(name, batch)[0]
    return 0.0


def _logged_updates(name: str, batch: int) -> tuple[float, str]:
    epochs, source = epochs_to_target(name, batch)
    return epochs * EXAMPLES[name] / batch, source
