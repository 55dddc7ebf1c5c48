"""Updates of the rows that a batch reads: no gradient, and no sum over the devices, has the size of a table.

The rows are taken from a table before the model runs, and the loss is differentiated in them. Devices exchange the rows
that they read with their gradients. The recipe's own Optax transformation then sees a table of these rows alone, with
the state that belongs to them; under a `SparseOptimizer` that changes no number.

A device receives the rows of the whole batch, so that is what an exchange costs; a sum of whole gradients costs twice
the table.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from multipod.errors import LayoutError, RecipeError
from multipod.nn.model import ReadsRows, rows_name
from multipod.optim.optimizer import SparseOptimizer
from multipod.optim.sparse import RowGradient, row_gradient
from multipod.recipe.recipe import Recipe

Batch = dict[str, jax.Array]


def row_tables(recipe: Recipe) -> tuple[str, ...]:
    """The parameters of which only touched rows are updated; none unless the optimizer is `sparse`.

    Raises:
      RecipeError: a model without tables of vectors.
      LayoutError: names what of the recipe needs gradients of whole tables.
    """
    if not (isinstance(recipe.optimizer, SparseOptimizer) and recipe.optimizer.sparse):
        return ()
    model = recipe.model
    if not isinstance(model, ReadsRows):
        raise RecipeError(
            f"optimizer.sparse=true: {type(model).__name__} has no tables of vectors. Leave it out, or see "
            "multipod.nn.model.ReadsRows for what a model needs."
        )
    layout = recipe.layout
    whole = {
        f"layout.gradient_sum={layout.gradient_sum}": layout.combines,
        "layout.shard_update=true": layout.shard_update,
        "layout.shard_weights=true": layout.shard_weights,
        f"accumulate={recipe.accumulate}": recipe.accumulate > 1,
    }
    wrong = [name for name, asked in whole.items() if asked]
    if wrong:
        raise LayoutError(
            f"{' and '.join(wrong)} with optimizer.sparse=true: that needs gradients of whole tables. Set one or the "
            "other."
        )
    return tuple(model.row_tables())


def with_rows(model: Any, tables: Sequence[str], params: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
    """The parameters with the rows that `batch` reads in the place of `tables`, and which rows these are."""
    if not tables:
        return params, {}
    places = {table: model.rows_read(table, batch) for table in tables}
    rows = {rows_name(table): params[table][jnp.maximum(own, 0)] for table, own in places.items()}
    return {name: leaf for name, leaf in params.items() if name not in tables} | rows, places


def by_table(gradients: Any, places: dict[str, jax.Array]) -> Any:
    """Gradients under the names of the tables, of which a `RowGradient` has all places as they were read."""
    if not places:
        return gradients
    found = {table: RowGradient(own, gradients[rows_name(table)]) for table, own in places.items()}
    return {name: leaf for name, leaf in gradients.items() if name not in map(rows_name, places)} | found


def exchanged(gradient: RowGradient, rows: int, axes: Sequence[str]) -> RowGradient:
    """The sum of all devices' gradients of a table of so many `rows`, the same on each; inside `over_data`."""
    every = jax.tree.map(lambda part: lax.all_gather(part, tuple(axes), tiled=True), gradient)
    return row_gradient(every.ids.reshape(-1), every.rows.reshape(-1, *every.rows.shape[2:]), rows)


def values(gradients: Any) -> Any:
    """The gradients' numbers alone, without the rows that they are of."""
    return jax.tree.map(lambda one: one.rows if _is_rows(one) else one, gradients, is_leaf=_is_rows)


def stepped(optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after an update.

    Of a table with a `RowGradient` the optimizer sees the rows with a gradient, and of its state what belongs to them:
    what has the table's name and as many rows. Places of the `RowGradient` that are left over hold the number of rows:
    zeros are read there, and nothing is written.
    """
    found = {name: g for name, g in gradients.items() if _is_rows(g)} if isinstance(gradients, dict) else {}
    if not found:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def own(path: Any, leaf: Any) -> RowGradient | None:
        name = getattr(path[-1], "key", "") if path else ""
        return found[name] if name in found and leaf.shape[:1] == params[name].shape[:1] else None

    def taken(path: Any, leaf: Any) -> Any:
        gradient = own(path, leaf)
        if gradient is None:
            return leaf
        return leaf.at[gradient.ids].get(mode="fill", fill_value=0, indices_are_sorted=True)

    def put(path: Any, leaf: Any, new: Any) -> Any:
        gradient = own(path, leaf)
        return new if gradient is None else leaf.at[gradient.ids].set(new, mode="drop", indices_are_sorted=True)

    few, few_state = (jax.tree_util.tree_map_with_path(taken, tree) for tree in (params, state))
    updates, new_state = optimizer.update(values(gradients), few_state, few)
    new = optax.apply_updates(few, updates)
    return tuple(
        jax.tree_util.tree_map_with_path(put, old, changed) for old, changed in ((params, new), (state, new_state))
    )


def _is_rows(node: Any) -> bool:
    return isinstance(node, RowGradient)
