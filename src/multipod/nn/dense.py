"""Dense layers, norms and the feed-forward blocks, their dims named (`multipod.nn.dims`).

Parameters are float32. What is computed in another type, bfloat16, is cast where it is used.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer, variance_scaling

from multipod.nn.by_example import dropout_layer
from multipod.nn.dims import constant, param
from multipod.nn.logical_axes import with_logical_constraint

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nnx.relu,
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
    "silu": nnx.silu,
}
"""`gelu` is the exact one, with erf; `gelu_tanh` the approximation by tanh (arXiv:1606.08415, section 2)."""

ComputeDtype = Literal["float32", "bfloat16"]


class Dense(nnx.Module):
    """x [..., *inputs] to [..., *outputs]: a sum over all input dims, with a bias of all output dims.

    Attributes:
      kernel: [*inputs, *outputs].
      bias: [*outputs], or None.
    """

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        bias: bool = True,
        init: Initializer | None = None,
        dtype: ComputeDtype = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        sizes = (*inputs.values(), *outputs.values())
        init = init or glorot(len(inputs), len(outputs))
        self.kernel = param(init, sizes, (*inputs, *outputs), rngs)
        self.bias = constant(0.0, tuple(outputs.values()), tuple(outputs)) if bias else None
        self.contracted = len(inputs)
        self.outputs = tuple(outputs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes and returns in `dtype`."""
        y = with_logical_constraint(
            jnp.tensordot(x.astype(self.dtype), self.kernel[...].astype(self.dtype), self.contracted), *self.outputs
        )
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def multiply_together(x: jax.Array, *layers: Dense) -> list[jax.Array]:
    """What each of `layers`, of equal sizes, makes of x, in one product.

    Where devices split their outputs, the gradient of x is then added up over the devices once, not once a layer.
    """
    dtype, contracted = layers[0].dtype, layers[0].contracted
    # [*inputs, layers, *outputs]
    kernels = jnp.stack([layer.kernel[...].astype(dtype) for layer in layers], contracted)
    every = with_logical_constraint(jnp.tensordot(x.astype(dtype), kernels, contracted), None, *layers[0].outputs)
    place = x.ndim - contracted
    each = [jax.lax.index_in_dim(every, number, place, keepdims=False) for number in range(len(layers))]
    return [
        y if layer.bias is None else y + layer.bias[...].astype(dtype) for y, layer in zip(each, layers, strict=True)
    ]


def glorot(inputs: int, outputs: int) -> Initializer:
    """Glorot's uniform initialiser for a kernel of so many input dims and, behind them, output dims.

    Source: Glorot and Bengio, 2010. Fan-in and fan-out are the products of the dims on either side.
    """
    return variance_scaling(1.0, "fan_avg", "uniform", tuple(range(inputs)), tuple(range(inputs, inputs + outputs)))


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + epsilon) * scale + bias over the last dim, computed in float32.

    Source: Ba et al., 2016, arXiv:1607.06450. The variance is that of the differences from the mean.
    """

    def __init__(self, features: int, *, epsilon: float = 1e-6) -> None:
        self.scale = constant(1.0, (features,), ("embed",))
        self.bias = constant(0.0, (features,), ("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x [..., features]; returns x's type."""
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...] + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dim, computed in float32.

    Source: Zhang and Sennrich, 2019, arXiv:1910.07467.
    """

    def __init__(self, features: int, *, epsilon: float = 1e-6) -> None:
        self.scale = constant(1.0, (features,), ("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x [..., features]; returns x's type."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...]).astype(x.dtype)


class GatedMlp(nnx.Module):
    """(act(x gate) * (x inner)) outer, without biases: GEGLU with `gelu` (arXiv:2002.05202)."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        init: Initializer | None = None,
        dtype: ComputeDtype = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        self.activation = activation
        inward = {"embed": features}, {"mlp": hidden}
        options = {"bias": False, "init": init, "dtype": dtype, "rngs": rngs}
        self.gate = Dense(*inward, **options)
        self.inner = Dense(*inward, **options)
        self.dropout = dropout_layer(dropout, rngs)
        self.outer = Dense({"mlp": hidden}, {"embed": features}, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., embed] to [..., embed], computed in the layer's type."""
        return self.outer(self.dropout(ACTIVATIONS[self.activation](self.gate(x)) * self.inner(x)))


class FeedForward(nnx.Module):
    """Two dense layers with an activation, and dropout, between them; [..., embed] to [..., embed]."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: Activation = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        init: Initializer | None = None,
        dtype: ComputeDtype = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        self.activation = activation
        self.inner = Dense({"embed": features}, {"mlp": hidden}, bias=bias, init=init, dtype=dtype, rngs=rngs)
        self.dropout = dropout_layer(dropout, rngs)
        self.outer = Dense({"mlp": hidden}, {"embed": features}, bias=bias, init=init, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes in `dtype`."""
        return self.outer(self.dropout(ACTIVATIONS[self.activation](self.inner(x))))
