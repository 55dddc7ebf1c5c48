"""Prices a step: each part of it in seconds, and the bytes on a device. Plain arithmetic; thousands a second."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from multipod.errors import PlanError
from multipod.plan.machine import Machine
from multipod.plan.network import all_reduce_s, group_s, quickest_s
from multipod.plan.work import Memory, Op, Work, merged
from multipod.plan.workload import SLOTS, UPDATE_BYTES, Split, Workload

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
    """

    batch: int
    split: Split = WHOLE_MODEL
    schedule: str = "torus-2d"
    shard_update: bool = True
    norm_group: int = 1

    def __str__(self) -> str:
        parts = [f"batch {self.batch:,}", str(self.split), self.schedule, "sharded update" if self.shard_update else ""]
        return ", ".join(part for part in parts if part)


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
      idle_s: waiting for the device that has more examples, or for a late host.
      memory: of the device that needs most.
      parts: (name, seconds) of everything that adds up to the step, the longest first.
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
        names = ("compute", "collectives", "update", "input", "evaluation", "idle")
        return {name: getattr(self, f"{name}_s") for name in names}

    def data(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return {
            "workload": self.workload,
            "machine": self.machine,
            "layout": str(self.choice),
            "step_s": self.step_s,
            **{f"{name}_s": seconds for name, seconds in self.split().items()},
            "memory_bytes": self.memory.total,
            "examples_per_s": self.examples_per_s,
            "utilisation": self.utilisation,
        }


def predict_step(workload: Workload, choice: Choice, machine: Machine) -> Prediction:
    """The step of `workload` in layout `choice` on `machine`.

    Raises:
      PlanError: the layout cannot be: more devices a replica than there are, or fewer examples than replicas.
      ScheduleError: the schedule does not fit the machine.
    """
    replicas = replicas_of(choice, machine)
    examples = -(-choice.batch // replicas)
    work = work_of(workload, examples, choice.split, machine.lanes)
    unsplit_s = workload.unsplit_s * examples / (choice.split.spatial if workload.splits_all else 1)
    compute_s = sum(op_s(op, machine) for op in work.ops) + unsplit_s
    mean_s = compute_s * (choice.batch / replicas / examples)
    messages = _messages(work, workload, choice, machine)
    sum_s = gradient_sum_s(workload, choice, machine)
    hidden_s = sum_s - exposed_s(2 / 3 * compute_s, sum_s) if machine.overlaps else 0.0
    changed_s = update_s(workload, choice, machine)
    wait_s = max(0.0, input_s(choice, machine) - compute_s - sum_s)
    by_name: dict[str, float] = {"not counted": unsplit_s}
    for op in work.ops:
        name = op.name.partition(" ")[0]
        by_name[name] = by_name.get(name, 0.0) + op_s(op, machine)
    parts = [*by_name.items(), *messages, ("gradient sum", sum_s - hidden_s), ("update", changed_s), ("input", wait_s)]
    return Prediction(
        workload=workload.name,
        machine=str(machine),
        choice=choice,
        devices=machine.devices,
        compute_s=mean_s,
        collectives_s=sum_s - hidden_s + sum(seconds for _, seconds in messages),
        update_s=changed_s,
        input_s=wait_s,
        evaluation_s=0.0,
        idle_s=compute_s - mean_s,
        memory=memory_of(workload, work, choice, examples, replicas),
        memory_limit=machine.memory_bytes,
        flops=work.flops * machine.devices,
        peak_flop_per_s=machine.flop_per_s(workload.dtype) * machine.devices,
        parts=tuple(sorted(((name, s) for name, s in parts if s > 0), key=lambda part: -part[1])),
    )


@lru_cache(maxsize=4096)
def work_of(workload: Workload, examples: float, split: Split, lanes: int) -> Work:
    """The work of a replica's examples, merged, and remembered: a search asks for the same again and again."""
    return merged(workload.build(examples, split, lanes))


def replicas_of(choice: Choice, machine: Machine) -> int:
    """How many replicas the machine holds.

    Raises:
      PlanError: none, or some would have no example.
    """
    replicas, rest = divmod(machine.devices, choice.split.devices)
    if rest or not replicas:
        raise PlanError(
            f"{machine}: a replica of {choice.split} needs {choice.split.devices} devices, and the machine's "
            f"{machine.devices} do not divide into such. Take a split that divides them."
        )
    if choice.batch < replicas:
        raise PlanError(
            f"{machine}: a batch of {choice.batch} leaves some of {replicas} replicas without an example. Take a "
            f"batch of "
            f"at least {replicas}, or a replica of {-(-machine.devices // max(1, choice.batch))} devices or more."
        )
    return replicas


def op_s(op: Op, machine: Machine) -> float:
    """The roofline of operators: the longer of arithmetic and memory, and what each costs beside."""
    constants = machine.calibration
    speed = getattr(constants, op.kind) if op.kind != "memory" else constants.vector
    arithmetic_s = op.flops / (op.fill * speed * machine.flop_per_s()) if op.flops else 0.0
    memory_s = op.nbytes / (constants.memory * machine.memory_bytes_per_s)
    return max(arithmetic_s, memory_s) + op.count * constants.op_s


def _messages(work: Work, workload: Workload, choice: Choice, machine: Machine) -> list[tuple[str, float]]:
    found: dict[str, float] = {}
    for message in work.messages:
        seconds = message.count * group_s(machine, message.pattern, message.nbytes, message.peers)
        found[message.name] = found.get(message.name, 0.0) + seconds
    if choice.norm_group > 1 and workload.norm_group_messages:
        one = group_s(machine, "all-reduce", workload.norm_bytes, choice.norm_group)
        found["norm sums"] = workload.norm_group_messages * one
    return list(found.items())


def tile_of(split: Split, machine: Machine) -> tuple[int, ...]:
    """The chips of a replica whose weights are split; () for one chip.

    Peers lie along the second dimension first, as in the figure of arXiv:2011.03641: the first dimension's rings, which
    carry nearly all bytes, then join neighbours. 4 devices are 1 x 2 chips, 8 are 2 x 2, 16 are 2 x 4 (y, x).
    """
    chips = -(-split.model // machine.devices_per_chip)
    if chips <= 1:
        return ()
    rows = 1 if chips < 4 else 2
    size = len(machine.topology.shape)
    return (rows, chips // rows, *(1,) * (size - 2)) if size > 1 else (chips,)


def gradient_sum_s(workload: Workload, choice: Choice, machine: Machine) -> float:
    """The sum over the replicas (and, of weights that are not split, over the devices of a replica too)."""
    split_weights = choice.split.model if workload.splits_weights else 1
    nbytes = workload.parameters * workload.wire_bytes / split_weights
    nbytes *= min(split_weights, machine.devices_per_chip)  # the chip's devices hold different shares
    tile = tile_of(choice.split, machine) if workload.splits_weights else ()
    return all_reduce_s(machine, choice.schedule, nbytes, tile)


def exposed_s(backward_s: float, sum_s: float, buckets: int = 16) -> float:
    """What is left of the gradient sum when it goes on beside the backward pass, in equal buckets in their order.

    Bucket k is ready when k / buckets of the backward pass are done; the network serves one at a time.
    """
    done = 0.0
    for k in range(1, buckets + 1):
        done = max(done, k / buckets * backward_s) + sum_s / buckets
    return done - backward_s


def update_s(workload: Workload, choice: Choice, machine: Machine) -> float:
    """Weights and slots pass the memory; shared over all replicas if the update is sharded, with their norms summed."""
    moved = UPDATE_BYTES.get(workload.optimizer, UPDATE_BYTES["adam"])
    split = choice.split.model if workload.splits_weights else 1
    share = machine.devices if choice.shard_update else split
    seconds = moved * workload.parameters / share / (machine.calibration.memory * machine.memory_bytes_per_s)
    if (
        choice.shard_update
        and workload.optimizer in ("lars", "lamb")
        and machine.network == "links"
        and machine.chips > 1
    ):
        seconds += quickest_s(machine, machine.topology, 0.0)
    return seconds + machine.calibration.op_s * 10


def input_s(choice: Choice, machine: Machine) -> float:
    """What a host takes to prepare its part of a batch; 0 where its rate is not known."""
    return choice.batch / machine.hosts / machine.host_examples_per_s if machine.host_examples_per_s else 0.0


def memory_of(workload: Workload, work: Work, choice: Choice, examples: float, replicas: int) -> Memory:
    """Weights, slots, gradients, what the backward pass needs, and the batch, of one device."""
    held = workload.parameters / (choice.split.model if workload.splits_weights else 1)
    slots = held * WHOLE * SLOTS.get(workload.optimizer, 2)
    return Memory(
        parameters=held * WHOLE + workload.state_bytes,
        optimizer=slots / (replicas if choice.shard_update else 1),
        gradients=held * workload.wire_bytes,
        activations=work.activation_bytes,
        batch=examples * workload.batch_bytes / choice.split.devices,
    )


def with_evaluations(
    prediction: Prediction, workload: Workload, machine: Machine, every: float
) -> tuple[Prediction, float]:
    """The prediction with its share of evaluations (one each `every` updates), and the seconds of one evaluation."""
    seconds = evaluation_s(prediction, workload, machine)
    return replace(prediction, evaluation_s=seconds / every if every else 0.0), seconds


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
    return sum(op_s(op, machine) for op in work.ops) + host_s
