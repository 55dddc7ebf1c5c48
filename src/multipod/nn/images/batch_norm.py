"""Batch normalisation whose statistics span a rectangular tile of the mesh."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from multipod.errors import LayoutError
from multipod.execute.sums import mean_in_order
from multipod.layout.axes import DATA_AXES
from multipod.nn.padding import example_mask

Tile = Literal["all"] | tuple[int, int] | int
"""What shares statistics: rows x columns of devices, (1, 1) being each for itself; "all", the whole mesh; or so many
neighbours in the batch, on however many devices they lie (`example_tile`), as the published runs say it."""

DeviceTile = Literal["all"] | tuple[int, int]
"""A `Tile` of devices."""

Moving = Literal["pooled", "averaged", "kept"]
"""What evaluation normalises with; t runs over the tiles, and E is the moving average over updates:

- `pooled`: E[avg_t(m1_t)] and E[avg_t(m2_t) - avg_t(m1_t)^2], the variance of the whole batch, whatever the tile. Ours.
- `averaged`: E[avg_t(mean_t)] and E[avg_t(var_t)]: the variance between tiles is lost. EfficientNet's released code.
  The MLPerf v0.7 ResNet and SSD in JAX average the tiles' moving moments before an evaluation: the same number.
- `kept`: each tile's moving moments M_t = E[mean_t], V_t = E[var_t] are kept, and pooled in the evaluation:
  avg_t(M_t), avg_t(V_t + M_t^2) - avg_t(M_t)^2. MLPerf v0.7 ResNet in TensorFlow. M_t are averages over updates
  already, so of the variance between tiles no more than (1 - momentum) / (1 + momentum) is in it.
"""


class TileBatchNorm(nnx.Module):
    """Batch norm over the last dim's channels, with statistics from all examples on one tile of the mesh.

    In training, on a tile with local means m1 = mean(x) and m2 = mean(x^2), both in float32:

        mean = avg(m1),  var = avg(m2) - mean^2,  y = (x - mean) / sqrt(var + epsilon) * scale + bias

    where avg runs over the tile in one message of 2 C floats and is differentiated through (so the
    backward pass sends one such message too). The moving moments take by default the *pooled* statistics of
    the whole mesh, so they are the same on every device and do not depend on the tile; `Moving` says what
    else was published. The moving variance is the biased one, as in Flax. Each device of a mesh must hold the
    same number of rows.

    Where rows are padding (`multipod.nn.padding`) m1 and m2 are sums over the examples alone, over the number
    of all rows, and the same message carries w, the share of rows that are examples: then
    mean = avg(m1) / avg(w) and var = avg(m2) / avg(w) - mean^2, so each *example* counts the same,
    on whichever device it lies.

    Outside a program over the mesh axes the whole batch lies on one device. A device that holds several tiles, each of
    a number of examples, normalises each by itself.

    Args:
      features: channels.
      tile: what shares statistics.
      moving: what evaluation normalises with.
      tiles: with `kept`, how many tiles the mesh holds: so many moving moments are kept.
      momentum: of the moving moments.
      epsilon: added to the variance.
      rngs: not used.

    Source: arXiv:1811.06992 and arXiv:2011.03641 (two-dimensional groups).

    Raises:
      LayoutError: on the first call, if the tile does not divide the mesh, if the mesh holds other than `tiles` tiles,
        or if the first dim of x is not that of the batch while rows of it are padding; at once for `kept` with a tile
        of examples, whose number would depend on the batch, and for one of none.
    """

    def __init__(
        self,
        features: int,
        *,
        tile: Tile = "all",
        moving: Moving = "pooled",
        tiles: int = 1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        rngs: nnx.Rngs,
    ) -> None:
        del rngs  # nothing here is random; NNX layers take it by custom
        if isinstance(tile, int) and tile < 1:
            raise LayoutError(f"batch norm over {tile} examples has no statistics. Take 1 or more, or all.")
        if moving == "kept" and isinstance(tile, int):
            raise LayoutError(
                f"batch norm over {tile} examples cannot keep each tile's moments, whose number depends on the batch. "
                "Give rows x columns of devices, or moving='pooled'."
            )
        kept = (tiles, features) if moving == "kept" else (features,)
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(kept))
        self.var = nnx.BatchStat(jnp.ones(kept))
        self.tile = tile
        self.moving = moving
        self.momentum = momentum
        self.epsilon = epsilon
        self.use_running_average = False

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x, [..., features], in x's dtype."""
        if self.use_running_average:
            mean, var = self._judged_by()
        else:
            mask = example_mask()
            x = x if mask is None else _without_padding(x, mask)
            tile = example_tile(self.tile, len(x), _mesh_sizes()) if isinstance(self.tile, int) else self.tile
            if isinstance(tile, int):
                return self._normalise_groups(x, mask, len(x) // tile)
            moments = tile_mean(_moments(x, mask), tile)
            mean, var = _mean_and_var(moments)
            self._follow(moments, tile)
        return self._normalise(x, mean, var)

    def _normalise(self, x: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
        factor = lax.rsqrt(var + self.epsilon) * self.scale[...]
        return (x.astype(jnp.float32) * factor + (self.bias[...] - mean * factor)).astype(x.dtype)

    def _normalise_groups(self, x: jax.Array, mask: jax.Array | None, groups: int) -> jax.Array:
        """Normalises each of the groups of examples that this device holds, one behind the other."""
        parts = x.reshape(groups, -1, *x.shape[1:])
        masks = None if mask is None else mask.reshape(groups, -1)
        moments = jax.vmap(_moments)(parts, masks)
        self._follow(moments.mean(0) if self.moving == "pooled" else moments, (1, 1))
        y = jax.vmap(self._normalise)(parts, *jax.vmap(_mean_and_var)(moments))
        return y.reshape(x.shape)

    def _follow(self, moments: jax.Array, tile: DeviceTile) -> None:
        mean, var = self._moved_by(lax.stop_gradient(moments), tile)
        self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * mean
        self.var[...] = self.momentum * self.var[...] + (1 - self.momentum) * var

    def _moved_by(self, moments: jax.Array, tile: DeviceTile) -> tuple[jax.Array, jax.Array]:
        """What the moving moments take from this update, given the moments of this device's tile, or of its groups."""
        if self.moving == "pooled":
            return _mean_and_var(moments if tile == "all" else tile_mean(moments, "all"))
        if moments.ndim == 3:
            return tuple(tile_mean(jnp.stack([one.mean(0) for one in jax.vmap(_mean_and_var)(moments)]), "all"))
        found = of_each_tile(jnp.stack(_mean_and_var(moments)), tile)
        if self.moving == "kept" and len(found) != len(self.mean):
            raise LayoutError(
                f"batch norm keeps the moments of {len(self.mean)} tiles, and the mesh holds {len(found)}. Give "
                f"tiles={len(found)}, or moving='pooled', which fits any mesh."
            )
        mean, var = jnp.moveaxis(found, 1, 0)
        return (mean, var) if self.moving == "kept" else (mean.mean(0), var.mean(0))

    def _judged_by(self) -> tuple[jax.Array, jax.Array]:
        if self.moving != "kept":
            return self.mean[...], self.var[...]
        mean = self.mean[...].mean(0)
        return mean, (self.var[...] + jnp.square(self.mean[...] - mean)).mean(0)


class FrozenNorm(nnx.Module):
    """A batch norm that learns nothing: (x - mean) / sqrt(var + epsilon) * scale + bias, all four of them statistics.

    For networks that start from trained weights and see few images at a time. Training leaves them as they are.

    Source: arXiv:1703.06870's released code.
    """

    def __init__(self, features: int, *, epsilon: float = 1e-5) -> None:
        self.scale = nnx.BatchStat(jnp.ones(features))
        self.bias = nnx.BatchStat(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x, [..., features], in x's dtype."""
        factor = lax.rsqrt(self.var[...] + self.epsilon) * self.scale[...]
        return (x.astype(jnp.float32) * factor + (self.bias[...] - self.mean[...] * factor)).astype(x.dtype)


def example_tile(count: int, examples: int, sizes: tuple[int, int] | None) -> Tile:
    """What `count` neighbours in the batch are, where each device of a mesh of `sizes` holds so many `examples`.

    A number of examples where a device holds several such groups, else part of a row of devices, or whole rows, or
    "all": the same examples are together on every mesh, so that what is learnt does not depend on it. Where `count` is
    none of these it is the next larger that is.
    """
    rows, columns = sizes or (1, 1)
    if count <= examples:
        inside = min(n for n in range(count, examples + 1) if examples % n == 0)
        return inside if inside < examples else (1, 1)
    devices = -(-count // examples)
    if devices <= columns:
        return 1, min(n for n in range(devices, columns + 1) if columns % n == 0)
    tall = -(-devices // columns)
    return (min(n for n in range(tall, rows + 1) if rows % n == 0), columns) if tall < rows else "all"


def spanned_examples(tile: Tile, batch: int, sizes: tuple[int, int]) -> int:
    """Over how many examples of a batch a tile normalises, on a mesh of `sizes`."""
    examples = -(-batch // (sizes[0] * sizes[1]))
    tile = example_tile(tile, examples, sizes) if isinstance(tile, int) else tile
    if isinstance(tile, int):
        return tile
    return batch if tile == "all" else min(batch, examples * tile[0] * tile[1])


def tile_mean(x: jax.Array, tile: DeviceTile) -> jax.Array:
    """The mean of x over the tile that this device is in; x itself outside a program over the mesh axes."""
    sizes = _mesh_sizes()
    if sizes in (None, (1, 1)) or tile == (1, 1):
        return x
    if tile == "all" or tile == sizes:
        return mean_in_order(x, _long_axes())
    return mean_in_order(x, DATA_AXES, tuple(map(tuple, tile_groups(sizes, tile))))


def of_each_tile(x: jax.Array, tile: DeviceTile) -> jax.Array:
    """[tiles, ...]: x, which is the same on all devices of a tile, of every tile of the mesh, in row-major order."""
    sizes = _mesh_sizes()
    if sizes is None or tile == "all" or tile == sizes:
        return x[None]
    firsts = [group[0] for group in tile_groups(sizes, tile)]
    return lax.all_gather(x, _long_axes())[jnp.asarray(firsts)]


def tile_groups(sizes: tuple[int, int], tile: tuple[int, int], parts: int = 1) -> list[list[int]]:
    """The row-major device numbers of each tile of a mesh of `sizes`, tile by tile, neighbours next to each other.

    The devices of a tile come as a snake, 0 1 2 3 / 7 6 5 4 in a tile of two rows: what passes them in this order
    goes from neighbour to neighbour, and with an even number of rows ends beside its beginning.

    Args:
      sizes: rows and columns of the mesh.
      tile: rows and columns of the images that share statistics.
      parts: devices that an image is split over; they lie next to each other in a row. So a tile has `parts` times
        as many columns of devices.

    Source: arXiv:1811.06992 (tiles); the MLPerf v0.7 submissions (snake; tiles stretched along the columns).

    Raises:
      LayoutError: the tile does not divide the mesh.
    """
    (rows, columns), (height, width) = sizes, (tile[0], tile[1] * parts)
    if parts < 1 or height < 1 or width < 1 or rows % height or columns % width:
        split = f" of images in {parts} parts, {height}x{width} devices," if parts != 1 else ""
        raise LayoutError(
            f"batch-norm tile {tile[0]}x{tile[1]}{split} does not divide mesh {rows}x{columns}. "
            f"Take a height that divides {rows} and a width that divides {columns}, or all."
        )
    return [
        [y * columns + x for y in range(top, top + height) for x in _along(left, width, turn=(y - top) % 2 == 1)]
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ]


def _along(left: int, width: int, turn: bool) -> range:
    return range(left + width - 1, left - 1, -1) if turn else range(left, left + width)


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


def _long_axes() -> tuple[str, ...]:
    """The data axes of more than one device: `jax.vmap`, unlike a mesh, gathers along one axis only."""
    return tuple(axis for axis in DATA_AXES if lax.axis_size(axis) > 1)
