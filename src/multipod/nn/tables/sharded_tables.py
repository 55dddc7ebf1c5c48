"""Lookups in arrays of tables that are split over the devices of a mesh axis, for use inside `jax.shard_map`.

An array holds tables one below the other; a *place* is a row of it, -1 is none. Every function takes this device's part
of the array and the places of this device's examples, int32 [examples, ids of all fields], and returns this device's
vectors, [examples, fields, features]: those of one field added up, NaN where one of its places is -1. JAX finds the
way back through the collectives: what was reduce-scattered is gathered, and so on.

With B examples and n ids each over d devices, T fields of F features, a device sends (d - 1) / d of

| way | a part holds | forward | backward |
|---|---|---|---|
| `look_up_by_rows` | a block of rows | B n places, B T F numbers | B T F |
| `look_up_by_tables` | a block of rows in which tables are whole | B n places, B T F / d | B T F / d |
| `look_up_by_columns` | columns of all rows | B n places, B T F / d | B T F / d |

By rows the vectors are added by a reduce-scatter of the whole batch's, whose sizes are known beforehand: any device may
hold any row. By tables the most fields that a device has count for all.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "expert"
"""The mesh axis of `multipod.layout` that splits tables: as it does experts, it splits the batch too."""

Axis = str | tuple[str, ...]


@dataclass(frozen=True)
class TableFields:
    """The fields of an array of tables, in the order of its columns of places.

    Attributes:
      hots: ids of each field in an example.
      homes: (by tables) in which of `parts` equal parts of the array's rows each field's table lies.
      parts: (by tables) a multiple of the devices.
    """

    hots: tuple[int, ...]
    homes: tuple[int, ...] = ()
    parts: int = 1


def look_up_whole(array: jax.Array, places: jax.Array, fields: TableFields) -> jax.Array:
    """Vectors from an array that is not split."""
    return pool_fields(array[jnp.maximum(places, 0)], places, fields)


def pool_fields(rows: jax.Array, places: jax.Array, fields: TableFields) -> jax.Array:
    """Vectors from the rows [examples, ids of all fields, features] that were read at `places`."""
    return _pooled(jnp.where((places >= 0)[..., None], rows, jnp.nan), fields.hots)


def look_up_by_rows(own: jax.Array, places: jax.Array, fields: TableFields, axis: Axis) -> jax.Array:
    """Vectors where each device holds a block of rows: partial sums of the whole batch, reduce-scattered."""
    every = lax.all_gather(places, axis, tiled=True)
    rows = _held(own, every - lax.axis_index(axis) * len(own))
    vectors = lax.psum_scatter(_pooled(rows, fields.hots), axis, tiled=True)
    return _known(vectors, places, fields.hots)


def look_up_by_columns(own: jax.Array, places: jax.Array, fields: TableFields, axis: Axis) -> jax.Array:
    """Vectors where each device holds some columns of every row: looked up for all examples, then exchanged."""
    columns = _pooled(_held(own, lax.all_gather(places, axis, tiled=True)), fields.hots)
    vectors = lax.all_to_all(columns, axis, split_axis=0, concat_axis=2, tiled=True)
    return _known(vectors, places, fields.hots)


def look_up_by_tables(own: jax.Array, places: jax.Array, fields: TableFields, axis: Axis) -> jax.Array:
    """Vectors where each device holds whole tables: those of its own fields for all examples, then exchanged."""
    columns, order = _shelves(fields, lax.axis_size(axis))
    every = jnp.pad(lax.all_gather(places, axis, tiled=True), ((0, 0), (0, 1)), constant_values=-1)
    mine = every[:, jnp.asarray(columns)[lax.axis_index(axis)]]  # [batch, fields of the fullest device, most hots]
    rows = _held(own, jnp.where(mine >= 0, mine - lax.axis_index(axis) * len(own), -1)).sum(2)
    vectors = lax.all_to_all(rows, axis, split_axis=0, concat_axis=1, tiled=True)
    return _known(vectors[:, order], places, fields.hots)


def _shelves(fields: TableFields, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """The columns of places of each device's fields, [devices, fields, hots], and where each field comes back.

    Where a device has fewer fields, or a field fewer hots, stands the column behind the last.
    """
    ends = np.cumsum([0, *fields.hots])
    owners = [home * devices // fields.parts for home in fields.homes]
    held = [[f for f, owner in enumerate(owners) if owner == device] for device in range(devices)]
    most = max(map(len, held))
    columns = np.full((devices, most, max(fields.hots)), ends[-1], np.int32)
    order = np.empty(len(owners), np.int32)
    for device, own in enumerate(held):
        for slot, field in enumerate(own):
            columns[device, slot, : fields.hots[field]] = np.arange(ends[field], ends[field + 1])
            order[field] = device * most + slot
    return columns, order


def _held(own: jax.Array, places: jax.Array) -> jax.Array:
    """The rows of this device's part at `places` of it; zeros where it has none."""
    inside = (places >= 0) & (places < len(own))
    return jnp.where(inside[..., None], own[jnp.where(inside, places, 0)], 0)


def _pooled(rows: jax.Array, hots: tuple[int, ...]) -> jax.Array:
    """Rows [..., ids, features] added up field by field."""
    if max(hots) == 1:
        return rows
    ends = itertools.accumulate(hots)
    return jnp.stack([rows[:, end - hot : end].sum(1) for end, hot in zip(ends, hots, strict=True)], 1)


def _known(vectors: jax.Array, places: jax.Array, hots: tuple[int, ...]) -> jax.Array:
    """The vectors, NaN where one of a field's places is -1."""
    outside = _pooled((places < 0)[..., None].astype(jnp.int32), hots)
    return jnp.where(outside > 0, jnp.nan, vectors)
