"""From host batches to global arrays on the mesh; each process holds the rows of its own devices."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from multipod.data.source import HostBatch


def owned_rows(sharding: NamedSharding, rows: int) -> np.ndarray:
    """Which of `rows` batch rows lie on this process's devices, increasing."""
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index[0]] for index in slices if index is not None]))


def to_mesh(
    batch: HostBatch, rows: np.ndarray, total: int, shardings: Mapping[str, NamedSharding | Format] | NamedSharding
) -> dict[str, jax.Array]:
    """Global arrays of first dim `total`, of which this process gives `rows` (as `owned_rows` says).

    `shardings` are one for all entries or one for each; they split the rows alike, and may split further dims, too.
    A `Format` also says in which order the dims lie in memory.
    """
    if isinstance(shardings, NamedSharding):
        shardings = dict.fromkeys(batch, shardings)
    if len(rows) == total:
        return jax.device_put(batch, {name: shardings[name] for name in batch})

    def placed(name: str, array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last = np.searchsorted(rows, [index[0].start or 0, (index[0].stop or total) - 1])
            return array[(slice(first, last + 1), *index[1:])]

        return jax.make_array_from_callback((total, *array.shape[1:]), shardings[name], part)

    return {name: placed(name, array) for name, array in batch.items()}
