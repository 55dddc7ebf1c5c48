"""The layers of Transformers: an encoder's and a decoder's, normalised before or after each block.

Shapes: n examples, q positions of the layer's own sequence, k of the other one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from multipod.nn.by_example import dropout_layer
from multipod.nn.dense import Activation, ComputeDtype, FeedForward, LayerNorm
from multipod.nn.text.attention import Attention, KeysValues, store
from multipod.nn.text.fused_attention import AttentionKernel
from multipod.nn.text.segments import Segments

Norm = Literal["pre", "post"]
"""`pre`: x + f(norm(x)), with one more norm after the last layer. `post`: norm(x + f(x)), as in arXiv:1706.03762."""


@dataclass(frozen=True)
class LayerSpec:
    """What all layers of a model share.

    Attributes:
      features: features between layers.
      hidden: features inside a feed-forward block.
      heads: heads of an attention.
      norm: where the layer norms are.
      epsilon: of the layer norms.
      activation: of the feed-forward blocks.
      attention_bias: whether the projections of an attention have biases.
      dropout: share dropped behind each block and of attention weights.
      hidden_dropout: share dropped inside the feed-forward blocks.
      kernel: who computes attention.
      dtype: type of all products; norms, softmax and logits are float32.
      init: of the kernels; None is Glorot's uniform one.
    """

    features: int
    hidden: int
    heads: int
    norm: Norm = "pre"
    epsilon: float = 1e-6
    activation: Activation = "relu"
    attention_bias: bool = False
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    kernel: AttentionKernel = "auto"
    dtype: ComputeDtype = "float32"
    init: Initializer | None = None

    def attention(self, rngs: nnx.Rngs) -> Attention:
        """A fresh attention."""
        return Attention(
            self.features,
            self.heads,
            bias=self.attention_bias,
            dropout=self.dropout,
            kernel=self.kernel,
            init=self.init,
            dtype=self.dtype,
            rngs=rngs,
        )

    def mlp(self, rngs: nnx.Rngs) -> FeedForward:
        """A fresh feed-forward block."""
        return FeedForward(
            self.features,
            self.hidden,
            activation=self.activation,
            dropout=self.hidden_dropout,
            init=self.init,
            dtype=self.dtype,
            rngs=rngs,
        )


class Residual(nnx.Module):
    """The path around a block: its layer norm, its dropout, its sum."""

    def __init__(self, spec: LayerSpec, rngs: nnx.Rngs) -> None:
        self.norm = LayerNorm(spec.features, epsilon=spec.epsilon)
        self.dropout = dropout_layer(spec.dropout, rngs)
        self.before = spec.norm == "pre"

    def __call__(self, x: jax.Array, block: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """x and, added to it, what `block` makes of it."""
        if self.before:
            return x + self.dropout(block(self.norm(x)))
        return self.norm(x + self.dropout(block(x)))


class EncoderLayer(nnx.Module):
    """Self-attention and a feed-forward block."""

    def __init__(self, spec: LayerSpec, rngs: nnx.Rngs) -> None:
        self.attention = spec.attention(rngs)
        self.attention_residual = Residual(spec, rngs)
        self.mlp = spec.mlp(rngs)
        self.mlp_residual = Residual(spec, rngs)

    def __call__(self, x: jax.Array, mask: Segments) -> jax.Array:
        """x [n, q, features]; `mask` says who attends to whom."""
        x = self.attention_residual(x, lambda y: self.attention.to_itself(y, mask))
        return self.mlp_residual(x, self.mlp)


class DecoderLayer(nnx.Module):
    """Self-attention, attention to the encoder's output, and a feed-forward block."""

    def __init__(self, spec: LayerSpec, rngs: nnx.Rngs) -> None:
        self.attention = spec.attention(rngs)
        self.attention_residual = Residual(spec, rngs)
        self.cross = spec.attention(rngs)
        self.cross_residual = Residual(spec, rngs)
        self.mlp = spec.mlp(rngs)
        self.mlp_residual = Residual(spec, rngs)

    def __call__(self, x: jax.Array, encoded: jax.Array, mask: Segments, cross_mask: Segments) -> jax.Array:
        """x [n, q, features] and the encoder's output [n, k, features]; `mask` among x, `cross_mask` from x to it."""
        x = self.attention_residual(x, lambda y: self.attention.to_itself(y, mask))
        x = self.cross_residual(x, lambda y: self.cross(y, self.cross.memory(encoded), cross_mask))
        return self.mlp_residual(x, self.mlp)

    def step(
        self, x: jax.Array, position: jax.Array, own: KeysValues, source: KeysValues, cross_mask: jax.Array
    ) -> tuple[jax.Array, KeysValues]:
        """`__call__` for the token at `position` alone, x [n, 1, features], after those before it.

        `own` holds this layer's keys and values [n, length, h, d] of the positions before; it comes back with those of
        this one. `source` is `cross.memory(encoded)`.
        """
        kept = own

        def attention(y: jax.Array) -> jax.Array:
            nonlocal kept
            kept = store(own, self.attention.memory(y), position)
            return self.attention(y, kept, (jnp.arange(own.keys.shape[1]) <= position)[None, None, None])

        x = self.attention_residual(x, attention)
        x = self.cross_residual(x, lambda y: self.cross(y, source, cross_mask))
        return self.mlp_residual(x, self.mlp), kept
