"""From host batches to global arrays on the mesh; each process holds the rows of its own devices."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from multipod.data.source import HostBatch


def owned_rows(sharding: NamedSharding, rows: int) -> np.ndarray:
    """Which of `rows` batch rows lie on this process's devices, increasing."""
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index[0]] for index in slices if index is not None]))


def to_mesh(batch: HostBatch, rows: np.ndarray, total: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Global arrays of first dim `total`, of which this process gives `rows` (as `owned_rows` says)."""
    if len(rows) == total:
        return jax.device_put(batch, sharding)

    def placed(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last = np.searchsorted(rows, [index[0].start or 0, (index[0].stop or total) - 1])
            return array[first : last + 1]

        return jax.make_array_from_callback((total, *array.shape[1:]), sharding, part)

    return {name: placed(array) for name, array in batch.items()}
