"""What an attention adds to its scores for the distance between two tokens, as in T5."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import variance_scaling

from multipod.nn.dims import param


class RelativePositions(nnx.Module):
    """A learnt number for each head and each bucket of distances; a stack of layers shares one.

    Attributes:
      table: [buckets, heads].
    """

    def __init__(self, heads: int, *, both_ways: bool, buckets: int = 32, longest: int = 128, rngs: nnx.Rngs) -> None:
        init = variance_scaling(1.0, "fan_avg", "uniform")
        self.table = param(init, (buckets, heads), ("buckets", "heads"), rngs)
        self.both_ways, self.longest = both_ways, longest

    def __call__(self, queries: int, keys: int) -> jax.Array:
        """What is added to scores [n, heads, queries, keys]: float32 [1, heads, queries, keys]."""
        distance = np.arange(keys) - np.arange(queries)[:, None]
        found = buckets(distance, len(self.table), self.longest, both_ways=self.both_ways)
        return jnp.moveaxis(self.table[...][found], -1, 0)[None]

    def at(self, position: jax.Array, keys: int) -> jax.Array:
        """The row of `__call__` for the query at `position`, an array of none or one: float32 [1, heads, 1, keys].

        For tables without `both_ways`: later keys count as distance 0, and a causal mask hides them.
        """
        found = buckets(-np.arange(keys), len(self.table), self.longest, both_ways=False)
        back = jnp.maximum(position - jnp.arange(keys), 0)
        return jnp.moveaxis(self.table[...][jnp.asarray(found)[back]], -1, 0)[None, :, None]


def buckets(distance: np.ndarray, count: int = 32, longest: int = 128, *, both_ways: bool) -> np.ndarray:
    """The bucket of each distance (place of the key - place of the query): 0 to count - 1.

    Half of the buckets are single distances from 0 on, the others cover distances up to `longest` in equal steps of
    the logarithm; what is farther falls in the last one. With `both_ways` the second half of all buckets is for keys
    behind the query; without it those count as distance 0.

    Source: Raffel et al., 2019, arXiv:1910.10683, section 2.1, with the sizes of the released code.
    """
    after = np.zeros_like(distance)
    if both_ways:
        count //= 2
        after = count * (distance > 0)
        back = np.abs(distance)
    else:
        back = np.maximum(-distance, 0)
    single = count // 2
    with np.errstate(divide="ignore"):
        far = single + np.log(back / single) / math.log(longest / single) * (count - single)
    return after + np.where(back < single, back, np.minimum(np.maximum(far, single), count - 1).astype(int))
