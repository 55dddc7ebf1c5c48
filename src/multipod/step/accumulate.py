"""Gradients of a batch whose rows go through the model in parts, one after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from multipod.pytrees import Batch


def accumulated(
    step: Callable[..., tuple[Any, Any]], params: Any, statistics: Any, key: jax.Array, batch: Batch, times: int
) -> tuple[Any, Any]:
    """`step` over `times` equal parts of the rows in turn: gradients and sums added, statistics passed on."""
    parts = jax.tree.map(lambda rows: rows.reshape(times, -1, *rows.shape[1:]), batch)

    def one(carried: Any, numbered: Any) -> tuple[Any, Any]:
        (gradients, statistics), (number, rows) = carried, numbered
        new, (statistics, sums) = step(params, statistics, jax.random.fold_in(key, number), rows)
        return (jax.tree.map(jnp.add, gradients, new), statistics), sums

    zero = jax.tree.map(jnp.zeros_like, params)
    (gradients, statistics), sums = lax.scan(one, (zero, statistics), (jnp.arange(times), parts))
    return gradients, (statistics, jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), sums))
