"""Learning rates as functions of the updates done: what Optax's own do not say."""

from collections.abc import Sequence

import jax.numpy as jnp
import optax


def warm_up(rate: float, warmup: int, start: float, then: optax.Schedule, begin: int) -> optax.Schedule:
    """Linear from `start` at update 0 to `rate` at update `warmup`, from there on then(update - begin).

    begin=warmup joins them without a jump. begin=0 lets the decay run from the first update, hidden by
    the warm-up: the rate then jumps down at its end. Published BERT and EfficientNet runs do that.
    """
    ramp = optax.linear_schedule(start, rate, max(warmup, 1))
    return lambda count: jnp.where(count < warmup, ramp(count), then(jnp.maximum(count - begin, 0)))


def staircase(rate: float, factor: float, every: float, end: float = 0.0) -> optax.Schedule:
    """rate * factor^floor(update / every), and never below `end`. `every` may be a fraction: 2.4 epochs."""
    return lambda count: jnp.maximum(rate * factor ** jnp.floor(count / every), end)


def drops(rate: float, factor: float, at: Sequence[float]) -> optax.Schedule:
    """`rate`, times `factor` for each of `at` (numbers of updates) that has been reached."""
    places = jnp.asarray(at, jnp.float32)
    return lambda count: rate * factor ** jnp.sum(count >= places)


def rsqrt(rate: float, warmup: int) -> optax.Schedule:
    """rate * sqrt(warmup / max(update, warmup)): `rate` at the end of the warm-up, then as 1 / sqrt(update).

    The usual form, constant * rsqrt(features) * rsqrt(max(update, warmup)), has the peak
    `rate = constant / sqrt(features * warmup)`.

    Source: Vaswani et al., 2017, arXiv:1706.03762, eq. 3.
    """
    warmup = max(warmup, 1)
    return lambda count: rate * jnp.sqrt(warmup / jnp.maximum(count, warmup))
