"""From host batches to global arrays on the mesh; each process holds the rows of its own devices."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from multipod.data.source import HostBatch

SMALL_BYTES = 1 << 18
"""Batches up to this size are given to a device by a call, which costs less of the host than `jax.device_put`.

On a CPU, 3 arrays of 64 rows take 0.04 ms and 0.22 ms; the call copies twice, which from 1 MB on costs more.
"""


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
        wanted = {name: shardings[name] for name in batch}
        if sum(array.nbytes for array in batch.values()) <= SMALL_BYTES and _on_one_device(wanted):
            return _given_back(tuple(wanted.items()))(batch)
        return jax.device_put(batch, wanted)

    def placed(name: str, array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last = np.searchsorted(rows, [index[0].start or 0, (index[0].stop or total) - 1])
            return array[(slice(first, last + 1), *index[1:])]

        return jax.make_array_from_callback((total, *array.shape[1:]), shardings[name], part)

    return {name: placed(name, array) for name, array in batch.items()}


def _on_one_device(shardings: Mapping[str, NamedSharding | Format]) -> bool:
    return all(isinstance(one, NamedSharding) and one.num_devices == 1 for one in shardings.values())


@lru_cache(maxsize=64)
def _given_back(shardings: tuple[tuple[str, NamedSharding], ...]) -> Callable[[HostBatch], dict[str, jax.Array]]:
    """A compiled function that gives a batch back, on the device."""
    placed = dict(shardings)
    return jax.jit(lambda batch: batch, in_shardings=(placed,), out_shardings=placed)
