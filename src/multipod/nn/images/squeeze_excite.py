"""Squeeze-and-excitation: channels weighted by what the whole image holds."""

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.nn.images.conv_norm import FAN_OUT, Dtype


class SqueezeExcite(nnx.Module):
    """x * sigmoid(expand(silu(reduce(mean of x over its pixels)))), with x [n, h, w, features].

    `reduce` has `squeezed` features. Both layers have biases; the mean is taken in float32.

    Source: arXiv:1709.01507, equations 2 to 4, with SiLU for ReLU as EfficientNet has it.
    """

    def __init__(self, features: int, squeezed: int, *, dtype: Dtype = "float32", rngs: nnx.Rngs) -> None:
        wide = jnp.dtype(dtype)
        self.reduce = nnx.Linear(features, squeezed, kernel_init=FAN_OUT, dtype=wide, rngs=rngs)
        self.expand = nnx.Linear(squeezed, features, kernel_init=FAN_OUT, dtype=wide, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x with its channels weighted, in x's dtype."""
        squeezed = x.mean(axis=(1, 2), dtype=jnp.float32)
        weights = nnx.sigmoid(self.expand(nnx.silu(self.reduce(squeezed))))
        return x * weights.astype(x.dtype)[:, None, None, :]
