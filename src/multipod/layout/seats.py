"""A mesh around the processes that are missing: each process has a seat, whose chips fail with it."""

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


def seated(layout: Layout, devices: Mapping[int, Sequence[jax.Device]], seats: int) -> tuple[Layout, Mesh]:
    """The layout with the tiles of empty seats failed, and its mesh on the devices of the others.

    Seat s has the chips s * n to s * n + n - 1 of the mesh, row-major, where n devices are a seat's. If the holes cut
    the mesh in parts, or leave a process without a whole tile, those that are left move together, and the holes to the
    end.

    Raises:
      LayoutError: a process then still has no whole tile, or the layout needs more devices than all seats have.
    """
    each = max(map(len, devices.values()))
    shape = layout.mesh_shape(seats * each)
    chips = tuple(n * side for n, side in zip(shape, layout.tile_shape, strict=True))
    if math.prod(chips) > seats * each:
        raise LayoutError(
            f"mesh {shape[0]}x{shape[1]} needs {math.prod(chips)} devices, and {seats} processes have {seats * each}. "
            f"Give a --mesh of so many, or --cpu-devices {-(-math.prod(chips) // seats)}."
        )
    where = [device for seat in range(seats) for device in (*devices.get(seat, ()), *[None] * each)[:each]]
    for places in (where, sorted(where, key=lambda device: device is None)):
        grid = np.empty(math.prod(chips), object)
        grid[:] = places[: grid.size]
        found = _around(layout, shape, grid.reshape(chips))
        if found is not None:
            return found
    raise LayoutError(
        f"the {len(devices)} processes that are left have {each} devices each, and with tiles of {layout.spelled_tile} "
        "some would have no part in a whole one. Let the launcher replace the lost ones, or lay out in smaller tiles."
    )


def _around(layout: Layout, shape: tuple[int, int], grid: np.ndarray) -> tuple[Layout, Mesh] | None:
    """The layout on this grid, None standing for chips that are missing; None if it is cut in parts by them."""
    height, width = layout.tile_shape
    tiles = grid.reshape(shape[0], height, shape[1], width).transpose(0, 2, 1, 3).reshape(*shape, -1)
    dead = np.array([[any(device is None for device in tile) for tile in row] for row in tiles])
    failed = tuple(sorted({*layout.failed, *((int(row), int(column)) for row, column in np.argwhere(dead))}))
    if len(failed) == math.prod(shape):
        return None
    if dead.any():
        used = {device.process_index for tile in tiles[~dead] for device in tile}
        if used != {device.process_index for device in grid.flat if device is not None}:
            return None
        try:
            Topology(shape, wrap=(False, False)).without(failed).check_connected()
        except TopologyError:
            return None
    around = replace(layout, mesh=shape, failed=failed) if failed else layout
    return around, mesh_on(around, grid)
