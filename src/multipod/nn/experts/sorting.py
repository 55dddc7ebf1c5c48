"""Dispatch by sorting: the fast form. Rows are sorted by expert, multiplied by experts, and put back; all by gathers.

T tokens with K choices each; N = T K. Nothing of size [tokens, experts, slots] is made.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from multipod.nn.experts.routing import Choices, Routing, ranks
from multipod.pytrees import Pytree


class Dispatch(NamedTuple):
    """Which row is whose.

    Attributes:
      choice: the choice of each row, `token * K + choice`, int32 [rows], sorted by expert; N where a row is empty.
      row: the row of each choice, int32 [T, K]; `rows` where it is not served.
      sizes: rows of each expert, int32 [E]; behind them are choices that are not served.
    """

    choice: jax.Array
    row: jax.Array
    sizes: jax.Array


def plan_dispatch(choices: Choices, routing: Routing, slots: int) -> tuple[Dispatch, jax.Array]:
    """The rows of all groups together, and bool [G, S, K]: which choices are served. `slots` 0: all are."""
    served = choices.expert < routing.experts
    rows = choices.expert.size
    if slots:
        served &= ranks(choices, routing.order) < slots
        rows = min(rows, len(choices.expert) * routing.experts * slots)
    expert = jnp.where(served, choices.expert, routing.experts).reshape(-1)
    choice = jnp.argsort(expert, stable=True).astype(jnp.int32)
    place = jnp.argsort(choice).astype(jnp.int32)
    row = jnp.where(served.reshape(-1), place, rows).reshape(-1, routing.chosen)
    sizes = (expert[:, None] == jnp.arange(routing.experts)).sum(0, dtype=jnp.int32)
    choice = jnp.where(jnp.arange(rows) < sizes.sum(), choice[:rows], choices.expert.size)
    return Dispatch(choice, row, sizes), served


@jax.custom_vjp
def send_to_rows(x: jax.Array, where: Dispatch) -> jax.Array:
    """The tokens x [T, M] as rows [rows, M]; empty rows are zero."""
    return _rows(x, where.choice // where.row.shape[1])


def _sent_backward(where: Dispatch, gradient: jax.Array) -> tuple[jax.Array, None]:
    # The transpose of a gather is a scatter, which is slow; but each choice knows its row.
    return _rows(gradient, where.row).sum(1), None


send_to_rows.defvjp(lambda x, where: (send_to_rows(x, where), where), _sent_backward)


@jax.custom_vjp
def return_to_tokens(y: jax.Array, gate: jax.Array, where: Dispatch) -> jax.Array:
    """Rows y [rows, M], weighted by gates [T, K] and added up for each token: [T, M]."""
    return jnp.einsum("tkm,tk->tm", _rows(y, where.row), gate)


def _returned_forward(y: jax.Array, gate: jax.Array, where: Dispatch) -> tuple[jax.Array, Pytree]:
    return return_to_tokens(y, gate, where), (y, gate, where)


def _returned_backward(kept: Pytree, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    y, gate, where = kept
    by_row = _rows(gradient, where.choice // gate.shape[1])
    weight = _rows(gate.reshape(-1), where.choice)
    dots = jnp.einsum("rm,rm->r", by_row, y)
    return by_row * weight[:, None], _rows(dots, where.row).astype(gate.dtype), None


return_to_tokens.defvjp(_returned_forward, _returned_backward)


def _rows(values: jax.Array, row: jax.Array) -> jax.Array:
    """values[row], and zero for rows behind the last."""
    return jnp.take(values, row, axis=0, mode="fill", fill_value=0)
