"""Updates of the rows that a batch reads: no gradient, and no sum over the devices, has the size of a table.

The rows are taken from a table before the model runs, and the loss is differentiated in them. Devices exchange the rows
that they read with their gradients. The recipe's own Optax transformation then sees a table of these rows alone, with
the state that belongs to them; under a `SparseOptimizer` that changes no number.

A device receives the rows of the whole batch, so that is what an exchange costs; a sum of whole gradients costs twice
the table.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax

from multipod.errors import RecipeError
from multipod.layout.mesh import data_axes
from multipod.nn.model import ReadsRows, Rearranging, rows_name
from multipod.optim.optimizer import SparseOptimizer
from multipod.optim.sparse import RowGradient, make_row_gradient
from multipod.pytrees import Batch, Grads, KeyPath, OptState, Params, Pytree, Specs
from multipod.recipe.recipe import Recipe
from multipod.step.checks import check_recipe
from multipod.step.loss import Aside, Loss
from multipod.step.placement import MeshPlacement
from multipod.step.specs import WHOLE
from multipod.step.sync.reduction import Reduction
from multipod.step.sync.sync import GradientSync, Report


class TouchedRows(GradientSync):
    """Tables of which a batch reads few rows have a `RowGradient`; all other gradients are summed."""

    @classmethod
    def of(cls, placement: MeshPlacement) -> Self:
        """This way for a placement. The order of the backward pass is not traced: buckets follow the parameters'."""
        return cls(placement)

    @staticmethod
    def serves(recipe: Recipe) -> bool:
        """Whether the optimizer is `sparse`; see `row_tables` for what is refused."""
        return bool(row_tables(recipe))

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The tables of which touched rows alone have gradients."""
        return row_tables(self.placement.recipe)

    def combine(self, gradients: Grads) -> tuple[Grads, Report]:
        """The sum of gradients of whole tables: what would be sent without rows."""
        return self.reduction.sum(gradients), {}

    def differentiate(self, loss: Loss, params: Params, batch: Batch) -> tuple[Grads, Aside]:
        """Gradients of the rows that `batch` reads, and of all that is no table."""
        model: Any = self.placement.recipe.model
        places = {table: model.rows_read(table, batch) for table in self.tables}
        rows = {rows_name(table): params[table][jnp.maximum(read, 0)] for table, read in places.items()}
        others = {name: leaf for name, leaf in params.items() if name not in self.tables}
        gradients, aside = jax.grad(loss, has_aux=True)(others | rows)
        by_table = {table: RowGradient(read, gradients[rows_name(table)]) for table, read in places.items()}
        return {name: leaf for name, leaf in gradients.items() if name not in rows} | by_table, aside

    def reduce(self, gradients: Grads, params: Params, optimizer: OptState) -> tuple[Pytree, Report]:
        """All devices' rows with their gradients, the same on each, and the sums of the other gradients."""
        gradients, axes = self.before_sum(gradients), data_axes(self.placement.mesh)
        sizes = {name: self.placement.state.params[name].shape[0] for name in self.tables}
        rows = {name: exchange(gradients[name], size, axes) for name, size in sizes.items()}
        others = {name: leaf for name, leaf in gradients.items() if name not in rows}
        return self._others.sum(others) | rows, {}

    @cached_property
    def _others(self) -> Reduction:
        """The messages of what is no table."""
        placement = self.placement
        shares, base = (
            {name: of for name, of in tree.items() if name not in self.tables} for tree in (self.shares, placement.base)
        )
        return Reduction(placement.recipe.layout, placement.mesh, shares, base)

    @property
    def reduced_specs(self) -> Specs:
        """How the data axes split the gradients: rows are whole."""
        return super().reduced_specs | dict.fromkeys(self.tables, WHOLE)

    def apply(self, reduced: Pytree, optimizer: OptState, params: Params) -> tuple[Params, OptState]:
        """The parameters and the optimizer's state, of tables the touched rows alone changed."""
        return step_rows(self.placement.optimizer, reduced, optimizer, params)

    def withhold(self, reduced: Pytree, good: jax.Array | None) -> tuple[Pytree, frozenset[str]]:
        """Rows that are nowhere, for an update that is not good: a choice would copy whole tables."""
        if good is None:
            return reduced, frozenset()
        model = self.placement.recipe.model
        moved = model.rearranged_params() if isinstance(model, Rearranging) else ()
        held = frozenset(self.tables) - frozenset(moved)
        sizes = {name: self.placement.state.params[name].shape[0] for name in held}
        nowhere = {
            name: RowGradient(jnp.where(good, reduced[name].ids, size), reduced[name].rows)
            for name, size in sizes.items()
        }
        return reduced | nowhere, held

    def magnitudes(self, reduced: Pytree) -> Pytree:
        """The gradients' numbers, without the rows that they are of."""
        return _values(reduced)


def row_tables(recipe: Recipe) -> tuple[str, ...]:
    """The parameters of which only touched rows are updated; none unless the optimizer is `sparse`.

    Raises:
      RecipeError: a model without tables of vectors.
      LayoutError: all that does not go with the layout, as what needs gradients of whole tables.
    """
    if not (isinstance(recipe.optimizer, SparseOptimizer) and recipe.optimizer.sparse):
        return ()
    model = recipe.model
    if not isinstance(model, ReadsRows):
        raise RecipeError(
            f"optimizer.sparse=true: {type(model).__name__} has no tables of vectors. Leave it out, or see "
            "multipod.nn.model.ReadsRows for what a model needs."
        )
    check_recipe(recipe)
    return tuple(model.row_tables())


def exchange(gradient: RowGradient, rows: int, axes: Sequence[str]) -> RowGradient:
    """The sum of all devices' gradients of a table with `rows` rows, the same on each; inside `over_data`."""
    every = jax.tree.map(lambda part: lax.all_gather(part, tuple(axes), tiled=True), gradient)
    return make_row_gradient(every.ids.reshape(-1), every.rows.reshape(-1, *every.rows.shape[2:]), rows)


def step_rows(
    optimizer: optax.GradientTransformation, gradients: Grads, state: OptState, params: Params
) -> tuple[Params, OptState]:
    """The parameters and the optimizer's state after an update.

    For a table with a `RowGradient`, the optimizer sees only the touched rows and the matching rows of its state. State
    belongs to a table if it has the table's name and number of rows. Unused places of the `RowGradient` hold the number
    of rows: zeros are read there, and nothing is written.
    """
    touched = {name: gradient for name, gradient in gradients.items() if _is_rows(gradient)}

    def gradient_of(path: KeyPath, leaf: Any) -> RowGradient | None:
        name = getattr(path[-1], "key", "") if path else ""
        return touched[name] if name in touched and leaf.shape[:1] == params[name].shape[:1] else None

    def take(path: KeyPath, leaf: Any) -> Any:
        gradient = gradient_of(path, leaf)
        if gradient is None:
            return leaf
        return leaf.at[gradient.ids].get(mode="fill", fill_value=0, indices_are_sorted=True)

    def put(path: KeyPath, leaf: Any, new: Any) -> Any:
        gradient = gradient_of(path, leaf)
        return new if gradient is None else leaf.at[gradient.ids].set(new, mode="drop", indices_are_sorted=True)

    few, few_state = (jax.tree_util.tree_map_with_path(take, tree) for tree in (params, state))
    updates, new_state = optimizer.update(_values(gradients), few_state, few)
    new = optax.apply_updates(few, updates)
    return tuple(
        jax.tree_util.tree_map_with_path(put, old, changed) for old, changed in ((params, new), (state, new_state))
    )


def _values(gradients: Grads) -> Grads:
    return jax.tree.map(lambda node: node.rows if _is_rows(node) else node, gradients, is_leaf=_is_rows)


def _is_rows(node: Any) -> bool:
    return isinstance(node, RowGradient)
