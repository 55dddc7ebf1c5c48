"""A recipe's preset: the optimizer and the length of a run as functions of its batch."""

from contextlib import suppress
from dataclasses import replace

from multipod.errors import RecipeError
from multipod.optim.optimizer import RegularizedOptimizer
from multipod.optim.presets import find_preset
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import differences, from_text, to_text


def apply_preset(recipe: Recipe, name: str | None, batch: int) -> Recipe:
    """Returns the recipe with this batch, and the optimizer and the length that the preset `name` has for it.

    A run whose length the preset does not say, and the updates between evaluations and between checkpoints, keep their
    epochs. The optimizer goes on adapting the tensors that the recipe's adapts. None leaves all but the batch.

    Raises:
      RecipeError: no such preset, with the nearest.
    """
    if name is None:
        return replace(recipe, batch=batch, preset=None)
    run = find_preset(name).at(batch)
    adapts = recipe.optimizer.rules if isinstance(recipe.optimizer, RegularizedOptimizer) else run.optimizer.rules

    def scaled(updates: int) -> int:
        return max(1, round(updates * recipe.batch / batch)) if updates else 0

    return replace(
        recipe,
        preset=name,
        batch=batch,
        optimizer=replace(run.optimizer, rules=adapts),
        updates=run.updates or scaled(recipe.updates),
        evaluate_every=scaled(recipe.evaluate_every),
        checkpoint_every=scaled(recipe.checkpoint_every),
    )


def preset_remarks(recipe: Recipe) -> list[str]:
    """What a reader should know of the recipe's preset: its numbers here, those that are the user's own, and its range.

    Nothing for a recipe without one.
    """
    if recipe.preset is None:
        return []
    rule = find_preset(recipe.preset)
    run = rule.at(recipe.batch)
    ruled = apply_preset(recipe, recipe.preset, recipe.batch)
    own = differences(to_text(ruled), to_text(recipe))
    beyond = rule.beyond(recipe.batch)
    peak, warmup = run.rate.then.peak, run.rate.length(ruled.updates)
    numbers = f"peak rate {peak:g}, {ruled.updates:,} updates, {warmup:,} of them warm-up"
    return [
        f"preset {recipe.preset} at batch {recipe.batch:,}: {numbers} ({run.source})",
        *(f"  set otherwise: {line}" for line in own),
        *([f"  warning: {beyond}"] if beyond else []),
    ]


def remarks_on_text(text: str) -> list[str]:
    """Returns `preset_remarks` of the recipe that a text holds; nothing where its types cannot be read back."""
    with suppress(RecipeError):
        return preset_remarks(from_text(text))
    return []
