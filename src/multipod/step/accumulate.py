"""Gradient accumulation: the rows of a batch go through the model in parts, one after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from multipod.pytrees import Batch, Grads, Params, Statistics
from multipod.step.loss import Aside

GradientStep = Callable[[Params, Statistics, jax.Array, Batch], tuple[Grads, Aside]]
"""From weights, statistics, a key and rows to gradients, with new statistics and sums."""


def accumulate(step: GradientStep, times: int) -> GradientStep:
    """`step` over `times` equal parts of the rows in turn: gradients and sums added, statistics passed on."""
    return step if times == 1 else partial(_in_turn, step, times)


def _in_turn(
    step: GradientStep, times: int, params: Params, statistics: Statistics, key: jax.Array, batch: Batch
) -> tuple[Grads, Aside]:
    parts = jax.tree.map(lambda rows: rows.reshape(times, -1, *rows.shape[1:]), batch)

    def add(carried: Any, rows: Batch) -> tuple[Any, Any]:
        gradients, statistics = carried
        new, (statistics, sums) = step(params, statistics, key, rows)
        return (jax.tree.map(jnp.add, gradients, new), statistics), sums

    zero = jax.tree.map(jnp.zeros_like, params)
    (gradients, statistics), sums = lax.scan(add, (zero, statistics), parts)
    return gradients, (statistics, jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), sums))
