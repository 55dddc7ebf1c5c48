"""Prices a step: each part of it in seconds, and the bytes on a device. Plain arithmetic; thousands a second."""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from multipod.errors import PlanError
from multipod.layout.layout import Layout
from multipod.layout.split import PipelineSplit
from multipod.layout.stages import micro_batches
from multipod.plan.machine import Machine
from multipod.plan.network import all_reduce_range_s, all_reduce_s, quickest_s
from multipod.plan.price import Passes, at_once, in_stages, work_s
from multipod.plan.shares import shared_elements
from multipod.plan.sync import (
    WHOLE,
    SyncTimes,
    buckets_of,
    chips_of_weights,
    exposed_sync_s,
    gather_bytes,
    sync_s,
    sync_sent,
    wire_bytes,
)
from multipod.plan.work import StepMemory
from multipod.plan.workload import Dtype, Workload


def layout_words(layout: Layout, batch: int, dtype: str = "") -> str:
    """A layout in words: `batch 64, model 4, ring, sharded update`."""
    sync, bucket = layout.sync, layout.sync.bucket_bytes
    sharding = {"none": "", "zero1": "sharded update", "fsdp": "sharded weights"}[sync.sharding]
    buckets = f"buckets of {bucket / 2**20:g} MiB" if bucket else ""
    travels = [
        f"{what} in {dtype}" for what, dtype in (("sum", sync.sum_dtype), ("gather", sync.gather_dtype)) if dtype
    ]
    parts = (f"batch {batch:,}", split_words(layout), dtype, sync.gradient_sum, buckets, *travels, sharding)
    return ", ".join(part for part in parts if part)


def split_words(layout: Layout) -> str:
    """How a replica is split, and how a pipeline goes through it: `stage 4 by 1f1b`."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in layout.replica_sizes.items())
    return sizes + (f" by {layout.pipeline.schedule}" if layout.pipeline else "")


@dataclass(frozen=True)
class Prediction:
    """A step, in seconds that one device spends on each part of it.

    Attributes:
      workload, machine, layout, batch: what was priced.
      norm_group: devices that share batch norm's statistics.
      dtype: of products; "" is the workload's own.
      compute_s: forward and backward pass.
      collectives_s: the gradient sum and what devices say to each other in the pass, as far as it is not hidden.
      update_s: the optimizer.
      input_s: waiting for the host.
      evaluation_s: the share of evaluations that falls on a step.
      copies_s: the share of copies in the hosts' memories that falls on a step (`mirror.with_copies`).
      idle_s: waiting for the device that has more examples, or for a late host.
      memory: of the device that needs most.
      parts: (name, seconds) of everything that adds up to the step, the longest first.
      messages: the names of those parts that devices tell each other in the passes.
      gradient_sum_s: the whole sum, hidden or not.
      buckets: messages of the sum that begin one after the other beside the backward pass, where machines overlap.
      sum_sent: bytes that a chip sends to others in it.
      sum_doubt_s: how much less the step would take if its sum took the least that is known of it.
    """

    workload: str
    machine: str
    layout: Layout
    batch: int
    devices: int
    compute_s: float
    collectives_s: float
    update_s: float
    input_s: float
    evaluation_s: float
    idle_s: float
    memory: StepMemory
    memory_limit: float
    flops: float
    peak_flop_per_s: float
    parts: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    messages: tuple[str, ...] = ()
    gradient_sum_s: float = 0.0
    sum_sent: float = 0.0
    sum_doubt_s: float = 0.0
    buckets: int = 1
    copies_s: float = 0.0
    norm_group: int = 1
    dtype: Dtype | Literal[""] = ""

    @property
    def words(self) -> str:
        """The layout, the batch and the type of products in words."""
        return layout_words(self.layout, self.batch, self.dtype)

    @property
    def step_s(self) -> float:
        """All parts."""
        return sum(self.split().values())

    @property
    def examples_per_s(self) -> float:
        """Examples a second of the whole machine."""
        return self.batch / self.step_s

    @property
    def utilisation(self) -> float:
        """FLOPs of the model over what the devices could do in the time."""
        return self.flops / (self.step_s * self.peak_flop_per_s)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory.total <= self.memory_limit

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.split().items(), key=lambda item: item[1])[0]

    def split(self) -> dict[str, float]:
        """The parts by name, in seconds."""
        names = ("compute", "collectives", "update", "input", "evaluation", "copies", "idle")
        return {name: getattr(self, f"{name}_s") for name in names}

    def with_part(self, name: str, title: str, seconds: float) -> "Prediction":
        """The step with `seconds` in its field `name`, and among its parts by its `title`."""
        parts = (*self.parts, *([(title, seconds)] if seconds else []))
        return replace(self, parts=tuple(sorted(parts, key=lambda part: -part[1])), **{name: seconds})  # type: ignore[arg-type]

    def data(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return {
            "workload": self.workload,
            "machine": self.machine,
            "layout": self.words,
            "step_s": self.step_s,
            **{f"{name}_s": seconds for name, seconds in self.split().items()},
            "memory_bytes": self.memory.total,
            "state_bytes": self.memory.parameters + self.memory.optimizer,
            "examples_per_s": self.examples_per_s,
            "utilisation": self.utilisation,
        }


def predict_step(
    workload: Workload,
    layout: Layout,
    batch: int,
    machine: Machine,
    norm_group: int = 1,
    dtype: Dtype | Literal[""] = "",
) -> Prediction:
    """The step of `workload` in `layout` with a `batch` on `machine`.

    Args:
      workload: what a step asks for.
      layout: its mesh, failed replicas and the shape of a replica count for nothing here: the machine says them.
      batch: examples in an update.
      machine: where it runs.
      norm_group: devices that share batch norm's statistics.
      dtype: of products; "" is the workload's own.

    Raises:
      PlanError: the layout cannot be: more devices a replica than there are, or fewer examples than replicas; stages,
        a way of combining or a precision that has no price.
      ScheduleError: the schedule does not fit the machine.
    """
    if machine.network == "shared" and dtype not in ("", workload.dtype):
        raise PlanError(f"{machine}: a host multiplies in float32 whatever it is given. Leave --precision out.")
    if layout.sync.combines:
        raise PlanError(f"sum={layout.sync.gradient_sum} combines and does not sum, which has no price. Take a sum.")
    workload = workload.of(dtype)
    replicas = replicas_of(layout, batch, machine)
    passes = passes_of(workload, layout, batch, machine, norm_group)
    longest_s = passes.compute_s + passes.idle_s
    sync = sync_s(workload, layout, machine, passes.parameters)
    buckets = buckets_of(workload, layout, passes.parameters)
    exposed_sum_s = exposed_sync_s(sync, layout, longest_s, buckets) if machine.overlaps else sum(sync)
    share = least_share(workload, layout, machine, passes.parameters) if any(sync) else 1.0
    least = SyncTimes(*(share * seconds for seconds in sync))
    least_s = exposed_sync_s(least, layout, longest_s, buckets) if machine.overlaps else sum(least)
    changed_s = update_s(workload, layout, machine, passes.parameters)
    batch_s = input_s(batch, machine)
    wait_s = late_host_s(machine.hosts, batch_s, machine.host_spread * batch_s, machine.prefetch, longest_s + sum(sync))
    told = [("gradient sum", exposed_sum_s), ("update", changed_s), ("input", wait_s)]
    if layout.pipeline:
        told.append(("bubble", passes.idle_s))
    return Prediction(
        workload=workload.name,
        machine=str(machine),
        layout=layout,
        batch=batch,
        norm_group=norm_group,
        dtype=dtype,
        devices=machine.devices,
        compute_s=passes.compute_s,
        collectives_s=exposed_sum_s + sum(seconds for _, seconds in passes.messages),
        update_s=changed_s,
        input_s=wait_s,
        evaluation_s=0.0,
        idle_s=passes.idle_s,
        memory=memory_of(workload, passes, layout, examples_of(layout, batch, machine), replicas),
        memory_limit=machine.memory_bytes,
        flops=passes.flops * machine.devices,
        peak_flop_per_s=machine.flop_per_s(workload.dtype) * machine.devices,
        messages=tuple(name for name, _ in passes.messages),
        gradient_sum_s=sum(sync),
        sum_sent=sync_sent(workload, layout, machine, passes.parameters),
        sum_doubt_s=exposed_sum_s - least_s,
        buckets=buckets,
        parts=tuple(
            sorted(
                ((name, s) for name, s in (*passes.parts, *passes.messages, *told) if s > 0), key=lambda part: -part[1]
            )
        ),
    )


def least_share(workload: Workload, layout: Layout, machine: Machine, held: float) -> float:
    """The share of a sum's price that it takes at least: by its constants' error, and by what its engine may do."""
    nbytes, tile = held * wire_bytes(workload, layout), chips_of_weights(layout, machine)
    tile = tile if workload.splits_weights and layout.split.expert == 1 else ()
    priced_s, least_s = all_reduce_range_s(machine, layout.sync.gradient_sum, nbytes, tile)
    return (1 - machine.calibration.sum_error) * (least_s / priced_s if priced_s else 1.0)


def passes_of(workload: Workload, layout: Layout, batch: int, machine: Machine, norm_group: int = 1) -> Passes:
    """The forward and backward passes of a step, all at once or in a pipeline.

    Raises:
      PlanError, ScheduleError: see `price.in_stages`; or a batch that does not divide.
    """
    replicas, pipeline = replicas_of(layout, batch, machine), layout.pipeline
    if pipeline is None:
        return at_once(workload, layout.split, machine, batch, replicas, norm_group)
    if batch % replicas:
        raise PlanError(
            f"{machine}: a batch of {batch} does not divide over {replicas} pipelines. Take "
            f"{-(-batch // replicas) * replicas}."
        )
    running = _with_micro_batches(pipeline, micro_of(layout, batch, machine))
    return in_stages(workload, layout.split, running, machine, batch // replicas)


@lru_cache(maxsize=1024)
def _with_micro_batches(pipeline: PipelineSplit, count: int) -> PipelineSplit:
    return replace(pipeline, micro_batches=count)


def examples_of(layout: Layout, batch: int, machine: Machine) -> int:
    """Examples of the replica that has most."""
    return -(-batch // replicas_of(layout, batch, machine))


def micro_of(layout: Layout, batch: int, machine: Machine) -> int:
    """The micro-batches of a pipeline, as the run counts them; 1 without one.

    Raises:
      LayoutError: none divides the examples of a replica.
    """
    pipeline = layout.pipeline
    if pipeline is None:
        return 1
    examples = examples_of(layout, batch, machine)
    return micro_batches(pipeline.micro_batches, pipeline.stages, examples, rounds=pipeline.in_rounds)


def replicas_of(layout: Layout, batch: int, machine: Machine) -> int:
    """How many replicas the machine holds.

    Raises:
      PlanError: none, or some would have no example.
    """
    each = layout.replica_devices
    replicas, rest = divmod(machine.devices, each)
    if rest or not replicas:
        whole = [n for n in range(1, machine.devices + 1) if machine.devices % n == 0]
        near = sorted(sorted(whole, key=lambda n: abs(n - each))[:2])
        raise PlanError(
            f"{machine}: a replica of {split_words(layout)} needs {each} devices, and the machine's "
            f"{machine.devices} do not divide into such. Take a split over {' or '.join(map(str, near))}."
        )
    if batch < replicas:
        raise PlanError(
            f"{machine}: a batch of {batch} leaves some of {replicas} replicas without an example. Take a batch of at "
            f"least {replicas}, or a replica of {-(-machine.devices // max(1, batch))} devices or more."
        )
    return replicas


def update_s(workload: Workload, layout: Layout, machine: Machine, held: float | None = None) -> float:
    """Weights and slots pass the memory; shared over all replicas if the update is sharded, with their norms summed.

    held: parameters on a device; None: as the layout says.
    """
    moved, sharded = workload.update_bytes, layout.sync.shards_update
    mine, seconds = workload.held(layout.split) if held is None else held, 0.0
    if sharded:
        shared = shared_elements(workload, layout, machine.devices // layout.replica_devices)
        mine = shared.kept + shared.gathered
        if shared.gathered:  # weights, gradients and state become whole for the optimizer
            nbytes = shared.gathered * WHOLE * (2 + workload.optimizer_slots)
            seconds += all_reduce_s(machine, "xla", nbytes) / 2
    seconds += moved * mine / (machine.calibration.memory * machine.memory_bytes_per_s)
    if sharded and workload.optimizer in ("lars", "lamb") and machine.network == "links" and machine.chips > 1:
        seconds += quickest_s(machine, machine.topology, 0.0)
    return seconds + machine.op_s * 10


def input_s(batch: int, machine: Machine) -> float:
    """What a host takes to prepare its part of a batch; 0 where its rate is not known."""
    return batch / machine.hosts / machine.host_examples_per_s if machine.host_examples_per_s else 0.0


def late_host_s(hosts: int, mean_s: float, deviation_s: float, prefetch: int, step_s: float) -> float:
    """How long a step waits, on average, for the latest of `hosts`, each with `prefetch` batches ready.

    A host that takes `mean_s` for a batch, with a standard deviation of `deviation_s` (of heavy-tailed images, say), is
    behind only when its last `prefetch + 1` batches together were; the mean of so many varies by its root. The
    latest of n hosts is about sqrt(2 ln n) deviations out (the extreme of n normal values; heavier tails are worse).
    """
    spread = deviation_s / math.sqrt(prefetch + 1)
    return max(0.0, mean_s + spread * math.sqrt(2 * math.log(max(hosts, 1))) - step_s)


def memory_of(workload: Workload, passes: Passes, layout: Layout, examples: float, replicas: int) -> StepMemory:
    """Weights, slots, gradients, what the backward pass needs, and the batch, of one device.

    FSDP keeps shares of weights and gradients, and beside them the gathered weights of the layer that runs and of the
    next one; of a model whose layers nobody knows, all of them.
    """
    held, sync = passes.parameters, layout.sync
    slots = held * WHOLE * workload.optimizer_slots
    shared = 1.0
    if sync.shards_update:
        shared = shared_elements(workload, layout, replicas).kept / workload.held(layout.split)
    kept = shared if sync.fsdp else 1.0
    gathered = held * gather_bytes(layout) * min(1.0, 2 / workload.layers) if sync.fsdp else 0.0
    return StepMemory(
        parameters=held * WHOLE * kept + workload.state_bytes,
        optimizer=slots * shared,
        gradients=held * wire_bytes(workload, layout) * kept,
        activations=passes.activation_bytes + gathered,
        batch=examples * workload.batch_bytes / layout.split.devices,  # every stage has all of it
    )


def with_evaluations(
    prediction: Prediction, workload: Workload, machine: Machine, every: float
) -> tuple[Prediction, float]:
    """The prediction with its share of evaluations (one each `every` updates), and the seconds of one evaluation."""
    seconds = evaluation_s(prediction, workload, machine)
    share_s = seconds / every if every else 0.0
    return prediction.with_part("evaluation_s", "share of evaluations", share_s), seconds


def evaluation_s(prediction: Prediction, workload: Workload, machine: Machine) -> float:
    """An evaluation on all devices: whole passes of the training batch's size, the last one padded."""
    evaluation, layout, batch = workload.evaluation, prediction.layout, prediction.batch
    if not evaluation.examples:
        return 0.0
    replicas = replicas_of(layout, batch, machine)
    host_s = 0.0 if evaluation.overlaps else evaluation.host_s
    if evaluation.work is None:
        passes = -(-evaluation.examples // batch)
        return passes * (prediction.compute_s + prediction.idle_s) / 3 + host_s
    work = evaluation.work(-(-evaluation.examples // replicas), layout.split, machine.lanes)
    return work_s(work, machine, workload.dtype) + host_s
