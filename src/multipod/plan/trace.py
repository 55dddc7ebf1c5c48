"""A predicted step as a trace for ui.perfetto.dev or chrome://tracing: what each device does when."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from multipod.errors import PlanError
from multipod.layout.split import PipelineSplit
from multipod.pipelines.timing import time_schedule
from multipod.plan.machine import Machine
from multipod.plan.network import group_s
from multipod.plan.predict import Prediction, examples_of, micro_of
from multipod.plan.price import costs_of, op_s, parts_of, prices_of, schedule_of
from multipod.plan.sync import bucket_times
from multipod.plan.work import Operation
from multipod.plan.workload import Workload

Event = dict[str, Any]

PASSES, NETWORK, HOST = 1, 2, 3
"""Threads of a device; they count from 1, because viewers take 0 for the idle processor."""

THREADS = {PASSES: "passes and update", NETWORK: "network", HOST: "host"}


def write_step_trace(prediction: Prediction, workload: Workload, machine: Machine, path: Path) -> None:
    """Writes the trace of `prediction`, which is of `workload` on `machine`, as JSON, an event a line."""
    events = step_events(prediction, workload, machine)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(prediction.data()) + ', "traceEvents": [')
        for number, event in enumerate(events):
            file.write(("," if number else "") + "\n" + json.dumps(event))
        file.write("\n]}\n")


def step_events(prediction: Prediction, workload: Workload, machine: Machine) -> Iterator[Event]:
    """The events in the Trace Event Format: names, then complete events ("X") in microseconds.

    One process for each device that does something else: the stages of one pipeline, or a single device that stands for
    all. Operators lie in the order of the program that was traced, or of the table; what devices tell each other in
    between is summed up behind them, since the plan knows how much it is and not where. The last event ends at the
    predicted time of the step.

    Raises:
      PlanError: a pipeline that never drains has no step with a beginning and an end.

    Source: "Trace Event Format", Duca and Sinclair, 2016.
    """
    pipeline = prediction.layout.pipeline
    if pipeline is None:
        yield from _alike(prediction, workload, machine)
        return
    if pipeline.asynchronous:
        raise PlanError(f"{pipeline.schedule} never drains, so no step of it begins and ends. Trace 1f1b.")
    yield from _stages(prediction, pipeline, workload, machine)


def _alike(prediction: Prediction, workload: Workload, machine: Machine) -> Iterator[Event]:
    workload, layout = workload.of(prediction.dtype), prediction.layout
    yield from _names(1, f"any of {prediction.devices:,} devices")
    now = 0.0
    if prediction.input_s:
        yield _event("waits for the host", "input", 1, HOST, 0.0, prediction.input_s)
        now = prediction.input_s
    began = now
    work = workload.build(examples_of(layout, prediction.batch, machine), layout.split, machine.lanes)
    for op in work.ops:
        seconds = op_s(op, machine, workload.dtype)
        yield _event(op.name, op.kind, 1, PASSES, now, seconds, _about(op, machine, workload))
        now += seconds
    rest = prediction.compute_s + prediction.idle_s - (now - began)
    if rest > 1e-9 * prediction.step_s:
        yield _event("not counted", "passes", 1, PASSES, now, rest)
        now += rest
    for name, seconds in prediction.parts:
        if name in prediction.messages:
            yield _event(name, "message", 1, PASSES, now, seconds)
            now += seconds
    yield from _sums(prediction, now)
    yield from _ends(prediction, [1], now + dict(prediction.parts).get("gradient sum", 0.0))


def _sums(prediction: Prediction, now: float) -> Iterator[Event]:
    """The gradient sum of passes that end at `now`: in buckets beside the backward pass if it overlaps, else behind."""
    sum_s, exposed = prediction.gradient_sum_s, dict(prediction.parts).get("gradient sum", 0.0)
    about = {"schedule": prediction.layout.sync.gradient_sum}
    if exposed >= sum_s * (1 - 1e-9):
        yield from [_event("gradient sum", "sum", 1, NETWORK, now, exposed, about)] if exposed else []
        return
    backward_s = 2 / 3 * (prediction.compute_s + prediction.idle_s)
    for number, (start, end) in enumerate(bucket_times(backward_s, sum_s, prediction.buckets)):
        begin = now - backward_s + start
        yield _event("gradient sum", "sum", 1, NETWORK, begin, end - start, {**about, "bucket": number})


def _stages(prediction: Prediction, pipeline: PipelineSplit, workload: Workload, machine: Machine) -> Iterator[Event]:
    workload, layout = workload.of(prediction.dtype), prediction.layout
    examples, micro = (of(layout, prediction.batch, machine) for of in (examples_of, micro_of))
    made = schedule_of(replace(pipeline, micro_batches=micro))
    parts = parts_of(workload, examples, micro, made.parts, machine.lanes, layout.split.model)
    send_s = group_s(machine, "neighbour", max(part.sent_bytes for part in parts), 2)
    clock = time_schedule(made, costs_of(prices_of(parts, machine, workload.dtype), send_s))
    pids = range(1, made.stages + 1)
    for pid in pids:
        yield from _names(pid, f"stage {pid - 1}", pid)
    inside = {name: seconds for name, seconds in prediction.parts if name in prediction.messages}
    passes_s = prediction.compute_s + prediction.idle_s + sum(inside.values()) - inside.get("tied weights", 0.0)
    # In a full pipe, and on a host whose devices share its cores, the clock of one drained update is another one.
    scale = passes_s / float(clock.total)
    for p, ops in enumerate(made.ops):
        for op, start, end in zip(ops, clock.starts[p], clock.ends[p], strict=True):
            if op.kind != "update":
                about = {"micro-batch": op.micro, "part": made.part(p, op.chunk)}
                name = f"{op.kind} {op.micro}"
                times = scale * float(start), scale * float(end - start)
                yield _event(name, op.kind, p + 1, PASSES, prediction.input_s + times[0], times[1], about)
    now = prediction.input_s + passes_s
    for name in ("tied weights", "gradient sum"):
        if seconds := dict(prediction.parts).get(name, 0.0):
            for pid in pids:
                yield _event(name, "sum", pid, NETWORK, now, seconds, {"schedule": layout.sync.gradient_sum})
            now += seconds
    yield from _ends(prediction, list(pids), now)


def _ends(prediction: Prediction, pids: list[int], now: float) -> Iterator[Event]:
    for pid in pids:
        at = now
        for name, kind, seconds in (
            ("update", "update", prediction.update_s),
            ("share of evaluations", "evaluation", prediction.evaluation_s),
            ("share of copies for a lost host", "copies", prediction.copies_s),
        ):
            if seconds:
                yield _event(name, kind, pid, PASSES, at, seconds)
                at += seconds


def _about(op: Operation, machine: Machine, workload: Workload) -> dict[str, Any]:
    start_s = op.count * machine.op_s
    memory_s = op.nbytes / (machine.calibration.memory * machine.memory_bytes_per_s)
    seconds = op_s(op, machine, workload.dtype)
    limit = "start" if 2 * start_s > seconds else "memory" if memory_s >= seconds - start_s else "arithmetic"
    return {"flops": op.flops, "bytes": op.nbytes, "fill": round(op.fill, 3), "count": op.count, "limited by": limit}


def _event(
    name: str, category: str, pid: int, tid: int, start_s: float, seconds: float, about: dict[str, Any] | None = None
) -> Event:
    """A complete event in whole nanoseconds, so that what follows touches and never overlaps."""
    first, last = round(start_s * 1e9), round((start_s + seconds) * 1e9)
    times = {"ts": first / 1000, "dur": (last - first) / 1000}
    return {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, **times, "args": about or {}}


def _names(pid: int, name: str, order: int = 1) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": order}}
    for tid, title in THREADS.items():
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": title}}
