"""Ways of summing one vector over the data axes of a mesh, and the table that names them.

This is the lower half of the seam between what a model learns and how a machine adds: a new way of
summing is a schedule (`build_scheduled_sum` finds it by its name), or one `VectorSum` and one line in `SUMS`.
The upper half, trees of tensors, is in `bucketing.py`. All functions run inside `jax.shard_map`, manual
over `axes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax import lax

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import Collective, Schedule
from multipod.execute.engines import jax as engine
from multipod.execute.target import target_platform
from multipod.topology.topology import Topology

Axes = Sequence[str]


@dataclass(frozen=True)
class VectorSum:
    """Three functions on one flat vector per device.

    `reduce_scatter` leaves share r of the sum on the device with row-major number r over the axes;
    `all_gather` is its inverse on sums; `all_reduce` leaves the whole sum everywhere. The vector's
    length must divide by the number of devices for the first two.

    Tensors of at least `alone_bytes` are better sent each by itself than packed with others; None is to pack all.
    """

    all_reduce: Callable[[jax.Array], jax.Array]
    reduce_scatter: Callable[[jax.Array], jax.Array]
    all_gather: Callable[[jax.Array], jax.Array]
    alone_bytes: int | None = None


ALONE_BYTES = 1 << 20
"""From here on the two copies of packing a tensor cost more than a message of its own: of a Transformer of 46 M they
took 0.7 of 1.9 s an update (one core of a Xeon, 2026-11-21). A schedule of many sends packs all: a message is dear."""


def xla(axes: Axes) -> VectorSum:
    """The sum that XLA chooses for this backend: `psum` over all axes at once."""
    return VectorSum(
        all_reduce=partial(lax.psum, axis_name=tuple(axes)),
        reduce_scatter=partial(lax.psum_scatter, axis_name=tuple(axes), tiled=True),
        all_gather=partial(lax.all_gather, axis_name=tuple(axes), tiled=True),
        alone_bytes=ALONE_BYTES,
    )


def torus(axes: Axes) -> VectorSum:
    """The two-dimensional sum: reduce-scatter along y, then along x, then all-gather back along x, then y.

    With S bytes on a mesh of Ny x Nx, the y links carry 2 (Ny-1)/Ny S bytes and the x links only
    2 (Nx-1)/Nx S/Ny, in 2 (Ny + Nx - 2) hops where a ring through all chips takes 2 (Ny Nx - 1).

    Source: arXiv:1811.06992; arXiv:2011.03641, section on gradient summation (y first, because
    there the wrapped dimension of the multipod is y).
    """

    def reduce_scatter(vector: jax.Array) -> jax.Array:
        for axis in axes:
            vector = lax.psum_scatter(vector, axis, tiled=True)
        return vector

    def all_gather(share: jax.Array) -> jax.Array:
        for axis in reversed(axes):
            share = lax.all_gather(share, axis, tiled=True)
        return share

    return VectorSum(lambda vector: all_gather(reduce_scatter(vector)), reduce_scatter, all_gather, ALONE_BYTES)


def ordered(axes: Axes) -> VectorSum:
    """The sum in the order of the device numbers: the same bits however the devices are spread over processes.

    Each device sends share r of its vector straight to device r, which adds the shares in order. The
    bytes are those of a reduce-scatter; only the order in which they are added is ours and not the
    transport's, so that a run does not change when it moves from one process to many.

    On the CPU devices of one process XLA's own sum adds in this order already (a test compares the
    bits), and is used because it is faster.
    """
    by_xla, by_us = xla(axes), direct(axes)

    def chosen() -> VectorSum:
        return by_xla if jax.process_count() == 1 and target_platform() == "cpu" else by_us

    return VectorSum(
        all_reduce=lambda vector: chosen().all_reduce(vector),
        reduce_scatter=lambda vector: chosen().reduce_scatter(vector),
        all_gather=lambda share: chosen().all_gather(share),
        alone_bytes=ALONE_BYTES,
    )


def direct(axes: Axes) -> VectorSum:
    """The direct exchange behind `ordered`, on any transport."""
    names = tuple(axes)

    def reduce_scatter(vector: jax.Array) -> jax.Array:
        shares = vector.reshape(lax.axis_size(names), -1)
        shares = lax.all_to_all(shares, names, split_axis=0, concat_axis=0, tiled=True)
        # The barrier keeps XLA from fusing the sum into what follows, which may round differently.
        return lax.optimization_barrier(shares.sum(axis=0))

    def all_gather(share: jax.Array) -> jax.Array:
        return lax.all_gather(share, names, tiled=True)

    return VectorSum(lambda vector: all_gather(reduce_scatter(vector)), reduce_scatter, all_gather, ALONE_BYTES)


def sum_in_tile_first(total: VectorSum, inside: Axes, outside: int) -> VectorSum:
    """`total`, which sums over `outside` devices, with a sum over the axes `inside` each tile before it.

    Shares go to devices in row-major order of the axes of `total` and then of `inside`, as in the other sums. Of S
    bytes each device sends only S / tile between tiles.

    Source: arXiv:2011.03641, gradient sums for replicated weights of a split model.
    """
    names = tuple(inside)

    def reduce_scatter(vector: jax.Array) -> jax.Array:
        size = lax.axis_size(names)
        shares = vector.reshape(outside, size, -1).swapaxes(0, 1)  # what each place of the tile hands on, side by side
        return total.reduce_scatter(lax.psum_scatter(shares.ravel(), names, tiled=True))

    def all_gather(share: jax.Array) -> jax.Array:
        size = lax.axis_size(names)
        shares = lax.all_gather(total.all_gather(share), names, tiled=True)
        return shares.reshape(size, outside, -1).swapaxes(0, 1).ravel()

    def all_reduce(vector: jax.Array) -> jax.Array:
        padding = -vector.size % (lax.axis_size(names) * outside)
        return all_gather(reduce_scatter(jnp.pad(vector, (0, padding))))[: vector.size]

    return VectorSum(all_reduce, reduce_scatter, all_gather, total.alone_bytes)


SUMS: dict[str, Callable[[Axes], VectorSum]] = {"xla": xla, "torus": torus, "ordered": ordered, "direct": direct}


def build_scheduled_sum(name: str, topology: Topology, axes: Axes) -> VectorSum:
    """The sum by a schedule: `name` is an algorithm of `multipod.collectives.build.ALGORITHMS`.

    Device number r over the axes is the live chip of rank r. An algorithm that has no schedule for scattering
    alone, or for gathering alone, does it by its all-reduce.

    Raises:
      ScheduleError: when called: the algorithm does not fit the machine.
      TopologyError: when called: the machine is cut in parts.
    """
    names = tuple(axes)

    def schedule(collective: Collective, share: jax.Array, shares: int = 1) -> Schedule:
        return _build_schedule(name, topology, collective, shares * share.size, share.dtype, target_platform())

    return VectorSum(
        all_reduce=lambda vector: engine.all_reduce(schedule("all-reduce", vector), vector, names),
        reduce_scatter=lambda vector: engine.reduce_scatter(schedule("reduce-scatter", vector), vector, names),
        all_gather=lambda share: engine.all_gather(schedule("all-gather", share, len(topology.chips)), share, names),
    )


@lru_cache(maxsize=64)
def _build_schedule(
    name: str, topology: Topology, collective: Collective, elements: int, dtype: jnp.dtype, platform: str
) -> Schedule:
    builder = ALGORITHMS[name]
    collective = collective if collective in builder.collectives else "all-reduce"
    vector = jax.ShapeDtypeStruct((elements,), dtype)
    knob = next((knob for knob in CHUNKING_OPTIONS if knob in builder.options), None)
    if knob is not None and platform == "cpu":
        finer = [build(name, topology, collective, **{knob: 2**k}) for k in range(8)]
        return min(finer, key=lambda schedule: _estimate_cpu_s(schedule, vector))
    nbytes = {"nbytes": elements * vector.dtype.itemsize} if "nbytes" in builder.options else {}
    return build(name, topology, collective, **nbytes)


CHUNKING_OPTIONS = ("rounds", "segments")
"""Options that say how finely a pipeline cuts the vector. Builders choose it by the links' figures, and what is behind
virtual devices is no link: there the messages of a step are copied one after the other, and each costs its start."""

CPU_MESSAGE_S, CPU_BYTES_PER_S = 6e-5, 4e9
"""What a round of messages between 8 CPU devices costs, and all their bytes (two cores of a Xeon, 2026-11-21)."""


def _estimate_cpu_s(schedule: Schedule, vector: jax.ShapeDtypeStruct) -> float:
    rounds = engine.choose_rounds(schedule, vector, "cpu")
    sent = rounds.steps * sum(rounds.widths) * vector.dtype.itemsize * len(schedule.topology.chips)
    return rounds.steps * len(rounds.widths) * CPU_MESSAGE_S + sent / CPU_BYTES_PER_S


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def mean_in_order(x: jax.Array, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...] | None = None) -> jax.Array:
    """The mean of `x` over the devices of each group (all devices if None), added in device order.

    For small arrays: every device receives all of its group's. In groups of more than `IN_ORDER` devices that would be
    more than the gradients, and the mean is XLA's, in the order of the transport. The function is its own derivative:
    the gradient of a mean is the mean of the gradients, which is summed in the same order.
    """
    if (len(groups[0]) if groups else lax.axis_size(axes)) > IN_ORDER:
        return lax.pmean(x, axes, axis_index_groups=groups)
    return lax.all_gather(x, axes, axis_index_groups=groups).mean(axis=0)


IN_ORDER = 32
"""Devices: the largest batch-norm tile of the papers, 4x8. ResNet-50 on 2,048 devices, with statistics of all, gathered
268 MB an update, where its gradients are 102 MB."""


def _mean_forward(
    x: jax.Array, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...] | None
) -> tuple[jax.Array, None]:
    return mean_in_order(x, axes, groups), None


def _mean_backward(
    axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...] | None, _: None, ct: jax.Array
) -> tuple[jax.Array]:
    return (mean_in_order(ct, axes, groups),)


mean_in_order.defvjp(_mean_forward, _mean_backward)
