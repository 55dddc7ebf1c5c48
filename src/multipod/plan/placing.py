"""Where a planned layout lies on a machine: its mesh of replicas, and the rows and columns of each."""

import math
from dataclasses import replace

from multipod.layout.layout import Layout
from multipod.plan.machine import Machine


def on_machine(layout: Layout, machine: Machine) -> Layout:
    """The layout with its mesh on this machine: rows as the chips have them, a chip's devices side by side in its row.

    Where replicas of this form do not fill the machine the mesh stays empty.
    """
    (tall, wide), (rows, columns) = block_of(layout), _devices_of(machine)
    return with_mesh(layout, () if rows % tall or columns % wide else (rows // tall, columns // wide))


def with_mesh(layout: Layout, mesh: tuple[int, ...]) -> Layout:
    """The layout on a mesh, with the rows and columns of a replica where it is more than one device."""
    return replace(layout, mesh=mesh, replica_shape=block_of(layout) if mesh and layout.replica_devices > 1 else ())


def block_of(layout: Layout) -> tuple[int, int]:
    """Rows and columns of the devices of a replica: along the row up to four (two chips of two), in two rows beyond.

    They lie as `sync.chips_of_weights` prices them.
    """
    rows = 1 if layout.replica_devices < 8 else 2
    return rows, layout.replica_devices // rows


def _devices_of(machine: Machine) -> tuple[int, int]:
    shape = machine.topology.shape
    if len(shape) == 1:
        rows = next(r for r in range(math.isqrt(machine.devices), 0, -1) if machine.devices % r == 0)
        return (rows, machine.devices // rows)
    return (shape[0], machine.topology.size // shape[0] * machine.devices_per_chip)
