"""Which device stands where in a mesh of several slices or hosts, so that inner axes stay on the fast links.

An *island* is what fast links join: a slice of TPU chips, or a host's GPUs (NVLink). Islands reach each other over the
network between hosts, which is slower by an order of magnitude.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from multipod.errors import LayoutError
from multipod.layout.layout import Layout


def islands_of(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each slice (`slice_index`), or, of GPUs that are all in one, of each host; in their order.

    CPUs, whose processes share one machine's memory here, are one island.
    """
    key = "slice_index"
    if len({getattr(device, key, 0) for device in devices}) == 1 and devices[0].platform == "gpu":
        key = "process_index"
    number = lambda device: getattr(device, key, 0)  # noqa: E731
    return [list(island) for _, island in groupby(sorted(devices, key=number), number)]


def device_grid(layout: Layout, shape: tuple[int, int], devices: Sequence[Any]) -> np.ndarray:
    """The grid [y, x] of devices on which `layout` puts `shape` = (rows, columns) of replicas.

    Every replica lies on one island, and as many whole rows of replicas as can be: then sums along x, which come first
    and carry the most, stay on fast links. A replica larger than an island takes whole islands, its outer axes across.
    As many of `devices` are taken as are needed, island after island.

    Raises:
      LayoutError: a replica would lie on a part of one island and a part of another, or a slice cannot be so shaped.
    """
    chips = shape[0] * layout.replica_grid[0], shape[1] * layout.replica_grid[1]
    taken = [device for island in islands_of(devices) for device in island][: math.prod(chips)]
    islands = islands_of(taken)
    if len(islands) == 1:
        return _shaped(chips, taken)
    if layout.replica_devices > len(islands[0]):
        return _by_whole_islands(layout, chips, islands)
    return _by_blocks(layout, shape, islands)


def _by_blocks(layout: Layout, shape: tuple[int, int], islands: list[list[Any]]) -> np.ndarray:
    """Each island a block of the grid: the fewest islands beside each other first."""
    sizes = [len(island) for island in islands]
    for columns in range(1, len(islands) + 1):
        rows = len(islands) // columns
        if rows * columns == len(islands) and not (shape[0] % rows or shape[1] % columns or len(set(sizes)) > 1):
            block = shape[0] // rows * layout.replica_grid[0], shape[1] // columns * layout.replica_grid[1]
            blocks = [_shaped(block, island) for island in islands]
            return np.block([blocks[row * columns : (row + 1) * columns] for row in range(rows)])
    if any(size % layout.replica_devices for size in sizes) or _is_slice(islands):
        raise LayoutError(_refused(layout, shape, islands))
    return _from_lines(layout, shape, [device for island in islands for device in island])


def _by_whole_islands(layout: Layout, chips: tuple[int, int], islands: list[list[Any]]) -> np.ndarray:
    """Replicas of several islands: the axes inside, from the last one on, fill an island before the next begins."""
    shape = chips[0] // layout.replica_grid[0], chips[1] // layout.replica_grid[1]
    size, inner = len(islands[0]), 1
    for axis in reversed(layout.replica_sizes.values()):
        if inner * axis >= size:
            break
        inner *= axis
    whole = all(len(island) == size for island in islands) and layout.replica_devices % size == 0
    if not whole or size % inner or (inner * axis) % size:
        raise LayoutError(_refused(layout, shape, islands))
    return _from_lines(layout, shape, [device for island in islands for device in _line(island)])


def _from_lines(layout: Layout, shape: tuple[int, int], devices: Sequence[Any]) -> np.ndarray:
    """The grid of replicas that each take the next devices of a list, along the snake of `layout.mesh.by_replica`."""
    height, width = layout.replica_grid
    snakes = np.array(devices, object).reshape(*shape, height, width)
    snakes[:, :, 1::2] = snakes[:, :, 1::2, ::-1].copy()
    return snakes.transpose(0, 2, 1, 3).reshape(shape[0] * height, shape[1] * width)


def _line(island: list[Any]) -> list[Any]:
    """An island's devices, neighbours one after the other."""
    return list(_shaped((1, len(island)), island).flat)


def _shaped(shape: tuple[int, int], devices: Sequence[Any]) -> np.ndarray:
    """One island as a grid, in the order that suits its wires; physical axes are split where they must be.

    Raises:
      LayoutError: the wires do not allow it.
    """
    for split in (False, True):
        try:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
        except (NotImplementedError, AssertionError):  # axes that do not fit the slice's; a slice with holes
            continue
    raise LayoutError(
        f"{len(devices)} {devices[0].device_kind} devices do not lie in a grid of {_text(shape)} on their wires. Take "
        "all devices of the slice, and rows and columns that are products of its sides."
    )


def _is_slice(islands: list[list[Any]]) -> bool:
    return len({getattr(island[0], "slice_index", 0) for island in islands}) > 1


def _refused(layout: Layout, shape: tuple[int, int], islands: list[list[Any]]) -> str:
    kind, sizes = "slices" if _is_slice(islands) else "hosts", sorted({len(island) for island in islands})
    devices = " and ".join(map(str, sizes))
    message = (
        f"mesh {_text(shape)} of {layout.replica_text} does not lie on {len(islands)} {kind} of {devices} devices: "
    )
    if layout.replica_devices > sizes[0] or any(size % layout.replica_devices for size in sizes):
        return message + (
            f"a replica of {layout.replica_devices} would take a part of one and a part of another. Take axes whose "
            f"product divides {sizes[0]}, or is a multiple of it."
        )
    if len(sizes) > 1:
        return message + f"they are not used alike. Use all of their devices, or those of fewer {kind}."
    rows = sizes[0] // layout.replica_devices
    return message + (
        f"neither rows nor columns divide over them. Use --mesh {len(islands)}x{rows}, a row of replicas for each."
    )


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
