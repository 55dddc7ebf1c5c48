"""Tables of vectors, and the positions that need none."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import Initializer

from multipod.nn.dense import ComputeDtype
from multipod.nn.dims import param
from multipod.nn.logical_axes import with_logical_constraint


class Embedding(nnx.Module):
    """A table [entries, embed]; looked up, or as the last layer that scores its own entries."""

    def __init__(
        self,
        entries: int,
        features: int,
        *,
        counts: str = "vocab",
        init: Initializer,
        dtype: ComputeDtype = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        self.table = param(init, (entries, features), (counts, "embed"), rngs)
        self.counts = counts
        self.dtype = dtype

    def __call__(self, numbers: jax.Array) -> jax.Array:
        """The vectors with these numbers, [..., embed]. Not checked: a number outside the table gives NaN."""
        return with_logical_constraint(jnp.take(self.table[...], numbers, axis=0).astype(self.dtype), "embed")

    def scores(self, x: jax.Array) -> jax.Array:
        """x [..., embed] times every entry: float32 [..., entries], multiplied in `dtype`, summed in float32."""
        table = self.table[...].astype(self.dtype)
        scores = jnp.einsum("...e,ve->...v", x.astype(self.dtype), table, preferred_element_type=jnp.float32)
        return with_logical_constraint(scores, self.counts)


Waves = Literal["authors", "paper"]
"""`authors`: wavelengths end at exactly 10000 * 2 pi, as in the authors' own code. `paper`: one step before."""


def sinusoids(positions: jax.Array, features: int, waves: Waves = "authors") -> jax.Array:
    """The vectors of positions [...], float32 [..., features]: with i = 0 ... features / 2 - 1,

        PE(p, i) = sin(p / 10000^(i / (features / 2 - 1))),  PE(p, features / 2 + i) = cos(the same)

    Source: Vaswani et al., 2017, arXiv:1706.03762, in the form of the authors' own code: all sines, then all cosines
    (the paper interleaves them). With `waves="paper"` i is divided by features / 2, as the paper has it.
    """
    half = features // 2
    steps = max(half - 1, 1) if waves == "authors" else features / 2
    rates = np.exp(-math.log(10_000) / steps * np.arange(half)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * rates
    vectors = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    return jnp.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, features % 2)])
