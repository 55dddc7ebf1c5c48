"""The largest losses among the negatives, chosen without sorting."""

from typing import Literal

import jax
import jax.numpy as jnp

Ties = Literal["exact", "all"]


def kth_largest(values: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest of non-negative values, by bisection: float32 [..., n] and int [...] to float32 [...].

    The bits of a non-negative float, read as an integer, keep its order: so 31 counts find the exact value. Negative
    values count as 0, k below 1 gives NaN, and k above n gives 0.

    Source: arXiv:2011.03641 and the MLPerf submissions: a TPU sorts slowly.
    """
    bits = jax.lax.bitcast_convert_type(jnp.maximum(values.astype(jnp.float32), 0) + 0.0, jnp.int32)

    def add_bit(step: int, limit: jax.Array) -> jax.Array:
        higher = limit | (1 << (30 - step))
        return jnp.where((bits >= higher[..., None]).sum(-1) >= k, higher, limit)

    limit = jax.lax.fori_loop(0, 31, add_bit, jnp.zeros(bits.shape[:-1], jnp.int32))
    return jax.lax.bitcast_convert_type(limit, jnp.float32)


def hard_negatives(losses: jax.Array, positive: jax.Array, *, ratio: float = 3.0, ties: Ties = "exact") -> jax.Array:
    """The negatives that count in SSD's loss: true for the min(ratio * positives, negatives) with the largest loss.

    Args:
      losses: [..., boxes], each box's loss as background, at least 0. No gradient flows through the choice.
      positive: bool [..., boxes].
      ratio: negatives for each positive.
      ties: of equal losses at the limit take the first, so that the number is exact; or `all` of them.

    Returns:
      bool [..., boxes].

    Source: arXiv:1512.02325, section 2.2, "Hard negative mining".
    """
    negative = ~positive
    wanted = jnp.minimum((ratio * positive.sum(-1)).astype(jnp.int32), negative.sum(-1))
    return largest_of(jax.lax.stop_gradient(losses), negative, wanted, ties=ties)


def largest_of(values: jax.Array, among: jax.Array, wanted: jax.Array, *, ties: Ties = "exact") -> jax.Array:
    """True for the `wanted` largest values among some: bool [..., n]; for all of these if there are fewer.

    With random values it is a sample without replacement.

    Args:
      values: [..., n], at least 0.
      among: bool [..., n], which can be chosen.
      wanted: int [...].
      ties: see `hard_negatives`.
    """
    wanted = jnp.minimum(wanted, among.sum(-1))
    values = jnp.where(among, jnp.maximum(values.astype(jnp.float32), 0), -1)
    limit = kth_largest(values, wanted)[..., None]
    some = (wanted > 0)[..., None]
    if ties == "all":
        return (values >= limit) & some
    above, equal = values > limit, values == limit
    room = wanted - above.sum(-1)
    return (above | (equal & (jnp.cumsum(equal, -1) <= room[..., None]))) & some
