"""A convolution and the batch norm behind it, the unit of which image networks are made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.nn.images.batch_norm import FrozenNorm, Moving, Tile, TileBatchNorm
from multipod.nn.images.convolution import convolution, convolution_with_folded_stride
from multipod.nn.images.depthwise import depthwise_convolution
from multipod.nn.logical_axes import with_logical_constraint

Dtype = Literal["float32", "bfloat16"]
"""Of convolutions and what passes between layers. Parameters, statistics and their arithmetic are float32 always."""

FAN_OUT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
"""Normal with variance 2 / (kh kw c_out): keeps the size of gradients through ReLU (arXiv:1502.01852, eq. 14)."""

# Each group counts alone: a filter's output is one channel, whatever their number.
FAN_OUT_DEPTHWISE = nnx.initializers.variance_scaling(2.0, "fan_out", "normal", out_axis=(), batch_axis=-1)
"""Normal with variance 2 / (kh kw), for depthwise kernels [kh, kw, 1, c]."""


@dataclass(frozen=True)
class Style:
    """What all the ConvNorms of a network share.

    Attributes:
      tile: devices, or examples, that share statistics.
      momentum: of the moving moments.
      epsilon: added to the variance.
      padding: `same` pads as TensorFlow does, with the odd pixel after the image; `symmetric` pads (size - 1) / 2
        pixels on each side. They differ for strides above 1 only.
      dtype: of activations.
      moving: what evaluation normalises with, see `multipod.nn.images.batch_norm.Moving`.
      tiles: with `kept`, how many tiles the mesh holds.
      frozen: norms that learn nothing (`multipod.nn.images.batch_norm.FrozenNorm`).
    """

    tile: Tile
    momentum: float
    epsilon: float
    padding: Literal["same", "symmetric"]
    dtype: Dtype
    moving: Moving = "pooled"
    tiles: int = 1
    frozen: bool = False


class ConvNorm(nnx.Module):
    """activate(norm(conv(x))): [n, h, w, features_in] to [n, ceil(h / stride), ceil(w / stride), features].

    The kernel is `size` x `size`, odd, without a bias, which the norm would take away again; initialised normal by
    fan-out. `groups` is 1 or, for a depthwise convolution, the number of features. With `zero` the scale of the norm
    begins at zero, so that a residual block begins as the identity (arXiv:1706.02677, section 5.1). With
    `fold` the stride is folded into the channels (`multipod.nn.images.convolution.convolution_with_folded_stride`).
    """

    def __init__(
        self,
        style: Style,
        features_in: int,
        features: int,
        size: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activate: Callable[[jax.Array], jax.Array] | None = None,
        zero: bool = False,
        fold: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        around = ((size // 2, size // 2),) * 2
        kind: dict[str, Any] = {"kernel_init": FAN_OUT}
        kind["conv_general_dilated"] = convolution_with_folded_stride if fold else convolution
        if groups > 1:
            kind = {"kernel_init": FAN_OUT_DEPTHWISE, "conv_general_dilated": depthwise_convolution}
        self.conv = nnx.Conv(
            features_in,
            features,
            (size, size),
            strides=stride,
            padding="SAME" if style.padding == "same" else around,
            feature_group_count=groups,
            use_bias=False,
            dtype=jnp.dtype(style.dtype),
            rngs=rngs,
            **kind,
        )
        self.norm = self._norm(style, features, rngs)
        if zero and not style.frozen:
            self.norm.scale = nnx.Param(jnp.zeros(features))
        self.activate = activate

    @staticmethod
    def _norm(style: Style, features: int, rngs: nnx.Rngs) -> TileBatchNorm | FrozenNorm:
        if style.frozen:
            return FrozenNorm(features, epsilon=style.epsilon)
        return TileBatchNorm(
            features,
            tile=style.tile,
            moving=style.moving,
            tiles=style.tiles,
            momentum=style.momentum,
            epsilon=style.epsilon,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output, in the style's dtype."""
        x = self.norm(with_logical_constraint(self.conv(x), "height", "width", None))
        return x if self.activate is None else self.activate(x)
