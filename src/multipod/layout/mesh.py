"""From a `Layout` to JAX's mesh and shardings."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from multipod.errors import LayoutError
from multipod.layout.axes import BATCH_AXES, DATA_AXES
from multipod.layout.islands import device_grid
from multipod.layout.layout import Layout, default_shape
from multipod.layout.missing import grid_with_holes
from multipod.layout.rules import Axes
from multipod.layout.wiring import closed_dims, link_figures
from multipod.topology.topology import BYTES_PER_S, LATENCY_S, Topology


def make_mesh(layout: Layout, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `layout` on the first of `devices`, in the order that suits the hardware.

    On several slices or hosts of GPUs every replica lies on one of them (`multipod.layout.islands`).

    Its axes are y, x and those of `layout.replica_sizes`. The devices of a replica are neighbours, numbered along a
    snake through its rows, so that parts with consecutive numbers lie side by side (arXiv:2011.03641).

    The devices of failed replicas are no part of it. The others lie in one row then, in the order of their replicas:
    with a hole there are no rows and columns of equal length. They need not be there (`multipod.layout.missing`).

    Raises:
      LayoutError: the mesh needs more devices than there are, leaves a process without any, or has replicas that
        would lie on a part of one slice or host and a part of another.
      TopologyError: failed replicas that the mesh does not have, or that cut it in parts.
    """
    devices = jax.devices() if devices is None else devices
    shape = layout.mesh_shape(len(devices))
    replicas = _replicas(shape, layout)
    needed = math.prod(shape) * layout.replica_devices
    if needed <= len(devices):
        mesh = mesh_on(layout, device_grid(layout, shape, devices))
    elif needed - len(replicas.failed_chips) * layout.replica_devices <= len(devices):
        mesh = mesh_on(layout, grid_with_holes(layout, shape, devices))
    else:
        raise LayoutError(_too_few(layout, shape, devices))
    live = mesh.devices
    idle = {d.process_index for d in devices} - {d.process_index for d in live.flat}
    if idle:
        fitting = _text(replace(layout, mesh=()).mesh_shape(len(devices)))
        raise LayoutError(
            f"{replicas} uses {live.size} of {len(devices)} devices and leaves processes {sorted(idle)} "
            f"without any. Start fewer processes, or use mesh {fitting}."
        )
    return mesh


def mesh_on(layout: Layout, grid: np.ndarray) -> Mesh:
    """The mesh of `layout` on a grid of devices, rows and columns as wired; its replicas must divide the grid."""
    shape = tuple(n // side for n, side in zip(grid.shape, layout.replica_grid, strict=True))
    replicas = _replicas(shape, layout)
    live = by_replica(grid, layout.replica_grid)[list(replicas.chips)]
    rows = (1, len(live)) if replicas.failed_chips else shape
    names = (*DATA_AXES, *layout.replica_sizes)
    arranged = live.reshape(*rows, *layout.replica_sizes.values())
    return Mesh(arranged, names, axis_types=(AxisType.Auto,) * len(names))


def abstract_mesh(layout: Layout) -> AbstractMesh:
    """The mesh of `layout`, which must say its `mesh`, without devices: to see shapes, not to run."""
    sizes = (*layout.mesh, *layout.replica_sizes.values())
    names = (*DATA_AXES, *layout.replica_sizes)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def by_replica(grid: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """[replicas, devices]: the entries of a grid, replica by replica, along a snake through the rows of each.

    In a replica of two rows the snake's ends are neighbours too, which makes it a ring.
    """
    (rows, columns), (height, width) = grid.shape, shape
    replicas = grid.reshape(rows // height, height, columns // width, width).transpose(0, 2, 1, 3)
    snakes = replicas.reshape(-1, height, width).copy()
    snakes[:, 1::2] = snakes[:, 1::2, ::-1]
    return snakes.reshape(len(snakes), -1)


def topology_of(layout: Layout, mesh: Mesh | AbstractMesh) -> Topology:
    """The replicas behind `mesh`, made of `layout` by `make_mesh`: data device number r is the live replica of rank r.

    What is summed over the data axes is summed between devices at the same place of their replicas. Where a replica
    is k devices long, a message to the next such device crosses k links, and k of these sums share each link: so here a
    link has k times the latency and a k-th of the bandwidth (arXiv:2011.03641, gradient sums that skip peers).
    Rows and columns are closed where the devices' places on their machine say so (`closed_dims`), and else open. Links
    are those of the machine where the devices' kind is known (`link_figures`), and else plain ones.
    """
    replicas = mesh.size // layout.replica_devices
    shape = layout.mesh or default_shape(replicas + len(set(layout.failed)))
    if not isinstance(mesh, Mesh):
        return _replicas(shape, layout)
    topology = _replicas(shape, layout, *link_figures(mesh.devices.flat[0].device_kind))
    grid = np.full(topology.size, None)
    grid[list(topology.chips)] = mesh.devices.reshape(replicas, -1)[:, 0]
    return replace(topology, wrap=closed_dims(grid.reshape(topology.shape)))


def _replicas(
    shape: Sequence[int], layout: Layout, latency_s: float = LATENCY_S, bytes_per_s: float = BYTES_PER_S
) -> Topology:
    # Open: a schedule for the open mesh runs on closed rows too, without their closing links; one for closed rows would
    # cross an open mesh from end to end. `topology_of` closes what is known to be closed.
    sides = layout.replica_grid
    topology = Topology(
        tuple(shape),
        wrap=(False,) * len(shape),
        latency_s=tuple(latency_s * side for side in sides),
        bytes_per_s=tuple(bytes_per_s / side for side in sides),
    ).without(layout.failed)
    topology.check_connected()
    return topology


def data_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that split the batch: y and x, and `expert` where the mesh has it."""
    return tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)


def inner_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that do not split the batch."""
    return tuple(axis for axis in mesh.axis_names if axis not in BATCH_AXES)


def splits_of(layout: Layout, mesh: Mesh | AbstractMesh) -> dict[str, tuple[str, ...]]:
    """The inner axes that split dims of a name: of activations, and of weights where no path says otherwise."""
    inner = inner_axes(mesh)
    names = {rule.pattern: rule.axes[0] for rule in reversed(layout.split.table) if not rule.is_path}
    found = {name: tuple(axis for axis in axes if axis in inner) for name, axes in names.items()}
    return {name: axes for name, axes in found.items() if axes}


def data_sizes(mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The sizes of the data axes."""
    return tuple(mesh.shape[axis] for axis in data_axes(mesh))


def data_devices(mesh: Mesh | AbstractMesh) -> int:
    """The number of devices that a batch is split over."""
    return math.prod(data_sizes(mesh))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The first dim split over all data axes, row-major."""
    return PartitionSpec(data_axes(mesh))


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """`batch_spec` on this mesh."""
    return NamedSharding(mesh, batch_spec(mesh))


def padded_batch(batch: int, layout: Layout, mesh: Mesh | AbstractMesh) -> int:
    """The rows of a batch on `mesh`: more than `batch` only where chips have failed, to divide over those left.

    Raises:
      LayoutError: a batch that does not divide over a whole mesh, with the nearest that do.
    """
    if not layout.failed:
        check_batch(batch, mesh)
    return -(-batch // data_devices(mesh)) * data_devices(mesh)


def check_batch(batch: int, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a batch that does not divide over the data axes.

    Raises:
      LayoutError: with the nearest batches that do.
    """
    devices = data_devices(mesh)
    if batch < 1 or batch % devices:
        below, above = batch // devices * devices, -(-batch // devices) * devices
        near = " or ".join(str(b) for b in sorted({below, max(above, devices)}) if b > 0)
        raise LayoutError(
            f"batch={batch} does not divide over the {devices} devices of mesh {_text(data_sizes(mesh))}. "
            f"Use batch={near}, or another mesh."
        )


def to_spec(axes: Axes) -> PartitionSpec:
    """JAX's form of a placement."""
    return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in axes))


def only(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """What `spec` says of `axes`, the other axes left out."""

    def kept(names: Any) -> Any:
        found = tuple(name for name in ((names,) if isinstance(names, str) else names or ()) if name in axes)
        return found or None

    return PartitionSpec(*map(kept, spec))


def names_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes that `spec` names, in order."""
    return tuple(name for names in spec for name in ((names,) if isinstance(names, str) else names or ()))


def is_split(spec: PartitionSpec) -> bool:
    """Whether `spec` splits any dim."""
    return any(names is not None for names in spec)


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _too_few(layout: Layout, shape: Sequence[int], devices: Sequence[jax.Device]) -> str:
    kind, needed = devices[0].platform, math.prod(shape) * layout.replica_devices
    of = f" of {layout.replica_text}" if layout.replica_sizes else ""
    message = f"mesh {_text(shape)}{of} needs {needed} devices, and there are {len(devices)} ({kind}). "
    if layout.failed:
        message += "Around chips that are gone, name each by --fail. "
    if len(devices) % layout.replica_devices == 0:
        message += f"Use --mesh {_text(default_shape(len(devices) // layout.replica_devices))}"
    else:
        message += f"Replicas of {layout.replica_devices} do not divide them: halve an axis"
    if kind == "cpu":
        message += f", or --cpu-devices {needed} to have as many virtual ones"
    return message + "."
