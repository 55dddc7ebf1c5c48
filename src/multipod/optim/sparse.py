"""Optimizers for tables of vectors, of which a batch touches a few rows: SGD, Adagrad, row-wise Adagrad.

Two forms of each. As Optax transformations, `adagrad` and `rowwise_adagrad` of `multipod.optim.optimizer` take whole
gradients: right for the cores of a tensor train and for small tables. The functions here take the rows that were
touched (`RowGradient`) and cost nothing for the others: a table of gigabytes then needs no gradient of its size. Both
give the same numbers, since a row without gradient does not move under any of the three.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

EPS = 1e-8
"""Beside the sum of squares, under the root, as in Optax; PyTorch adds it to the root."""


class RowGradient(NamedTuple):
    """The gradient of a table, of the rows that have one.

    Attributes:
      ids: int32 [n], distinct and increasing; what is left over holds the number of rows of the table.
      rows: [n, features].
    """

    ids: jax.Array
    rows: jax.Array


def make_row_gradient(ids: jax.Array, gradients: jax.Array, table_rows: int) -> RowGradient:
    """Returns the gradients [n, features] of looked-up `ids` [n], added up for each id that the table has.

    They are added before an optimizer sees them, since Adagrad is not linear: (a + b)^2 is not a^2 + b^2.
    """
    inside = jnp.where((ids >= 0) & (ids < table_rows), ids, table_rows).astype(jnp.int32)
    order = jnp.argsort(inside)
    ordered = inside[order]
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    number = jnp.cumsum(new, dtype=jnp.int32)
    sums = jax.ops.segment_sum(gradients[order], number, len(ids), indices_are_sorted=True)
    distinct = jnp.full(len(ids), table_rows, jnp.int32).at[number].set(ordered)
    return RowGradient(distinct, sums)


def sgd_rows(table: jax.Array, gradient: RowGradient, rate: Any) -> jax.Array:
    """W_i - rate g_i for the rows that have a gradient."""
    return _add(table, gradient.ids, -rate * gradient.rows)


def adagrad_rows(
    table: jax.Array, squares: jax.Array, gradient: RowGradient, rate: Any, eps: float = EPS
) -> tuple[jax.Array, jax.Array]:
    """S_i + g_i^2, then W_i - rate g_i / sqrt(S_i + eps); `squares` has the table's shape."""
    squares = _add(squares, gradient.ids, jnp.square(gradient.rows))
    sums = squares.at[gradient.ids].get(mode="fill", fill_value=0)
    return _add(table, gradient.ids, -rate * _over_root(gradient.rows, sums, eps)), squares


def rowwise_adagrad_rows(
    table: jax.Array, squares: jax.Array, gradient: RowGradient, rate: Any, eps: float = EPS
) -> tuple[jax.Array, jax.Array]:
    """s_i + mean(g_i^2), then W_i - rate g_i / sqrt(s_i + eps); `squares` is [rows]."""
    squares = _add(squares, gradient.ids, jnp.square(gradient.rows).mean(-1))
    sums = squares.at[gradient.ids].get(mode="fill", fill_value=0)
    return _add(table, gradient.ids, -rate * _over_root(gradient.rows, sums[:, None], eps)), squares


class RowwiseState(NamedTuple):
    """The sums of squares: [rows] for tensors of two or more dims, whose first dim counts rows; else of their shape."""

    squares: Any


def scale_by_rowwise_adagrad(eps: float = EPS) -> optax.GradientTransformation:
    """g / sqrt(s + eps) with s the sum over updates of the mean of g^2 over each row: one number a row.

    The memory of Adagrad divided by the features of a row. A tensor of fewer than two dims is under plain Adagrad.

    Source: Gupta, Bengio and Weston, 2014, JMLR 15; the optimizer of DLRM's tables (arXiv:1906.00091).
    """

    def init(params: Any) -> RowwiseState:
        return RowwiseState(jax.tree.map(lambda w: jnp.zeros(w.shape[:1] if w.ndim > 1 else w.shape, w.dtype), params))

    def update(gradients: Any, state: RowwiseState, params: Any = None) -> tuple[Any, RowwiseState]:
        def squares(g: jax.Array, s: jax.Array) -> jax.Array:
            return s + jnp.square(g).mean(tuple(range(1, g.ndim)))

        def scaled(g: jax.Array, s: jax.Array) -> jax.Array:
            return _over_root(g, s.reshape(s.shape + (1,) * (g.ndim - s.ndim)), eps)

        new = jax.tree.map(squares, gradients, state.squares)
        return jax.tree.map(scaled, gradients, new), RowwiseState(new)

    return optax.GradientTransformation(init, update)


def _over_root(g: jax.Array, squares: jax.Array, eps: float) -> jax.Array:
    # Not `squares > 0`, which is false of NaN: it must come through.
    return jnp.where(squares == 0, 0, g * jax.lax.rsqrt(squares + eps))


def _add(table: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Adds to rows; ids equal to the number of rows, of which there may be several, are dropped."""
    return table.at[ids].add(values, mode="drop", indices_are_sorted=True)
