"""A simulation as a trace for ui.perfetto.dev or chrome://tracing: one track for each arc, under the chip it leaves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multipod.collectives.schedule import OPS
from multipod.errors import ScheduleError
from multipod.simulate.picture import node_name
from multipod.simulate.simulate import Simulation
from multipod.topology.routes import routes

EVENTS = 2_000_000
"""Most events of a trace: some 400 MB of text, about what the viewers can open."""


def write_trace(simulation: Simulation, path: Path) -> None:
    """Writes the trace of `simulation` to `path` as JSON, one event a line.

    Raises:
      ScheduleError: more than two million events.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "otherData": ' + json.dumps(_about(simulation)) + ', "traceEvents": [')
        for number, event in enumerate(events(simulation)):
            file.write(("," if number else "") + "\n" + json.dumps(event))
        file.write("\n]}\n")


def events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """The events in the Trace Event Format: names of processes and threads, then a complete event ("X") for each
    message on each arc of its way.

    The process is the node that an arc leaves, the thread the arc; both count from 1, because viewers take 0 for the
    idle processor. Times are in microseconds, whole
    nanoseconds, so that messages that follow each other on an arc touch and never overlap.

    Raises:
      ScheduleError: more than two million events.

    Source: "Trace Event Format", Duca and Sinclair, 2016.
    """
    ways, timeline = routes(simulation.topology), simulation.timeline()
    messages = [
        (int(src), int(dst), ways.route(int(src), int(dst)))
        for src, dst in zip(timeline.src, timeline.dst, strict=True)
    ]
    count = sum(len(way) for _, _, way in messages)
    if count > EVENTS:
        raise ScheduleError(
            f"{simulation.schedule}: its trace has {count:,} events, and viewers open about {EVENTS:,}. "
            "Trace a smaller machine, or an algorithm with fewer steps."
        )
    yield from _names(simulation)
    served = [0.0] * len(ways.arcs)  # until when each arc has been busy
    for k, (src, dst, way) in enumerate(messages):
        pieces = int(timeline.first[k]), int(timeline.stop[k]) - 1
        op = OPS[timeline.op[k]]
        name = f"{op} piece {pieces[0]}" if pieces[0] == pieces[1] else f"{op} pieces {pieces[0]}-{pieces[1]}"
        about = {
            "step": int(timeline.step[k]),
            "from": node_name(simulation.topology, src),
            "to": node_name(simulation.topology, dst),
            "bytes": float(timeline.nbytes[k]),
            "arrives_us": float(timeline.arrival_s[k]) * 1e6,
        }
        for arc in way:
            begin, end = float(timeline.start_s[k]), float(timeline.end_s[k])
            if simulation.mode == "stepped":  # the messages of a step one after the other, each at the arc's speed
                begin = max(begin, served[arc])
                end = served[arc] = begin + float(timeline.nbytes[k]) / float(ways.arcs[arc].bytes_per_s)
            first, last = round(begin * 1e9), round(end * 1e9)
            yield {
                "name": name,
                "cat": op,
                "ph": "X",
                "pid": ways.arcs[arc].tail + 1,
                "tid": arc + 1,
                "ts": first / 1000,
                "dur": (last - first) / 1000,
                "args": about,
            }


def _names(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for node in sorted({tail for tail, _ in simulation.arcs}):
        kind = "chip " if node < simulation.topology.size else ""
        args: dict[str, Any] = {"name": kind + node_name(simulation.topology, node)}
        yield {"name": "process_name", "ph": "M", "pid": node + 1, "args": args}
        yield {"name": "process_sort_index", "ph": "M", "pid": node + 1, "args": {"sort_index": node}}
    for arc, (tail, head) in enumerate(simulation.arcs):
        args = {"name": f"to {node_name(simulation.topology, head)}"}
        yield {"name": "thread_name", "ph": "M", "pid": tail + 1, "tid": arc + 1, "args": args}


def _about(simulation: Simulation) -> dict[str, Any]:
    return {
        "schedule": str(simulation.schedule),
        "machine": str(simulation.topology),
        "bytes": float(simulation.nbytes),
        "mode": simulation.mode,
        "seconds": float(simulation.seconds),
    }
