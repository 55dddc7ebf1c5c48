"""From a `Layout` to JAX's mesh and shardings."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from multipod.errors import LayoutError
from multipod.layout.layout import DATA_AXES, Layout, default_shape
from multipod.topology.topology import Topology


def make_mesh(layout: Layout, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `layout` on the first of `devices`; JAX chooses the order that suits the hardware.

    The devices of failed chips are no part of it. The others lie in one row then, in the order of their
    chips: with a hole there are no rows and columns of equal length.

    Raises:
      LayoutError: the mesh needs more devices than there are, or leaves a process without any.
      TopologyError: failed chips that the mesh does not have, or that cut it in parts.
    """
    devices = jax.devices() if devices is None else devices
    shape = layout.mesh or default_shape(len(devices))
    chips = _chips(shape, layout)
    needed = math.prod(shape)
    if needed > len(devices):
        raise LayoutError(_too_few(shape, devices))
    whole = jax.make_mesh(shape, DATA_AXES, axis_types=(AxisType.Auto,) * len(shape), devices=devices[:needed])
    live = whole.devices.reshape(-1)[list(chips.chips)]
    idle = {d.process_index for d in devices} - {d.process_index for d in live}
    if idle:
        raise LayoutError(
            f"{chips} uses {len(live)} of {len(devices)} devices and leaves processes {sorted(idle)} "
            f"without any. Start fewer processes, or use mesh {_text(default_shape(len(devices)))}."
        )
    if not chips.failed_chips:
        return whole
    return Mesh(live.reshape(1, -1), DATA_AXES, axis_types=(AxisType.Auto,) * len(DATA_AXES))


def topology_of(layout: Layout, mesh: Mesh) -> Topology:
    """The chips behind `mesh`, which `make_mesh` made of `layout`: device number r is the live chip of rank r."""
    return _chips(layout.mesh or default_shape(mesh.size + len(set(layout.failed))), layout)


def _chips(shape: Sequence[int], layout: Layout) -> Topology:
    # JAX does not say whether the ends of a row are joined. A schedule for the open mesh runs on closed
    # rows too, without their closing links; one for closed rows would cross an open mesh from end to end.
    topology = Topology(tuple(shape), wrap=(False,) * len(shape)).without(layout.failed)
    topology.check_connected()
    return topology


def data_sizes(mesh: Mesh) -> tuple[int, ...]:
    """The sizes of the data axes, (y, x)."""
    return tuple(mesh.shape[axis] for axis in DATA_AXES)


def data_devices(mesh: Mesh) -> int:
    """The number of devices that a batch is split over."""
    return math.prod(data_sizes(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_spec() -> PartitionSpec:
    """The first dim split over all data axes, row-major."""
    return PartitionSpec(DATA_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """`batch_spec` on this mesh."""
    return NamedSharding(mesh, batch_spec())


def padded_batch(batch: int, layout: Layout, mesh: Mesh) -> int:
    """The rows of a batch on `mesh`: more than `batch` only where chips have failed, to divide over those left.

    Raises:
      LayoutError: a batch that does not divide over a whole mesh, with the nearest that do.
    """
    if not layout.failed:
        check_batch(batch, mesh)
    return -(-batch // data_devices(mesh)) * data_devices(mesh)


def check_batch(batch: int, mesh: Mesh) -> None:
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


def update_spec(shape: Sequence[int], sizes: Sequence[int]) -> PartitionSpec:
    """How the weight update splits a tensor of `shape` over data axes of `sizes`: a rule of the shape alone.

    Each data axis takes the dim with the most elements left that it divides. A tensor in which some
    axis finds no dim stays whole: it is small (a bias of 10), or it would need padding, which an
    unmodified optimizer would take for weights. Optimizer state of the same shape falls under the
    same rule, so that any Optax optimizer works; state of other shapes (SM3's vectors) too.
    """
    left, axes = list(shape), [[] for _ in shape]  # type: list[int], list[list[str]]
    for axis, size in zip(DATA_AXES, sizes, strict=True):
        fits = [dim for dim, n in enumerate(left) if n % size == 0]
        if not fits:
            return PartitionSpec()
        dim = max(fits, key=lambda d: left[d])
        left[dim] //= size
        axes[dim].append(axis)
    return PartitionSpec(*(tuple(names) or None for names in axes))


def is_split(spec: PartitionSpec) -> bool:
    """Whether `spec` splits any dim."""
    return any(names is not None for names in spec)


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _too_few(shape: Sequence[int], devices: Sequence[jax.Device]) -> str:
    kind = devices[0].platform
    message = (
        f"mesh {_text(shape)} needs {math.prod(shape)} devices, and there are {len(devices)} ({kind}). "
        f"Use --mesh {_text(default_shape(len(devices)))}"
    )
    if kind == "cpu":
        message += f", or --cpu-devices {math.prod(shape)} to have as many virtual ones"
    return message + "."
