"""A feature pyramid: maps of one width at every scale, each with what the coarser ones know."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from multipod.nn.images.conv_norm import Dtype
from multipod.nn.images.convolution import convolution
from multipod.nn.logical_axes import with_logical_constraint

HE_UNIFORM = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
"""Uniform with variance 1 / (kh kw c_in): torchvision's choice for pyramids (Kaiming-uniform with a = 1)."""


class BiasedConv(nnx.Module):
    """A convolution with a bias: [n, h, w, features_in] to [n, h', w', features].

    The images may be split; with `whole` they are not.
    """

    def __init__(
        self,
        features_in: int,
        features: int,
        size: int,
        *,
        stride: int = 1,
        padding: str | tuple[tuple[int, int], tuple[int, int]] = "SAME",
        init: Initializer = HE_UNIFORM,
        whole: bool = False,
        dtype: Dtype = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        self.whole = whole
        self.conv = nnx.Conv(
            features_in,
            features,
            (size, size),
            strides=stride,
            padding=padding,
            kernel_init=init,
            conv_general_dilated=convolution,
            dtype=jnp.dtype(dtype),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The convolution's output, in the layer's dtype."""
        y = self.conv(x)
        return y if self.whole else with_logical_constraint(y, "height", "width", None)


class FeaturePyramid(nnx.Module):
    """Maps C of falling size to maps P of as many sizes and one more, all with `features` channels.

    1x1 convolutions bring each C to `features`; from the coarsest down, the map above is doubled by nearest neighbours
    and added; a 3x3 convolution follows on each. The last P is every second pixel of the one before it. No norms, no
    activations, biases throughout.

    Source: arXiv:1612.03144, section 3; the last map is Mask R-CNN's.
    """

    def __init__(
        self, features_in: Sequence[int], features: int = 256, *, dtype: Dtype = "float32", rngs: nnx.Rngs
    ) -> None:
        self.lateral = nnx.List([BiasedConv(n, features, 1, dtype=dtype, rngs=rngs) for n in features_in])
        self.output = nnx.List([BiasedConv(features, features, 3, dtype=dtype, rngs=rngs) for _ in features_in])

    def __call__(self, maps: Sequence[jax.Array]) -> list[jax.Array]:
        """The pyramid of `maps`, each [n, h, w, c] with sides half, rounded up, of those before it."""
        inner = [layer(x) for layer, x in zip(self.lateral, maps, strict=True)]
        for k in range(len(inner) - 2, -1, -1):
            inner[k] = inner[k] + double(inner[k + 1], inner[k].shape[1:3])
        outer = [layer(x) for layer, x in zip(self.output, inner, strict=True)]
        # Whole: where it is split XLA's partitioner fails over the gradient of the slice (jaxlib 0.10.2).
        coarsest = with_logical_constraint(outer[-1], None, None, None)
        return [*outer, with_logical_constraint(coarsest[:, ::2, ::2], "height", "width", None)]


def double(x: jax.Array, sides: tuple[int, ...]) -> jax.Array:
    """[n, h, w, c] with every pixel twice along both sides, cut to `sides`, which are even or one less.

    By repetition, not by `jax.image.resize`, which XLA gathers whole where images are split (docs/design/spatial.md).
    """
    wide = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)[:, : sides[0], : sides[1]]
    return with_logical_constraint(wide, "height", "width", None)
