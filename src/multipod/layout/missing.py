"""Where devices stand in a mesh of which some are not there at all: a chip that is gone, not one that is spared."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from multipod.errors import LayoutError
from multipod.layout.layout import Layout


def grid_with_holes(layout: Layout, shape: tuple[int, int], devices: Sequence[Any]) -> np.ndarray:
    """The grid [y, x] of chips of `shape` = (rows, columns) of replicas, with None where there is no device.

    Devices that say where they sit (TPU chips, by `coords`) stand there. Others are taken process by process: each has
    the same number of places, row-major, and its devices take those that are in no failed replica, in their order.

    Raises:
      LayoutError: a chip is missing that is in no failed replica, or nobody can tell where the devices sit.
    """
    chips = shape[0] * layout.replica_grid[0], shape[1] * layout.replica_grid[1]
    if all(getattr(device, "coords", None) is not None for device in devices):
        grid = _by_coordinates(chips, devices)
    else:
        grid = _by_process(layout, chips, devices)
    height, width = layout.replica_grid
    missing = {
        (int(y) // height, int(x) // width)
        for y, x in np.argwhere([[device is None for device in row] for row in grid])
    }
    if unnamed := sorted(missing - set(layout.failed)):
        told = " ".join(f"--fail {row},{column}" for row, column in unnamed)
        raise LayoutError(
            f"mesh {shape[0]}x{shape[1]}: {len(devices)} of {math.prod(chips)} devices are there, and by where they "
            f"sit the missing ones are others than those that --fail names. Give {told}, too."
        )
    return grid


def _by_coordinates(chips: tuple[int, int], devices: Sequence[Any]) -> np.ndarray:
    """Each device at its x and y, or with the two swapped where the mesh lies so on its slice."""
    flat = len({device.coords[2:] for device in devices}) == 1 and not any(
        getattr(device, "core_on_chip", 0) for device in devices
    )
    if flat and len({getattr(device, "slice_index", 0) for device in devices}) == 1:
        for swapped in (False, True):
            places = [device.coords[:2] if swapped else device.coords[1::-1] for device in devices]
            if all(y < chips[0] and x < chips[1] for y, x in places) and len({*map(tuple, places)}) == len(devices):
                grid = np.full(chips, None, object)
                for place, device in zip(places, devices, strict=True):
                    grid[tuple(place)] = device
                return grid
    raise LayoutError(
        f"{len(devices)} devices do not lie in a mesh of {chips[0]}x{chips[1]} chips by their coordinates. Around "
        "missing chips a mesh must be one slice, its rows and columns those of its chips, with one core each."
    )


def _by_process(layout: Layout, chips: tuple[int, int], devices: Sequence[Any]) -> np.ndarray:
    """Each process's devices on its own places, failed replicas left out where it has too few."""
    processes = sorted({device.process_index for device in devices})
    each, over = divmod(math.prod(chips), len(processes))
    if over or processes != list(range(len(processes))):
        raise LayoutError(
            f"a mesh of {chips[0]}x{chips[1]} devices, of which some are missing, does not divide over "
            f"{len(processes)} processes, so nobody can tell where they sit. Take as many rows as "
            "there are processes."
        )
    height, width = layout.replica_grid
    places: list[Any] = []
    for process in processes:
        theirs = [device for device in devices if device.process_index == process]
        at = [divmod(place, chips[1]) for place in range(process * each, (process + 1) * each)]
        dead = [(y // height, x // width) in layout.failed for y, x in at]
        lacking = max(0, each - len(theirs))
        if sum(dead) < lacking:
            raise LayoutError(
                f"process {process} has {len(theirs)} of its {each} devices, and --fail names {sum(dead)} of its "
                f"places {at[0][0]},{at[0][1]} to {at[-1][0]},{at[-1][1]}. Name those that are missing."
            )
        rest = iter(theirs)
        for failed in dead:
            empty = failed and lacking > 0
            lacking -= empty
            places.append(None if empty else next(rest))
    grid = np.full(len(places), None, object)
    grid[:] = places
    return grid.reshape(chips)
