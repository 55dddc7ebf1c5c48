"""Multi-head attention: the plain form, the way to the fused ones, and keys and values that are kept while decoding.

Shapes: n examples, q queries, k keys, h heads, d features of a head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from multipod.nn.by_example import dropout_layer
from multipod.nn.dense import ComputeDtype, Dense, multiply_together
from multipod.nn.text.fused_attention import AttentionKernel, case_of, choose, count_choice, fused_attention
from multipod.nn.text.segments import Segments


class KeysValues(NamedTuple):
    """What is attended to: `keys` and `values`, each [n, k, h, d]."""

    keys: jax.Array
    values: jax.Array


def attend(
    queries: jax.Array,
    memory: KeysValues,
    mask: jax.Array | None = None,
    dropout: nnx.Dropout | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """softmax(queries keys^T / sqrt(d) + bias) values, for queries [n, q, h, d]; the same shape and type come back.

    Scores and softmax are float32 whatever the type of the queries. `mask` is bool, broadcast to [n, h, q, k], and so
    is `bias`, numbers (`multipod.nn.text.relative_positions`). `dropout` drops weights and scales up the others.

    Source: Vaswani et al., 2017, arXiv:1706.03762, equation 1. Memory: 4 n h q k bytes, nothing is tiled.
    """
    queries = queries * queries.shape[-1] ** -0.5
    scores = jnp.einsum("nqhd,nkhd->nhqk", queries, memory.keys, preferred_element_type=jnp.float32)
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, -1).astype(memory.values.dtype)
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("nhqk,nkhd->nqhd", weights, memory.values)


def attend_by(
    kernel: AttentionKernel,
    queries: jax.Array,
    memory: KeysValues,
    mask: Segments | jax.Array | None = None,
    dropout: nnx.Dropout | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`attend` by the fused kernel of the platform that this is traced for, where it can and `kernel` allows.

    Raises:
      RecipeError: a kernel by name that cannot do this (`multipod.nn.text.fused_attention.choose`).
    """
    drops = 0.0 if dropout is None or dropout.deterministic else dropout.rate
    segments = mask if isinstance(mask, Segments) else None
    case = case_of(queries, memory.keys, bias=bias is not None, segments=mask is segments, dropout=drops)
    choice = choose(kernel, case)
    count_choice(choice)
    if choice.kernel != "plain":
        return fused_attention(choice.kernel, queries, memory.keys, memory.values, segments)
    return attend(queries, memory, mask.mask() if isinstance(mask, Segments) else mask, dropout, bias)


class Attention(nnx.Module):
    """Projections to queries, keys and values, `attend_by`, and a projection back.

    A head has `kv` features; 0 takes features / heads. Scores are divided by the root of `kv` unless `scaled` is false,
    as in T5 (arXiv:1910.10683), whose initial values have that factor.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        bias: bool = False,
        scaled: bool = True,
        kv: int = 0,
        dropout: float = 0.0,
        kernel: AttentionKernel = "auto",
        init: Initializer | None = None,
        dtype: ComputeDtype = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        assert kv or features % heads == 0, f"{features} features do not divide over {heads} heads"
        outside, inside = {"embed": features}, {"heads": heads, "kv": kv or features // heads}
        options = {"bias": bias, "init": init, "dtype": dtype, "rngs": rngs}
        self.query = Dense(outside, inside, **options)
        self.key = Dense(outside, inside, **options)
        self.value = Dense(outside, inside, **options)
        self.out = Dense(inside, outside, **options)
        self.dropout = dropout_layer(dropout, rngs)
        self.kernel = kernel
        # `attend` and the fused kernels divide by this root.
        self.factor = 1.0 if scaled else inside["kv"] ** 0.5

    def __call__(
        self,
        x: jax.Array,
        memory: KeysValues,
        mask: Segments | jax.Array | None = None,
        position: jax.Array | None = None,
    ) -> jax.Array:
        """Each of x [n, q, embed] attends to `memory`; [n, q, embed]. `position` is added to the scores."""
        query = self._unscaled(self.query(x))
        return self.out(attend_by(self.kernel, query, memory, mask, self.dropout, position))

    def to_itself(self, x: jax.Array, mask: Segments | jax.Array | None = None) -> jax.Array:
        """Each of x [n, q, embed] attends to all of x."""
        query, key, value = multiply_together(x, self.query, self.key, self.value)
        query = self._unscaled(query)
        return self.out(attend_by(self.kernel, query, KeysValues(key, value), mask, self.dropout))

    def _unscaled(self, query: jax.Array) -> jax.Array:
        return query if self.factor == 1 else query * self.factor

    def memory(self, x: jax.Array) -> KeysValues:
        """The keys and values of x [n, k, embed]."""
        return KeysValues(*multiply_together(x, self.key, self.value))

    def empty(self, rows: int, length: int) -> KeysValues:
        """Room for the keys and values of `length` positions, all zero."""
        shape = rows, length, *self.key.kernel.shape[1:]
        return KeysValues(jnp.zeros(shape, self.key.dtype), jnp.zeros(shape, self.value.dtype))


def store(memory: KeysValues, new: KeysValues, position: jax.Array) -> KeysValues:
    """`memory` with `new` [n, 1, h, d] at `position`."""
    return KeysValues(
        *(jax.lax.dynamic_update_slice_in_dim(old, one, position, 1) for old, one in zip(memory, new, strict=True))
    )
