"""What a plan holds of a recipe: the fields that its prediction rests on. And whether a recipe to train has them."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from multipod.errors import MultipodError, PlanError
from multipod.layout.layout import Layout
from multipod.plan.machine import Machine
from multipod.plan.placing import norm_tile, on_machine
from multipod.plan.predict import Prediction, micro_of
from multipod.plan.saved import UNPLANNED, SavedPlan
from multipod.plan.search import Candidate
from multipod.plan.traced.fields import dtype_fields, norm_fields, norm_tile_of
from multipod.plan.workload import Workload
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import flat_fields, to_text

FREE = (
    *("name", "seed", "evaluate_every", "evaluation_batch", "checkpoint_every", "keep_checkpoints"),
    *(f"layout.{name}" for name in UNPLANNED),
)
"""Fields that no price rests on; those of `data` and `bad_updates` neither, see `pinned_fields`."""

GROUPS = ("data.", "bad_updates.")
"""Groups of fields that are free. Of the data the shapes of an example are held."""

PIXELS = "data.pixels"
"""Held of the data of a recipe whose examples cannot be read where it is planned."""


def pinned_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that the price of its step and the length of its run rest on, by their names for `--set`.

    A `kind` is the name of a type. Beside them stands the shape and the type of each array of an
    example, where examples can be read.
    """
    fields = flat_fields(to_text(recipe)) | {"preset": recipe.preset or "none"}
    fields |= {name: kind.rpartition(":")[2] for name, kind in fields.items() if name.endswith(".kind")}
    held = {name: value for name, value in fields.items() if name not in FREE and not name.startswith(GROUPS)}
    held |= {PIXELS: fields[PIXELS]} if PIXELS in fields else {}
    return held | _example(recipe)


def _example(recipe: Recipe) -> dict[str, str]:
    with suppress(MultipodError, OSError):
        arrays = recipe.data.train().read(np.arange(1))
        return {f"example.{name}": f"{array.dtype}{list(array.shape[1:])}" for name, array in arrays.items()}
    return {}


def planned_layout(step: Prediction, machine: Machine, recipe: Recipe | None = None) -> Layout:
    """The layout of a step as it lies on the machine, with its micro-batches and the recipe's type of gradients."""
    layout = on_machine(step.layout, machine)
    if layout.pipeline:
        micro = micro_of(layout, step.batch, machine)
        layout = replace(layout, pipeline=replace(layout.pipeline, micro_batches=micro))
    if recipe is None or layout.sync.sum_dtype:
        return layout
    return replace(layout, sync=replace(layout.sync, sum_dtype=recipe.layout.sync.sum_dtype))


def settings_of(step: Prediction, machine: Machine, recipe: Recipe, updates: int) -> tuple[str, ...]:
    """The changes that give a recipe what the step was priced with: length, type of products, batch norm's span."""
    dtypes = [f"{name}={step.dtype}" for name in dtype_fields(recipe) if step.dtype]
    return (f"updates={updates}", *dtypes, *_norm_settings(step, machine, recipe))


def _norm_settings(step: Prediction, machine: Machine, recipe: Recipe) -> list[str]:
    fields, each = norm_fields(recipe), step.layout.replica_devices
    mesh = on_machine(step.layout, machine).mesh
    if not fields or not mesh:
        return []
    height, width = norm_tile(each, max(1, step.norm_group // each), machine)
    tile = "all" if (height, width) == mesh else f"{height}x{width}"
    tiles = mesh[0] * mesh[1] // (height * width)
    said = {"batch_norm_tile": tile} | ({"batch_norm_tiles": tiles} if "kept" in fields.values() else {})
    return [f"{name}={said[short]}" for name in fields if (short := name.rpartition(".")[2]) in said]


def plan_of(
    name: str, on: str, step: Prediction, machine: Machine, recipe: Recipe, changes: Sequence[str], updates: int
) -> SavedPlan:
    """The plan of a step of `recipe`, which had `changes` and runs for `updates`."""
    priced = settings_of(step, machine, recipe, updates)
    names = {change.partition("=")[0].strip() for change in priced}
    settings = (*(change for change in changes if change.partition("=")[0].strip() not in names), *priced)
    layout = planned_layout(step, machine, recipe)
    plan = SavedPlan(name, on, layout, step.batch, {}, settings, {"batch": step.batch})
    trained = override(recipe, [*priced, *plan.layout_changes()])
    fields = pinned_fields(trained)
    if step.evaluation_s:
        fields["evaluate_every"] = trained.evaluate_every
    return replace(plan, prediction=step.data(), fields=fields)


def check_planned(plan: SavedPlan, recipe: Recipe) -> None:
    """Refuses a recipe that is not what was planned; nothing is known of that for a plan of a former format.

    Raises:
      PlanError: all fields that differ, with the planned values.
    """
    wrong = differing(plan, recipe)
    if wrong:
        raise PlanError(
            f"the plan of {plan.name} on {plan.machine} does not hold for this run:"
            + "".join(f"\n  {line}" for line in wrong)
            + "\nLeave out what was set otherwise, or plan again with the same --set."
        )


def differing(plan: SavedPlan, recipe: Recipe) -> list[str]:
    """The fields of a recipe that are not as planned: `batch: planned 65536, now 8192`."""
    if not plan.fields:
        return []
    fields = pinned_fields(recipe) | {"evaluate_every": recipe.evaluate_every}
    moved = () if plan.layout.mesh else ("layout.mesh", "layout.tile")
    return [
        f"{name}: planned {_shown(value)}, now {_shown(fields.get(name, 'absent'))}"
        for name, value in plan.fields.items()
        if name not in moved and fields.get(name) != value
    ]


def _shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) and value else str(value)


def candidate_of(workload: Workload, recipe: Recipe, machine: Machine) -> Candidate:
    """What of a recipe changes the price of its step: its layout, and the devices that batch norm spans."""
    tile, each = norm_tile_of(recipe), recipe.layout.replica_devices
    spanned = each * math.prod(tile) if tile else machine.devices
    return Candidate(recipe.layout, spanned if workload.norm_group_messages else 1)
