"""Where a planned layout lies on a machine: its mesh of replicas, and the rows and columns of each."""

import math
from dataclasses import replace

from multipod.layout.layout import Layout
from multipod.plan.machine import Machine


def on_machine(layout: Layout, machine: Machine) -> Layout:
    """The layout with its mesh on this machine: rows as the chips have them, a chip's devices side by side in its row.

    Where replicas of this form do not fill the machine the mesh stays empty.
    """
    return with_mesh(layout, mesh_of(layout.replica_devices, machine))


def mesh_of(each: int, machine: Machine) -> tuple[int, int] | tuple[()]:
    """Rows and columns of the replicas of `each` devices on this machine; () where they do not fill it."""
    (tall, wide), (rows, columns) = _block(each), _devices_of(machine)
    return () if rows % tall or columns % wide else (rows // tall, columns // wide)


def norm_tile(each: int, replicas: int, machine: Machine) -> tuple[int, int]:
    """Rows and columns of the smallest tile of at least so many replicas that divides their mesh, the most compact one.

    Of the whole mesh where none is so large; of one row where the replicas have no mesh.
    """
    mesh = mesh_of(each, machine)
    if not mesh:
        return 1, min(replicas, machine.devices // each)
    (tall, wide), (rows, columns) = _block(each), mesh
    tiles = [(h, w) for h in _divisors(rows) for w in _divisors(columns) if h * w >= replicas]
    around = wide / machine.devices_per_chip
    return min(tiles, key=lambda tile: (tile[0] * tile[1], tile[0] * tall + tile[1] * around), default=mesh)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def with_mesh(layout: Layout, mesh: tuple[int, ...]) -> Layout:
    """The layout on a mesh, with the rows and columns of a replica where it is more than one device."""
    return replace(layout, mesh=mesh, replica_shape=block_of(layout) if mesh and layout.replica_devices > 1 else ())


def block_of(layout: Layout) -> tuple[int, int]:
    """Rows and columns of the devices of a replica: along the row up to four (two chips of two), in two rows beyond.

    They lie as `sync.chips_of_weights` prices them.
    """
    return _block(layout.replica_devices)


def _block(devices: int) -> tuple[int, int]:
    rows = 1 if devices < 8 else 2
    return rows, devices // rows


def _devices_of(machine: Machine) -> tuple[int, int]:
    shape = machine.topology.shape
    if len(shape) == 1:
        rows = next(r for r in range(math.isqrt(machine.devices), 0, -1) if machine.devices % r == 0)
        return (rows, machine.devices // rows)
    return (shape[0], machine.topology.size // shape[0] * machine.devices_per_chip)
