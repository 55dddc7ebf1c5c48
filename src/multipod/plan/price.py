"""Prices the passes of a step: operators by their roofline, messages by the network, stages by a pipeline's clock."""

from dataclasses import dataclass, replace
from functools import lru_cache

from multipod.errors import PlanError
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.pipelines.build import build
from multipod.pipelines.schedule import PipelineSchedule
from multipod.pipelines.timing import Costs, time_schedule, total
from multipod.plan.machine import Machine
from multipod.plan.network import group_s
from multipod.plan.work import Operation, Work, merged
from multipod.plan.workload import Dtype, Part, Slots, Workload


@dataclass(frozen=True)
class Passes:
    """The forward and backward pass of a step on one device, in seconds.

    Attributes:
      compute_s: what a device works, in the mean.
      idle_s: what it waits for others: those that have more examples, or the bubble of a pipeline.
      parts: (name, seconds) of operators; together compute, or compute and idle where replicas are uneven.
      messages: (name, seconds) of what devices tell each other meanwhile.
      flops: of a device, in the mean.
      parameters: on the device that has most.
      activation_bytes: on the device that has most.
    """

    compute_s: float
    idle_s: float
    parts: tuple[tuple[str, float], ...]
    messages: tuple[tuple[str, float], ...]
    flops: float
    parameters: float
    activation_bytes: float


@lru_cache(maxsize=4096)
def at_once(
    workload: Workload, split: ModelSplit, machine: Machine, batch: int, replicas: int, norm_group: int
) -> Passes:
    """The passes of a replica whose examples go through the model together."""
    examples = -(-batch // replicas)
    work = work_of(workload, examples, split, machine.lanes)
    unsplit_s = workload.unsplit_s * examples / (split.spatial_devices if workload.splits_all else 1)
    longest_s = work_s(work, machine, workload.dtype) + unsplit_s
    mean_s = longest_s * (batch / replicas / examples)
    return Passes(
        compute_s=mean_s,
        idle_s=longest_s - mean_s,
        parts=(("not counted", unsplit_s), *_by_name(work, machine, workload.dtype).items()),
        messages=tuple(_messages(work, workload, norm_group, machine)),
        flops=work.flops,
        parameters=workload.held(split),
        activation_bytes=work.activation_bytes,
    )


@lru_cache(maxsize=4096)
def in_stages(
    workload: Workload, split: ModelSplit, pipeline: PipelineSplit, machine: Machine, examples: int
) -> Passes:
    """The passes of a replica whose layers lie in the stages of `pipeline`, through which its micro-batches travel.

    The bubble is the clock of the very schedule (`multipod.pipelines.timing`): the earliest time of each pass, with the
    passes' own costs. Every device has the same arrays, as many of each shape as the part that needs most of it, as in
    `multipod.execute.pipeline`. Devices that share one host leave no time unused: who waits
    leaves the cores to the others, so there the bubble costs nothing, and each tick's messages pass the memory.

    Raises:
      PlanError: a model that cannot be cut so, or micro-batches that do not divide the examples.
      ScheduleError: what the schedule's builder refuses.
    """
    stages, micro = pipeline.stages, pipeline.micro_batches
    made = schedule_of(pipeline)
    parts = parts_of(workload, examples, micro, made.parts, machine.lanes, split.model)
    priced = prices_of(parts, machine, workload.dtype)
    send_s = group_s(machine, "neighbour", max(part.sent_bytes for part in parts), 2)
    busy_s = micro * sum(one.forward_s + one.backward_s for one in priced) / stages
    told = _mean([one.told for one in priced], micro / stages)
    bubble_s, sends_s = 0.0, made.span * send_s
    if machine.network != "shared":
        bubble_s = clock_s(made, priced, 0.0) - busy_s
        sends_s = clock_s(made, priced, send_s) - busy_s - bubble_s
    messages = [*told.items(), ("between stages", sends_s)]
    if tied := sum(_tied(parts).values()):
        messages.append(("tied weights", group_s(machine, "all-reduce", workload.wire_bytes * tied, stages)))
    live = [n / made.chunks for n in deepest(pipeline)]
    # Beside those under way, what a pass makes before it is stored, and what it takes out of the store.
    saved = room(made, [part.saved for part in parts], [n + 2 for n in live])
    return Passes(
        compute_s=busy_s - sum(told.values()),
        idle_s=bubble_s,
        parts=tuple(_mean([one.operators for one in priced], micro / stages).items()),
        messages=tuple(messages),
        flops=micro * sum(one.flops for one in priced) / stages,
        parameters=room(made, [part.weights for part in parts]),
        activation_bytes=saved,
    )


@dataclass(frozen=True)
class PartPrice:
    """What a micro-batch costs a part of the model.

    Attributes:
      forward_s, backward_s: of its passes, messages between the devices that split it included.
      told: seconds of those messages, by name.
      operators: seconds of the operators, by name.
      flops: of both passes.
    """

    forward_s: float
    backward_s: float
    told: dict[str, float]
    operators: dict[str, float]
    flops: float


def prices_of(parts: tuple[Part, ...], machine: Machine, dtype: Dtype) -> list[PartPrice]:
    """The price of each part; of parts that are one object, found once."""
    known: dict[int, PartPrice] = {}
    for part in parts:
        if id(part) not in known:
            told, operators = told_s(part.whole, machine), _by_name(part.whole, machine, dtype)
            forward_s = work_s(part.forward, machine, dtype) + sum(told_s(part.forward, machine).values())
            whole_s = sum(operators.values()) + sum(told.values())
            backward_s = max(0.0, whole_s - forward_s)
            known[id(part)] = PartPrice(forward_s, backward_s, told, operators, part.whole.flops)
    return [known[id(part)] for part in parts]


def _mean(each: list[dict[str, float]], times: float) -> dict[str, float]:
    """The sums by name, `times` over."""
    found: dict[str, float] = {}
    for one in each:
        for name, seconds in one.items():
            found[name] = found.get(name, 0.0) + times * seconds
    return found


@lru_cache(maxsize=256)
def schedule_of(pipeline: PipelineSplit) -> PipelineSchedule:
    """The schedule of one update, or, of an asynchronous pipeline, of as many as fill it."""
    stages, micro = pipeline.stages, pipeline.micro_batches
    made = build(pipeline.schedule, stages, micro, **pipeline.options)
    return made if made.synchronous else build(pipeline.schedule, stages, micro, 3 + 2 * -(-2 * stages // micro))


@lru_cache(maxsize=256)
def deepest(pipeline: PipelineSplit) -> tuple[int, ...]:
    """For each device, the most micro-batches whose activations it keeps: `PipelineProof.peak_live`, unproven."""
    found = []
    for ops in schedule_of(pipeline).ops:
        live = most = 0
        for op in ops:
            live += (op.kind == "forward") - (op.kind == "backward")
            most = max(most, live)
        found.append(most)
    return tuple(found)


def clock_s(made: PipelineSchedule, parts: list[PartPrice], send_s: float) -> float:
    """Seconds of an update with these prices of the parts: from start to drain, or, asynchronous, in a full pipe."""
    costs = costs_of(parts, send_s)
    if made.synchronous:
        return float(total(made, costs))
    clock = time_schedule(made, costs)
    busy = sum(map(float, clock.busy)) / made.updates / made.stages
    return busy / float(clock.steady_utilisation)


def costs_of(parts: list[PartPrice], send_s: float) -> Costs:
    """The prices of the parts as a pipeline's clock takes them."""
    return Costs([one.forward_s for one in parts], [one.backward_s for one in parts], 0, send_s)


@lru_cache(maxsize=1024)
def parts_of(workload: Workload, examples: int, micro: int, parts: int, lanes: int, model: int = 1) -> tuple[Part, ...]:
    """The parts of the model with what a micro-batch asks of each, merged, and remembered.

    Raises:
      PlanError: a model that cannot be cut into so many, or micro-batches that do not divide the examples.
    """
    if workload.cut is None or not 1 <= parts <= workload.layers:
        most = f"into {workload.layers} at most" if workload.cut else "at all: it does not say its layers"
        raise PlanError(f"{workload.name} cannot be cut into {parts} parts of a pipeline, {most}. Take fewer stages.")
    if examples % micro:
        raise PlanError(
            f"{workload.name}: {micro} micro-batches do not divide the {examples} examples of a replica. Take a batch "
            f"of {-(-examples // micro) * micro} a replica, or other micro-batches."
        )
    cut = workload.cut(examples // micro, parts, lanes, model)
    less = {id(one): replace(one, forward=merged(one.forward), whole=merged(one.whole)) for one in cut}
    return tuple(less[id(one)] for one in cut)


def room(made: PipelineSchedule, slots: list[Slots], times: list[float] | None = None) -> float:
    """What a device has room for: of each chunk and shape as many arrays as the stage that needs most.

    times: how often each stage needs its own; once if None.
    """
    total = 0.0
    for chunk in range(made.chunks):
        most: dict[str, float] = {}
        for stage in range(made.stages):
            mine: dict[str, float] = {}
            for shape, count, size in slots[made.part(stage, chunk)]:
                mine[shape] = mine.get(shape, 0.0) + count * size * (times[stage] if times else 1)
            most = {shape: max(most.get(shape, 0.0), mine.get(shape, 0.0)) for shape in {**most, **mine}}
        total += sum(most.values())
    return total


def _tied(parts: tuple[Part, ...]) -> dict[str, float]:
    """Weights that several parts hold, and their parameters."""
    names = [name for part in parts for name, _ in part.tied]
    return {name: size for part in parts for name, size in part.tied if names.count(name) > 1}


@lru_cache(maxsize=4096)
def work_of(workload: Workload, examples: float, split: ModelSplit, lanes: int) -> Work:
    """The work of a replica's examples, merged, and remembered: a search asks for the same again and again."""
    return merged(workload.build(examples, split, lanes))


def work_s(work: Work, machine: Machine, dtype: Dtype = "bfloat16") -> float:
    """All operators, one after the other."""
    return sum(op_s(op, machine, dtype) for op in work.ops)


def op_s(op: Operation, machine: Machine, dtype: Dtype = "bfloat16") -> float:
    """The roofline of operators: the longer of arithmetic and memory, and what each costs beside."""
    constants = machine.calibration
    speed = getattr(constants, op.kind) if op.kind != "memory" else constants.vector
    arithmetic_s = op.flops / (op.fill * speed * machine.flop_per_s(dtype)) if op.flops else 0.0
    memory_s = op.nbytes / (constants.memory * machine.memory_bytes_per_s)
    return max(arithmetic_s, memory_s) + op.count * machine.op_s


def _by_name(work: Work, machine: Machine, dtype: Dtype) -> dict[str, float]:
    """Seconds of the operators, by the first word of their names."""
    found: dict[str, float] = {}
    for op in work.ops:
        name = op.name.partition(" ")[0]
        found[name] = found.get(name, 0.0) + op_s(op, machine, dtype)
    return found


def told_s(work: Work, machine: Machine) -> dict[str, float]:
    """What devices tell each other in this work, by name."""
    found: dict[str, float] = {}
    for message in work.messages:
        seconds = message.count * group_s(machine, message.pattern, message.nbytes, message.peers)
        found[message.name] = found.get(message.name, 0.0) + seconds
    return found


def _moments_s(workload: Workload, machine: Machine) -> float:
    """What a layer of batch norm takes from all tiles: the mean of their moments, or the moments of each."""
    if workload.norm_moving == "pooled":
        return group_s(machine, "all-reduce", workload.norm_bytes, machine.devices)
    return group_s(machine, "all-gather", workload.norm_bytes * machine.devices, machine.devices)


def _messages(work: Work, workload: Workload, norm_group: int, machine: Machine) -> list[tuple[str, float]]:
    found = told_s(work, machine)
    if norm_group > 1 and workload.norm_group_messages:
        one = group_s(machine, "all-reduce", workload.norm_bytes, norm_group)
        found["norm sums"] = workload.norm_group_messages * one
    if norm_group < machine.devices and workload.norm_group_messages and workload.norm_moving:
        found["moving moments"] = workload.norm_group_messages / 2 * _moments_s(workload, machine)
    if workload.value_messages and machine.devices > 1:
        one = group_s(machine, "all-reduce", workload.value_bytes, machine.devices)
        found["sums of values"] = workload.value_messages * one
    return list(found.items())
