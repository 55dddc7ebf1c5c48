"""Prices a step: each part of it in seconds, and the bytes on a device. Plain arithmetic; thousands a second."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from multipod.errors import PlanError
from multipod.layout.stages import micro_batches
from multipod.plan.machine import Machine
from multipod.plan.network import all_reduce_s, quickest_s
from multipod.plan.price import Passes, at_once, in_stages, work_s
from multipod.plan.work import Memory
from multipod.plan.workload import Dtype, Split, Workload

WHOLE_MODEL = Split()
WHOLE = 4
"""Bytes of a weight, and of a slot of the optimizer."""


@dataclass(frozen=True)
class Choice:
    """A layout as the predictor sees it.

    Attributes:
      batch: examples in an update.
      split: of one replica.
      schedule: an algorithm of `multipod.collectives.build.ALGORITHMS`, or a built-in sum.
      shard_update: whether the devices share the weight update (arXiv:2004.13336).
      norm_group: devices that share batch norm's statistics.
      pipeline: (stages) a name of `multipod.pipelines.build.PIPELINES`.
      micro_batches: (stages) as `Layout.micro_batches`; 0 takes up to four for each stage.
      chunks: (stages, `interleaved`) parts of the model on each device.
      dtype: of products; "" is the workload's own.
    """

    batch: int
    split: Split = WHOLE_MODEL
    schedule: str = "torus-2d"
    shard_update: bool = True
    norm_group: int = 1
    pipeline: str = "1f1b"
    micro_batches: int = 0
    chunks: int = 2
    dtype: Dtype | Literal[""] = ""

    def __str__(self) -> str:
        parts = [f"batch {self.batch:,}", self.spelled_split, self.dtype, self.schedule]
        parts.append("sharded update" if self.shard_update else "")
        return ", ".join(part for part in parts if part)

    @property
    def spelled_split(self) -> str:
        """The split, and how a pipeline goes through it: `stage 4 by 1f1b`."""
        return str(self.split) + (f" by {self.pipeline}" if self.split.stage > 1 else "")


@dataclass(frozen=True)
class Prediction:
    """A step, in seconds that one device spends on each part of it.

    Attributes:
      workload, machine, choice: what was priced.
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
    """

    workload: str
    machine: str
    choice: Choice
    devices: int
    compute_s: float
    collectives_s: float
    update_s: float
    input_s: float
    evaluation_s: float
    idle_s: float
    memory: Memory
    memory_limit: float
    flops: float
    peak_flop_per_s: float
    parts: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    messages: tuple[str, ...] = ()
    gradient_sum_s: float = 0.0
    copies_s: float = 0.0

    @property
    def step_s(self) -> float:
        """All parts."""
        return sum(self.split().values())

    @property
    def examples_per_s(self) -> float:
        """Of the whole machine."""
        return self.choice.batch / self.step_s

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
            "layout": str(self.choice),
            "step_s": self.step_s,
            **{f"{name}_s": seconds for name, seconds in self.split().items()},
            "memory_bytes": self.memory.total,
            "state_bytes": self.memory.parameters + self.memory.optimizer,
            "examples_per_s": self.examples_per_s,
            "utilisation": self.utilisation,
        }


def predict_step(workload: Workload, choice: Choice, machine: Machine) -> Prediction:
    """The step of `workload` in layout `choice` on `machine`.

    Raises:
      PlanError: the layout cannot be: more devices a replica than there are, or fewer examples than replicas; stages or
        a precision that the model has not.
      ScheduleError: the schedule does not fit the machine.
    """
    if machine.network == "shared" and choice.dtype not in ("", workload.dtype):
        raise PlanError(f"{machine}: a host multiplies in float32 whatever it is given. Leave --precision out.")
    workload = workload.of(choice.dtype)
    replicas = replicas_of(choice, machine)
    examples = examples_of(choice, machine)
    passes = passes_of(workload, choice, machine, replicas)
    longest_s = passes.compute_s + passes.idle_s
    sum_s = gradient_sum_s(workload, choice, machine, passes.parameters)
    hidden_s = sum_s - exposed_s(2 / 3 * longest_s, sum_s) if machine.overlaps else 0.0
    changed_s = update_s(workload, choice, machine, passes.parameters)
    batch_s = input_s(choice, machine)
    wait_s = late_host_s(machine.hosts, batch_s, machine.host_spread * batch_s, machine.prefetch, longest_s + sum_s)
    told = [("gradient sum", sum_s - hidden_s), ("update", changed_s), ("input", wait_s)]
    if choice.split.stage > 1:
        told.append(("bubble", passes.idle_s))
    return Prediction(
        workload=workload.name,
        machine=str(machine),
        choice=choice,
        devices=machine.devices,
        compute_s=passes.compute_s,
        collectives_s=sum_s - hidden_s + sum(seconds for _, seconds in passes.messages),
        update_s=changed_s,
        input_s=wait_s,
        evaluation_s=0.0,
        idle_s=passes.idle_s,
        memory=memory_of(workload, passes, choice, examples, replicas),
        memory_limit=machine.memory_bytes,
        flops=passes.flops * machine.devices,
        peak_flop_per_s=machine.flop_per_s(workload.dtype) * machine.devices,
        messages=tuple(name for name, _ in passes.messages),
        gradient_sum_s=sum_s,
        parts=tuple(
            sorted(
                ((name, s) for name, s in (*passes.parts, *passes.messages, *told) if s > 0), key=lambda part: -part[1]
            )
        ),
    )


def passes_of(workload: Workload, choice: Choice, machine: Machine, replicas: int) -> Passes:
    """The forward and backward passes of a step, all at once or in a pipeline.

    Raises:
      PlanError, ScheduleError: see `price.in_stages`; or axes beside the stages.
    """
    split = choice.split
    if split.stage == 1:
        return at_once(workload, split, machine, choice.batch, replicas, choice.norm_group)
    if split.sizes.keys() - {"model", "stage"} or choice.shard_update:
        beside = str(replace(split, stage=1, model=1)) or "the weight update"
        raise PlanError(f"{workload.name}: of a stage only model may be split. Take {beside} out, or the stages.")
    if choice.batch % replicas:
        raise PlanError(
            f"{machine}: a batch of {choice.batch} does not divide over {replicas} pipelines. Take "
            f"{-(-choice.batch // replicas) * replicas}."
        )
    micro = micro_of(choice, machine)
    return in_stages(workload, split, machine, choice.batch // replicas, choice.pipeline, micro, choice.chunks)


def examples_of(choice: Choice, machine: Machine) -> int:
    """Examples of the replica that has most."""
    return -(-choice.batch // replicas_of(choice, machine))


def micro_of(choice: Choice, machine: Machine) -> int:
    """The micro-batches of a pipeline, as the run counts them.

    Raises:
      LayoutError: none divides the examples of a replica.
    """
    rounds = choice.pipeline == "interleaved"
    return micro_batches(choice.micro_batches, choice.split.stage, examples_of(choice, machine), rounds=rounds)


def replicas_of(choice: Choice, machine: Machine) -> int:
    """How many replicas the machine holds.

    Raises:
      PlanError: none, or some would have no example.
    """
    replicas, rest = divmod(machine.devices, choice.split.devices)
    if rest or not replicas:
        whole = [n for n in range(1, machine.devices + 1) if machine.devices % n == 0]
        near = sorted(sorted(whole, key=lambda n: abs(n - choice.split.devices))[:2])
        raise PlanError(
            f"{machine}: a replica of {choice.split} needs {choice.split.devices} devices, and the machine's "
            f"{machine.devices} do not divide into such. Take a split over {' or '.join(map(str, near))}."
        )
    if choice.batch < replicas:
        raise PlanError(
            f"{machine}: a batch of {choice.batch} leaves some of {replicas} replicas without an example. Take a "
            f"batch of "
            f"at least {replicas}, or a replica of {-(-machine.devices // max(1, choice.batch))} devices or more."
        )
    return replicas


def tile_of(split: Split, machine: Machine) -> tuple[int, ...]:
    """The chips of a replica whose weights are split; () for one chip.

    Peers lie along the second dimension first, as in the figure of arXiv:2011.03641: the first dimension's rings, which
    carry nearly all bytes, then join neighbours. 4 devices are 1 x 2 chips, 8 are 2 x 2, 16 are 2 x 4 (y, x). In a
    machine of a single row they lie in it.
    """
    chips = -(-split.of_weights // machine.devices_per_chip)
    if chips <= 1:
        return ()
    shape = machine.topology.shape
    rows = 1 if chips < 4 or shape[0] % 2 or len(shape) == 1 else 2
    size = len(shape)
    return (rows, chips // rows, *(1,) * (size - 2)) if size > 1 else (chips,)


def gradient_sum_s(workload: Workload, choice: Choice, machine: Machine, held: float | None = None) -> float:
    """The sum over the replicas (and, of weights that are not split, over the devices of a replica too).

    held: parameters on a device; None: as the split says. Experts' gradients are summed over the replicas only, all
    others over all devices.
    """
    split, wire = choice.split, workload.wire_bytes
    weights = split.of_weights if workload.splits_weights else 1
    if machine.devices == weights and split.expert == 1:
        return 0.0  # one replica, whose devices hold different weights
    tile = tile_of(split, machine) if workload.splits_weights else ()
    # The devices of a chip hold different shares, and all of them leave by the chip's links.
    shares = min(weights, machine.devices_per_chip)
    shares = 1 if machine.network == "shared" else shares
    if split.expert > 1:
        own = workload.expert_parameters / split.of_weights
        rest = (workload.parameters - workload.expert_parameters) / split.model
        shared_s = all_reduce_s(machine, choice.schedule, rest * wire)
        return shared_s + all_reduce_s(machine, choice.schedule, own * wire * shares, tile)
    held = workload.held(split) if held is None else held
    return all_reduce_s(machine, choice.schedule, held * wire * shares, tile)


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


def update_s(workload: Workload, choice: Choice, machine: Machine, held: float | None = None) -> float:
    """Weights and slots pass the memory; shared over all replicas if the update is sharded, with their norms summed.

    held: parameters on a device; None: as the split says.
    """
    moved = workload.update_bytes
    held = workload.held(choice.split) if held is None else held
    mine = workload.parameters / machine.devices if choice.shard_update else held
    seconds = moved * mine / (machine.calibration.memory * machine.memory_bytes_per_s)
    if (
        choice.shard_update
        and workload.optimizer in ("lars", "lamb")
        and machine.network == "links"
        and machine.chips > 1
    ):
        seconds += quickest_s(machine, machine.topology, 0.0)
    return seconds + machine.op_s * 10


def input_s(choice: Choice, machine: Machine) -> float:
    """What a host takes to prepare its part of a batch; 0 where its rate is not known."""
    return choice.batch / machine.hosts / machine.host_examples_per_s if machine.host_examples_per_s else 0.0


def late_host_s(hosts: int, mean_s: float, deviation_s: float, prefetch: int, step_s: float) -> float:
    """How long a step waits, on average, for the latest of `hosts`, each with `prefetch` batches ready.

    A host that takes `mean_s` for a batch, with a standard deviation of `deviation_s` (of heavy-tailed images, say), is
    behind only when its last `prefetch + 1` batches together were; the mean of so many varies by its root. The
    latest of n hosts is about sqrt(2 ln n) deviations out (the extreme of n normal values; heavier tails are worse).
    """
    spread = deviation_s / math.sqrt(prefetch + 1)
    return max(0.0, mean_s + spread * math.sqrt(2 * math.log(max(hosts, 1))) - step_s)


def memory_of(workload: Workload, passes: Passes, choice: Choice, examples: float, replicas: int) -> Memory:
    """Weights, slots, gradients, what the backward pass needs, and the batch, of one device."""
    held = passes.parameters
    slots = held * WHOLE * workload.optimizer_slots
    return Memory(
        parameters=held * WHOLE + workload.state_bytes,
        optimizer=slots / (replicas if choice.shard_update else 1),
        gradients=held * workload.wire_bytes,
        activations=passes.activation_bytes,
        batch=examples * workload.batch_bytes / choice.split.devices * choice.split.stage,  # every stage has all of it
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
    evaluation, choice = workload.evaluation, prediction.choice
    if not evaluation.examples:
        return 0.0
    replicas = replicas_of(choice, machine)
    host_s = 0.0 if evaluation.overlaps else evaluation.host_s
    if evaluation.work is None:
        passes = -(-evaluation.examples // choice.batch)
        return passes * (prediction.compute_s + prediction.idle_s) / 3 + host_s
    work = evaluation.work(-(-evaluation.examples // replicas), choice.split, machine.lanes)
    return work_s(work, machine, workload.dtype) + host_s
