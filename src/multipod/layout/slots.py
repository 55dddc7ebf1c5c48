"""A mesh around the processes that are missing: each process has a slot, whose chips fail with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from multipod.errors import LayoutError, TopologyError
from multipod.layout.layout import Layout
from multipod.layout.mesh import mesh_on
from multipod.topology.topology import Topology


def mesh_of_survivors(layout: Layout, devices: Mapping[int, Sequence[jax.Device]], slots: int) -> tuple[Layout, Mesh]:
    """The layout with the replicas of empty slots failed, and its mesh on the devices of the others.

    Slot s has the chips s * n to s * n + n - 1 of the mesh, row-major, where a slot has n devices. If the holes cut
    the mesh in parts, or leave a process without a whole replica, those that are left move together, and the
    holes to the end.

    Raises:
      LayoutError: a process then still has no whole replica, or the layout needs more devices than all slots have.
    """
    each = max(map(len, devices.values()))
    shape = layout.mesh_shape(slots * each)
    chips = tuple(n * side for n, side in zip(shape, layout.replica_grid, strict=True))
    if math.prod(chips) > slots * each:
        raise LayoutError(
            f"mesh {shape[0]}x{shape[1]} needs {math.prod(chips)} devices, and {slots} processes have {slots * each}. "
            f"Give a --mesh of so many, or --cpu-devices {-(-math.prod(chips) // slots)}."
        )
    where = [device for slot in range(slots) for device in (*devices.get(slot, ()), *[None] * each)[:each]]
    for places in (where, sorted(where, key=lambda device: device is None)):
        grid = np.empty(math.prod(chips), object)
        grid[:] = places[: grid.size]
        found = _around(layout, shape, grid.reshape(chips))
        if found is not None:
            return found
    raise LayoutError(
        f"the {len(devices)} processes that are left have {each} devices each, and with replicas of "
        f"{layout.replica_text} some would have no part in a whole one. Let the launcher replace the lost ones, or "
        "take smaller replicas."
    )


def _around(layout: Layout, shape: tuple[int, int], grid: np.ndarray) -> tuple[Layout, Mesh] | None:
    """The layout on this grid, None standing for chips that are missing; None if it is cut in parts by them."""
    height, width = layout.replica_grid
    replicas = grid.reshape(shape[0], height, shape[1], width).transpose(0, 2, 1, 3).reshape(*shape, -1)
    dead = np.array([[any(device is None for device in replica) for replica in row] for row in replicas])
    failed = tuple(sorted({*layout.failed, *((int(row), int(column)) for row, column in np.argwhere(dead))}))
    if len(failed) == math.prod(shape):
        return None
    if dead.any():
        used = {device.process_index for replica in replicas[~dead] for device in replica}
        if used != {device.process_index for device in grid.flat if device is not None}:
            return None
        try:
            Topology(shape, wrap=(False, False)).without(failed).check_connected()
        except TopologyError:
            return None
    around = replace(layout, mesh=shape, failed=failed) if failed else layout
    return around, mesh_on(around, grid)
