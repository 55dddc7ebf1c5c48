"""Lookups in tables that are split over the devices of a mesh, for use inside `jax.shard_map`.

Every function takes this device's part of a table and of the batch, and returns this device's examples, whole. JAX
differentiates through the collectives: what was gathered is reduce-scattered on the way back, and so on.
`multipod.layout.tables` says what each way costs.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.layout.tables import PlacedTable

Axes = str | tuple[str, ...]


def part(table: np.ndarray, placed: PlacedTable, devices: int) -> np.ndarray:
    """A table in the parts of all devices, [devices, ...], each as the functions below take it; padding is zero.

    Of way "table", devices that do not have it hold zeros of its size: for tests and small tables.
    """
    if placed.way == "replicated":
        return np.broadcast_to(table, (devices, *table.shape))
    if placed.way == "column":
        return np.stack(np.split(table, devices, axis=1))
    if placed.way == "table":
        return np.stack([table * (device == placed.device) for device in range(devices)])
    padded = np.zeros((math.ceil(len(table) / devices) * devices, table.shape[1]), table.dtype)
    padded[: len(table)] = table
    return np.stack([padded[device::devices] for device in range(devices)])


def lookup(placed: PlacedTable, own: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    """Vectors [examples, features] of this device's `ids` [examples, hot], those of one example added up.

    `own` is this device's part of the table, `axes` the mesh axes over which both table and batch are split. An id
    outside the table gives NaN, whoever would hold it.
    """
    known = (ids >= 0) & (ids < placed.rows)
    vectors = _WAYS[placed.way](placed, own, jnp.where(known, ids, 0), axes)
    return jnp.where(known.all(-1, keepdims=True), vectors, jnp.nan)


def _replicated(placed: PlacedTable, own: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    return own[ids].sum(-2)


def _by_row(placed: PlacedTable, own: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    devices, device = lax.axis_size(axes), lax.axis_index(axes)
    ids = lax.all_gather(ids, axes, tiled=True)
    mine = ids % devices == device
    rows = jnp.where(mine[..., None], own[jnp.where(mine, ids // devices, 0)], 0)
    return lax.psum_scatter(rows.sum(-2), axes, tiled=True)


def _by_column(placed: PlacedTable, own: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    columns = own[lax.all_gather(ids, axes, tiled=True)].sum(-2)
    return lax.all_to_all(columns, axes, split_axis=0, concat_axis=1, tiled=True)


def _by_table(placed: PlacedTable, own: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    # As partial sums of which all but one are zero: XLA has no scatter from a single device.
    vectors = own[lax.all_gather(ids, axes, tiled=True)].sum(-2)
    mine = lax.axis_index(axes) == placed.device
    return lax.psum_scatter(jnp.where(mine, vectors, 0), axes, tiled=True)


_WAYS = {"replicated": _replicated, "row": _by_row, "column": _by_column, "table": _by_table}


def lookup_small(concatenated: jax.Array, offsets: Sequence[int], ids: jax.Array) -> jax.Array:
    """Vectors [examples, tables, features] of `ids` [examples, tables] in tables that were concatenated: one gather.

    `offsets` is where each table begins (`TablePlan.offsets`). Ids are not checked.
    """
    return concatenated[ids + jnp.asarray(offsets, ids.dtype)]
