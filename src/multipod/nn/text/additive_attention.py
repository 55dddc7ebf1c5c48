"""Attention by a sum and a tanh, normalised: what GNMT's decoder looks at its source with."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn.initializers import Initializer

from multipod.nn.dense import ComputeDtype, Dense
from multipod.nn.dims import constant, param


class Attended(NamedTuple):
    """What an attention gives.

    Attributes:
      context: float32 [n, queries, features], the weighted sum of what was encoded.
      weights: float32 [n, queries, places], which add up to 1 over the places that count.
    """

    context: jax.Array
    weights: jax.Array


class EncodedMemory(NamedTuple):
    """What is attended to.

    Attributes:
      encoded: [n, places, features].
      keys: [n, places, features], a product of these.
      mask: bool [n, places], which places count.
    """

    encoded: jax.Array
    keys: jax.Array
    mask: jax.Array


class AdditiveAttention(nnx.Module):
    """score(q, k) = sum over features of g v / |v| * tanh(W_k k + W_q q + b); a softmax over places; a sum of what was
    encoded (not of the keys).

    Source: Bahdanau et al., 2014, arXiv:1409.0473, normalised as in Salimans and Kingma, 2016, arXiv:1602.07868; g
    begins as 1 / sqrt(features), b as 0.
    """

    def __init__(self, features: int, *, init: Initializer, dtype: ComputeDtype = "float32", rngs: nnx.Rngs) -> None:
        options = {"bias": False, "init": init, "dtype": dtype, "rngs": rngs}
        self.query = Dense({"embed": features}, {"embed_out": features}, **options)
        self.key = Dense({"embed": features}, {"embed_out": features}, **options)
        self.vector = param(init, (features,), ("embed",), rngs)
        self.gain = constant(features**-0.5, (), ())
        self.bias = constant(0.0, (features,), ("embed",))

    def memory(self, encoded: jax.Array, mask: jax.Array) -> EncodedMemory:
        """Returns what queries attend to: encoded [n, places, features], of which `mask` [n, places] counts."""
        return EncodedMemory(encoded, self.key(encoded), mask)

    def __call__(self, queries: jax.Array, memory: EncodedMemory) -> Attended:
        """Attends for queries [n, queries, features], one query of all rows after the other.

        The sum inside the tanh of all queries at once would be [n, queries, places, features]; of one it is made again
        for the gradient.
        """
        projected = jnp.moveaxis(self.query(queries), 1, 0) + self.bias[...]
        vector = self._vector()

        @jax.checkpoint
        def scores(query: jax.Array) -> jax.Array:
            inside = jnp.tanh(query[:, None] + memory.keys)
            return jnp.einsum("npf,f->np", inside, vector.astype(inside.dtype), preferred_element_type=jnp.float32)

        every = jnp.moveaxis(lax.map(scores, projected), 0, 1)
        weights = jax.nn.softmax(jnp.where(memory.mask[:, None], every, -jnp.inf), -1)
        context = jnp.einsum(
            "nqp,npf->nqf",
            weights.astype(memory.encoded.dtype),
            memory.encoded,
            preferred_element_type=jnp.float32,
        )
        return Attended(context, weights)

    def _vector(self) -> jax.Array:
        vector = self.vector[...]
        return self.gain[...] * vector / jnp.linalg.norm(vector)
