"""The recipe of a run: found by its name or given as a value, changed, and laid on the mesh that is here."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from multipod.data.clicks.records import Clicks
from multipod.layout.layout import Layout
from multipod.recipe.recipe import Recipe
from multipod.recipe.tables import override_with_tables
from multipod.recipe.text import from_text
from multipod.recipes.find import load
from multipod.runs.options import RuntimeOptions
from multipod.topology.machines import parse
from multipod.train.run_folder import RunFolder


def configure_recipe(recipe: str | Recipe, changes: Sequence[str], options: RuntimeOptions) -> Recipe:
    """Returns the recipe with `changes`, and the mesh and the failed chips of `options` in its layout.

    Tables of its model are as large as the data say, where the data set that and no change does.

    Raises:
      RecipeError: no such recipe, or a change that does not fit.
      TopologyError: failed chips that the mesh does not have.
    """
    mesh = [] if options.mesh is None else [f"layout.mesh={options.mesh[0]}x{options.mesh[1]}"]
    base = recipe if isinstance(recipe, Recipe) else load(recipe)
    changed = override_with_tables(base, [*changes, *mesh])
    return replace(changed, layout=without_chips(changed.layout, options.fail)) if options.fail else changed


def recorded_recipe(folder: RunFolder, facts: Mapping[str, Any]) -> str | Recipe:
    """Returns the recipe that a run began with: the name by which it was found, or the value.

    A recipe that was given as a value is read from the run's text, without the mesh, which is of the devices that were
    there. So is that of a fine-tuning by an older version, whose name held JSON.

    Raises:
      RecipeError: the text names a type that cannot be imported.
    """
    if not facts.get("recipe_is_value") and not facts["recipe"].startswith("finetune:"):
        return facts["recipe"]
    recipe = from_text(folder.recipe.read_text())
    return replace(recipe, layout=replace(recipe.layout, mesh=(), failed=()))


def recorded_changes(folder: RunFolder, facts: Mapping[str, Any]) -> list[str]:
    """Returns the changes that a run began with.

    One that began without a preset keeps its numbers without it. One of an older version keeps its tables, which its
    records did not set, and the examples that its batch norm spanned.
    """
    began = tomllib.loads(folder.recipe.read_text())
    kept = [] if began.get("preset") else ["preset=none"]
    path, model = "model", began.get("model", {})
    while isinstance(model.get("model"), dict):
        path, model = f"{path}.model", model["model"]
    if "batch_norm_tile" in model:
        kept.append(f"{path}.batch_norm_tile={model['batch_norm_tile']}")
    data = began.get("data", {})
    if data.get("kind") == f"{Clicks.__module__}:{Clicks.__name__}" and "sets_tables" not in data:
        kept.append("data.sets_tables=false")
    return [*kept, *facts["overrides"]]


def without_chips(layout: Layout, fail: Sequence[str]) -> Layout:
    """Returns the layout on its mesh without the chips in the blocks `fail`, as `0,1` or `0-1,2-3`.

    Raises:
      TopologyError: chips that the mesh does not have.
    """
    rows, columns = layout.mesh or layout.mesh_shape(jax.device_count())
    chips = parse(f"mesh:{rows}x{columns}", tuple(fail))
    failed = tuple((row, column) for row, column in map(chips.coordinates, sorted(chips.failed_chips)))
    return replace(layout, mesh=(rows, columns), failed=failed)
