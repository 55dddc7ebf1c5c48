"""Bags of ids: which rows of a table are added up to one vector, as flat arrays of fixed length.

A batch of bags is `ids`, int32 [n], and `offsets`, int32 [bags + 1]: bag b holds ids[offsets[b]:offsets[b + 1]]. It may
be empty, and then gives zeros. `offsets` begins with 0; ids from offsets[-1] on are padding and are not read, so
that batches with different numbers of ids have arrays of one shape. `weights`, float [n], multiply the rows.

What is wrong with ids and offsets is found on the host (`check_bags`); a compiled program cannot raise. There an id
outside the table makes its bag NaN, with gradients that leave the table alone: it is never wrapped or clamped.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import DataError

Mode = Literal["sum", "mean"]


def check_bags(ids: Any, offsets: Any, rows: int, weights: Any = None, table: str = "table") -> None:
    """Refuses ids and offsets that do not fit a table of so many rows.

    Raises:
      DataError: everything that is wrong, with the table's name, the first id outside it and its place.
    """
    ids, offsets = np.asarray(ids), np.asarray(offsets)
    wrong = []
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        wrong.append(f"ids are {ids.dtype} {list(ids.shape)}, not integers [n]")
    if offsets.ndim != 1 or not len(offsets) or not np.issubdtype(offsets.dtype, np.integer):
        wrong.append(f"offsets are {offsets.dtype} {list(offsets.shape)}, not integers [bags + 1]")
    if not wrong:
        wrong += _wrong_offsets(offsets, len(ids)) or _wrong_ids(ids[: offsets[-1]], rows)
        if weights is not None and np.shape(weights) != ids.shape:
            wrong.append(f"weights are {list(np.shape(weights))}, not [{len(ids)}] as the ids")
    if wrong:
        raise DataError(f"{table}: {'; '.join(wrong)}. Mend the batch, or the size of the table.")


def check_ids(ids: Any, rows: int, table: str = "table", example: int = 0) -> None:
    """Refuses ids of any shape outside a table of so many rows; `example` is the number of the first one.

    Raises:
      DataError: with the first such id, its place, and the name of the table.
    """
    ids = np.asarray(ids)
    wrong = _wrong_ids(ids.ravel(), rows, example)
    if wrong:
        raise DataError(f"{table}: {wrong[0]}. Mend the data, or the size of the table.")


def _wrong_offsets(offsets: np.ndarray, ids: int) -> list[str]:
    wrong = []
    if offsets[0] != 0:
        wrong.append(f"offsets[0] is {offsets[0]}, not 0")
    steps = np.diff(offsets.astype(np.int64))
    if len(steps) and steps.min() < 0:
        bag = int(np.argmax(steps < 0))
        wrong.append(f"offsets go back at bag {bag}, from {offsets[bag]} to {offsets[bag + 1]}")
    elif offsets[-1] > ids:
        wrong.append(f"offsets end at {offsets[-1]}, and there are {ids} ids")
    return wrong


def _wrong_ids(ids: np.ndarray, rows: int, first: int = 0) -> list[str]:
    if not len(ids) or (ids.min() >= 0 and ids.max() < rows):
        return []
    outside = (ids < 0) | (ids >= rows)
    place = int(np.argmax(outside))
    return [
        f"id {ids[place]} at place {first + place} is outside its {rows:,} rows, the first of "
        f"{np.count_nonzero(outside):,} such ids"
    ]


def is_concrete(*arrays: Any) -> bool:
    """Whether these arrays have values now, and are not being traced."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def bag_numbers(offsets: jax.Array, ids: int) -> jax.Array:
    """Which bag each of `ids` places belongs to, int32 [ids]; padding gets the number of bags."""
    return jnp.searchsorted(offsets[1:], jnp.arange(ids, dtype=offsets.dtype), side="right").astype(jnp.int32)


def pool_bags(rows: jax.Array, offsets: jax.Array, weights: jax.Array | None = None, mode: Mode = "sum") -> jax.Array:
    """The rows [n, features] of ids added up to bags, [bags, features]. See `divide_sums` for the mean."""
    bags = bag_numbers(offsets, len(rows))
    rows = jnp.where((bags < len(offsets) - 1)[:, None], rows, 0)  # padding may hold anything, and be NaN
    scaled = rows if weights is None else rows * weights[:, None]
    sums = jax.ops.segment_sum(scaled, bags, len(offsets) - 1, indices_are_sorted=True)
    return divide_sums(sums, offsets, weights, len(rows), mode)


def divide_sums(sums: jax.Array, offsets: jax.Array, weights: jax.Array | None, ids: int, mode: Mode) -> jax.Array:
    """Sums of bags, or for "mean" divided by the number of ids, or by the sum of their weights; 0 / 0 is 0."""
    if mode == "sum":
        return sums
    if weights is None:
        total = jnp.diff(offsets).astype(sums.dtype)
    else:
        total = jax.ops.segment_sum(weights, bag_numbers(offsets, ids), len(offsets) - 1, indices_are_sorted=True)
    return sums / jnp.where(total == 0, 1, total)[:, None]


def dense_bag(
    table: jax.Array, ids: jax.Array, offsets: jax.Array, weights: jax.Array | None = None, mode: Mode = "sum"
) -> jax.Array:
    """Bags of rows of an ordinary table [rows, features]; an id outside it makes its bag NaN."""
    known = (ids >= 0) & (ids < len(table))
    rows = jnp.where(known[:, None], table[jnp.where(known, ids, 0)], jnp.nan)
    return pool_bags(rows, offsets, weights, mode)
