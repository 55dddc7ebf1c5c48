"""The fields of a recipe that its price rests on, found in whatever model it has."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from multipod.data.source import HostBatch, ShowsExample
from multipod.errors import MultipodError
from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.nn.images.batch_norm import Tile
from multipod.nn.model import nested_models
from multipod.optim.presets import find_preset
from multipod.plan.workload import Dtype
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")

TRACED_UPDATES = 1000
"""The length of a run that is traced: a number in a schedule, which costs the same whatever it is."""


def dtype_fields(recipe: Recipe) -> tuple[str, ...]:
    """The fields of a recipe that say the type of its model's products, for `--set`; () if it has none."""
    return tuple(
        f"{name}.dtype" for name, model in nested_models(recipe.model) if getattr(model, "dtype", None) in DTYPES
    )


def norm_fields(recipe: Recipe) -> dict[str, Any]:
    """The fields that say how batch norm spans devices and what it keeps, with their values; {} if there are none."""
    return {
        f"{name}.{field}": getattr(model, field)
        for name, model in nested_models(recipe.model)
        for field in ("batch_norm_tile", "batch_norm_moving", "batch_norm_tiles")
        if hasattr(model, "batch_norm_tile") and hasattr(model, field)
    }


def norm_tile_of(recipe: Recipe) -> tuple[int, int] | None:
    """Rows and columns of the replicas that batch norm spans; None where the recipe does not say them."""
    tile = _tile_of(recipe)
    return tile if isinstance(tile, tuple) else None


def norm_moving_of(recipe: Recipe) -> str:
    """What the moving moments of batch norm take from all tiles; "" for a model without it."""
    return next((value for name, value in norm_fields(recipe).items() if name.endswith("_moving")), "")


def norm_examples_of(recipe: Recipe) -> int:
    """Over how many examples the recipe normalises, or the published run of its preset did; 0: over all of a batch."""
    tile = _tile_of(recipe)
    if isinstance(tile, int):
        return tile
    return 0 if recipe.preset is None else find_preset(recipe.preset).at(recipe.batch).norm_examples


def _tile_of(recipe: Recipe) -> Tile | None:
    return next((value for name, value in norm_fields(recipe).items() if name.endswith("_tile")), None)


def example_to_plan(recipe: Recipe) -> HostBatch:
    """An example of the recipe's data; where they can show its shape without a file, they are not read."""
    data = recipe.data
    return data.example() if isinstance(data, ShowsExample) else data.train().read(np.arange(1))


def count_evaluated(recipe: Recipe) -> int:
    """How many examples an evaluation has; 0 where the data that say so are not here."""
    with suppress(MultipodError, OSError):
        return len(recipe.data.test())
    return 0


def bare(recipe: Recipe) -> Recipe:
    """The recipe without what no trace depends on, so that one trace serves all layouts and lengths of it.

    Batch norm is that of one device, whose messages are counted and not traced.
    """
    layout = Layout(
        split=ModelSplit(rules=recipe.layout.split.rules), sync=Sync(sum_dtype=recipe.layout.sync.sum_dtype)
    )
    usual = {"batch_norm_tile": "all", "batch_norm_moving": "pooled", "batch_norm_tiles": 1}
    changes = [f"{name}={usual[name.rpartition('.')[2]]}" for name in norm_fields(recipe)]
    plain = replace(recipe, layout=layout, preset=None, updates=TRACED_UPDATES, checkpoint_every=0)
    plain = replace(plain, evaluate_every=0, target="")
    return override(plain, changes)
