"""Seconds of what replicas of a model tell each other in an update: gradients summed, sharded weights gathered."""

import math
from typing import NamedTuple

from multipod.layout.layout import Layout
from multipod.plan.machine import Machine
from multipod.plan.network import ENGINES, all_reduce_s, all_reduce_sent
from multipod.plan.shares import shared_elements
from multipod.plan.workload import Workload

WHOLE = 4
"""Bytes of a weight, and of a slot of the optimizer."""

WIDTHS = {"bfloat16": 2, "float32": 4}
"""Bytes of an element of a type on the wire."""


def chips_of_weights(layout: Layout, machine: Machine) -> tuple[int, ...]:
    """The chips of a replica whose weights are split, as a block; () for one chip.

    Peers lie along the second dimension first, as in the figure of arXiv:2011.03641: the first dimension's rings, which
    carry nearly all bytes, then join neighbours. 4 devices are 1 x 2 chips, 8 are 2 x 2, 16 are 2 x 4 (y, x). In a
    machine of a single row they lie in it.
    """
    chips = -(-layout.weight_devices // machine.devices_per_chip)
    if chips <= 1:
        return ()
    shape = machine.topology.shape
    rows = 1 if chips < 4 or shape[0] % 2 or len(shape) == 1 else 2
    size = len(shape)
    return (rows, chips // rows, *(1,) * (size - 2)) if size > 1 else (chips,)


class SyncTimes(NamedTuple):
    """Seconds of what replicas tell each other: an all-gather, FSDP's second one, and the gradients' reduce-scatter."""

    gather_s: float
    again_s: float
    scatter_s: float


def sync_s(workload: Workload, layout: Layout, machine: Machine, held: float | None = None) -> SyncTimes:
    """What the sum over the replicas takes and, with sharded weights, gathering them.

    A reduce-scatter and an all-gather take half of an all-reduce each. An unsharded sum is one of each, of gradients;
    in ZeRO-1 the second is of weights; FSDP gathers them twice. Bytes are those of the types that travel.

    held: parameters on a device; None: as the layout says.
    """
    sync, name = layout.sync, layout.sync.gradient_sum
    scatter_s, gather_s = (
        sum(one.messages * all_reduce_s(machine, name, one.nbytes / one.messages, one.tile) for one in vectors) / 2
        for vectors in _travelling(workload, layout, machine, held)
    )
    return SyncTimes(gather_s, gather_s * sync.fsdp, scatter_s)


def sync_sent(workload: Workload, layout: Layout, machine: Machine, held: float | None = None) -> float:
    """Bytes that a chip sends to others, in the mean, in what `sync_s` is the time of."""
    name = layout.sync.gradient_sum
    scattered, gathered = (
        sum(all_reduce_sent(machine, name, one.nbytes, one.tile) for one in vectors) / 2
        for vectors in _travelling(workload, layout, machine, held)
    )
    return scattered + gathered * (1 + layout.sync.fsdp)


class Travelling(NamedTuple):
    """A vector that is summed or gathered: bytes on each chip, messages, and the tile whose places differ."""

    nbytes: float
    messages: int = 1
    tile: tuple[int, ...] = ()


def _travelling(
    workload: Workload, layout: Layout, machine: Machine, held: float | None
) -> tuple[list[Travelling], list[Travelling]]:
    """What is reduce-scattered, and what is gathered."""
    sum_bytes = wire_bytes(workload, layout)
    widths = sum_bytes, gather_bytes(layout) if layout.sync.shards_update else sum_bytes
    scattered, gathered = (_vectors(workload, layout, machine, held, width) for width in widths)
    return scattered, gathered


def wire_bytes(workload: Workload, layout: Layout) -> int:
    """Bytes of a parameter's gradient between devices."""
    return WIDTHS.get(layout.sync.sum_dtype, workload.wire_bytes)


def gather_bytes(layout: Layout) -> int:
    """Bytes of a weight between devices, where its update is sharded: weights are kept as float32."""
    return WIDTHS.get(layout.sync.gather_dtype, WHOLE)


def _vectors(workload: Workload, layout: Layout, machine: Machine, held: float | None, width: int) -> list[Travelling]:
    """What is summed over the replicas, with `width` bytes a parameter.

    Weights that are not split are summed over the devices of a replica too. Experts' gradients are summed over the
    replicas only, all others over all devices.
    """
    split = layout.split
    weights = layout.weight_devices if workload.splits_weights else 1
    if machine.devices == weights and split.expert == 1:
        return []  # one replica, whose devices hold different weights
    tile = chips_of_weights(layout, machine) if workload.splits_weights else ()
    # The devices of a chip hold different shares, and all of them leave by the chip's links.
    shares = 1 if machine.network == "shared" else min(weights, machine.devices_per_chip)
    if split.expert > 1:
        own = workload.expert_parameters / layout.weight_devices
        rest = workload.held(split) - own
        between = [Travelling(own * width * shares, 1, tile)] if machine.devices > weights else []
        return [Travelling(rest * width), *between]
    held = workload.held(split) if held is None else held
    if layout.sync.shards_update:  # with the padding of flat tensors
        held *= shared_elements(workload, layout, machine.devices // layout.replica_devices).sent / workload.held(split)
    nbytes = held * width * shares
    messages = max(1, math.ceil(nbytes / layout.sync.bucket_bytes)) if layout.sync.bucket_bytes else 1
    return [Travelling(nbytes, messages, tile)]


def exposed_sync_s(sync: SyncTimes, layout: Layout, passes_s: float, buckets: int = 16) -> float:
    """What is left of the times in `sync` where they go on beside passes of `passes_s`, a third of them forward.

    FSDP gathers beside both passes; of all others the whole sum is laid beside the backward pass, in `buckets`.
    """
    if not layout.sync.fsdp:
        return exposed_s(2 / 3 * passes_s, sum(sync), buckets)
    backward_s = exposed_s(2 / 3 * passes_s, sync.again_s + sync.scatter_s, buckets)
    return exposed_s(1 / 3 * passes_s, sync.gather_s, buckets) + backward_s


OWN_BUCKETS = 16
"""Parts that the engine's own sum is taken to be cut in where nobody says: large tensors are summed each by itself."""


def buckets_of(workload: Workload, layout: Layout, held: float) -> int:
    """Messages of the gradient sum, each of which can begin when its part of the backward pass is done.

    A schedule without buckets sums all in one vector, so it begins when the whole pass is done.
    """
    if layout.sync.bucket_bytes:
        return max(1, math.ceil(held * wire_bytes(workload, layout) / layout.sync.bucket_bytes))
    return OWN_BUCKETS if layout.sync.gradient_sum in ENGINES else 1


def exposed_s(backward_s: float, sum_s: float, buckets: int = 16) -> float:
    """What is left of the gradient sum when it goes on beside the backward pass, in equal buckets in their order.

    Bucket k is ready when k / buckets of the backward pass are done; the network serves one at a time.
    """
    return bucket_times(backward_s, sum_s, buckets)[-1][1] - backward_s


def bucket_times(backward_s: float, sum_s: float, buckets: int = 16) -> list[tuple[float, float]]:
    """When the sum of each bucket begins and ends, from the start of the backward pass on."""
    times, done = [], 0.0
    for k in range(1, buckets + 1):
        start = max(done, k / buckets * backward_s)
        done = start + sum_s / buckets
        times.append((start, done))
    return times
