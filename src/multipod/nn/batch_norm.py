"""Batch normalisation whose statistics span a rectangular tile of the mesh."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from multipod.errors import LayoutError
from multipod.execute.sums import mean_in_order
from multipod.layout.layout import DATA_AXES
from multipod.nn.padding import example_mask

Tile = Literal["all"] | tuple[int, int]
"""Rows x columns of devices that share statistics: (1, 1) is each device for itself, "all" the whole mesh."""


class TileBatchNorm(nnx.Module):
    """Batch norm over the last dim's channels, with statistics from all examples on one tile of the mesh.

    In training, on a tile with local means m1 = mean(x) and m2 = mean(x^2), both in float32:

        mean = avg(m1),  var = avg(m2) - mean^2,  y = (x - mean) / sqrt(var + epsilon) * scale + bias

    where avg runs over the tile in one message of 2 C floats and is differentiated through (so the
    backward pass sends one such message too). The moving moments take the *pooled* statistics of
    the whole mesh, var = avg(var_t + mean_t^2) - avg(mean_t)^2 over its tiles t, so they are the
    same on every device and do not depend on the tile. The moving variance is the biased one, as
    in Flax. Each device of a mesh must hold the same number of rows.

    Where rows are padding (`multipod.nn.padding`) m1 and m2 are sums over the examples alone, over the number
    of all rows, and the same message carries w, the share of rows that are examples: then
    mean = avg(m1) / avg(w) and var = avg(m2) / avg(w) - mean^2, so each *example* counts the same,
    on whichever device it lies.

    Outside a program over the mesh axes the whole batch is one tile.

    Source: arXiv:1811.06992 and arXiv:2011.03641 (two-dimensional groups); the pooled variance is
    that of the authors' MLPerf v0.7 ResNet, which pools once before evaluation where we pool each update.

    Raises:
      LayoutError: on the first call, if the tile does not divide the mesh, or if the first dim of x is not
        that of the batch while rows of it are padding.
    """

    def __init__(
        self,
        features: int,
        *,
        tile: Tile = "all",
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        rngs: nnx.Rngs,
    ) -> None:
        del rngs  # nothing here is random; NNX layers take it by custom
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))
        self.tile = tile
        self.momentum = momentum
        self.epsilon = epsilon
        self.use_running_average = False

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x, [..., features], in x's dtype."""
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            mask = example_mask()
            x = x if mask is None else _without_padding(x, mask)
            moments = tile_mean(_moments(x, mask), self.tile)
            mean, var = _mean_and_var(moments)
            self._follow(moments)
        factor = lax.rsqrt(var + self.epsilon) * self.scale[...]
        return (x.astype(jnp.float32) * factor + (self.bias[...] - mean * factor)).astype(x.dtype)

    def _follow(self, moments: jax.Array) -> None:
        pooled = lax.stop_gradient(moments)
        mean, var = _mean_and_var(pooled if self.tile == "all" else tile_mean(pooled, "all"))
        self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * mean
        self.var[...] = self.momentum * self.var[...] + (1 - self.momentum) * var


def tile_mean(x: jax.Array, tile: Tile) -> jax.Array:
    """The mean of x over the tile that this device is in; x itself outside a program over the mesh axes."""
    sizes = _mesh_sizes()
    if sizes is None or tile == (1, 1):
        return x
    if tile == "all" or tile == sizes:
        return mean_in_order(x, DATA_AXES)
    return mean_in_order(x, DATA_AXES, tuple(map(tuple, tile_groups(sizes, tile))))


def tile_groups(sizes: tuple[int, int], tile: tuple[int, int]) -> list[list[int]]:
    """The row-major device numbers of each tile of a mesh of `sizes`, tile by tile.

    Raises:
      LayoutError: the tile does not divide the mesh.
    """
    (rows, columns), (height, width) = sizes, tile
    if height < 1 or width < 1 or rows % height or columns % width:
        raise LayoutError(
            f"batch-norm tile {height}x{width} does not divide mesh {rows}x{columns}. "
            f"Take a height that divides {rows} and a width that divides {columns}, or all."
        )
    return [
        [y * columns + x for y in range(top, top + height) for x in range(left, left + width)]
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ]


def _without_padding(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x with zeros in the rows that are padding, whatever was there."""
    if x.shape[0] != len(mask):
        raise LayoutError(
            f"batch norm of x {x.shape}: the first dim is not that of the batch, which has {len(mask)} rows, some of "
            "them padding. Keep it first, or train on a mesh that the batch divides over."
        )
    return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def _moments(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[mean(x), mean(x^2)] over all but the last dim, float32, as one array of shape [2, features].

    With a mask a third row is the share of true ones, and the other rows of x are zeros: [3, features].
    """
    wide = x.astype(jnp.float32)
    dims = tuple(range(x.ndim - 1))
    shares = [] if mask is None else [jnp.full(x.shape[-1], mask.mean(dtype=jnp.float32))]
    return jnp.stack([wide.mean(dims), jnp.square(wide).mean(dims), *shares])


def _mean_and_var(moments: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, square, *shares = moments
    for share in shares:
        share = jnp.where(share > 0, share, 1)  # a tile may hold nothing but padding
        mean, square = mean / share, square / share
    return mean, jnp.maximum(square - jnp.square(mean), 0)  # rounding may leave a constant channel below zero


def _mesh_sizes() -> tuple[int, int] | None:
    try:
        return lax.axis_size(DATA_AXES[0]), lax.axis_size(DATA_AXES[1])
    except NameError:  # no such axis here: not inside a program over the mesh
        return None
