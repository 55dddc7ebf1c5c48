"""From a pipeline schedule to tables that a loop over ticks reads. NumPy and integers only.

A schedule is that of one update, begun again every `stride` ticks. At tick t since the pipe was empty, the row
t mod stride of a table says what each device does: the number age * N + j means micro-batch j of the update that began
`age` strides ago, and -1 means nothing.
"""

from dataclasses import dataclass

import numpy as np

from multipod.pipelines.check import PipelineProof
from multipod.pipelines.schedule import PipelineSchedule

StagePairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TickSegment:
    """Ticks `start` to `stop - 1` of a synchronous update, in groups of `len(forward)`.

    forward, backward: for each tick of a group, (sender, receiver) of the messages that may be sent in it. What is
    never sent is not waited for.
    """

    start: int
    stop: int
    forward: tuple[StagePairs, ...]
    backward: tuple[StagePairs, ...]
    has_forward: bool
    has_backward: bool


@dataclass(frozen=True)
class TickTables:
    """What the devices do, tick by tick.

    Attributes:
      stride, span: as of the schedule.
      forward, backward: [chunks][stride, stages], what each device passes.
      update: [stride, stages], age of the update that ends there, or -1.
      arrivals: forward and backward, [chunks][stride, stages]: the message that reaches the device after the tick.
      keep: [chunks][stages], micro-batches whose activations are kept at once.
      inbox: forward and backward, [chunks]: messages that wait at once.
      batches: minibatches that forward passes need at once.
      delays: [parts, N], forward delays in a full pipe.
    """

    stride: int
    span: int
    forward: tuple[np.ndarray, ...]
    backward: tuple[np.ndarray, ...]
    update: np.ndarray
    arrivals: tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]
    keep: tuple[tuple[int, ...], ...]
    inbox: tuple[tuple[int, ...], tuple[int, ...]]
    batches: int
    delays: np.ndarray
    segments: tuple[TickSegment, ...]

    @property
    def immediate(self) -> bool:
        """Whether each message is read in the tick after the one that sends it, or never."""
        return len(self.forward) == 1 and max(map(max, self.inbox)) == 1


def build_tables(proof: PipelineProof) -> TickTables:
    """Builds the tables of a proven schedule."""
    schedule = proof.schedule
    n, stride = schedule.micro_batches, schedule.stride
    ticks: dict[tuple[str, int, int], int] = {}  # (kind, part, j) of update 0 to its tick
    update = np.full((stride, schedule.stages), -1, np.int32)
    for p, ops in enumerate(schedule.ops):
        for op in ops:
            if op.kind == "update" and op.micro == 0:
                update[op.tick % stride, p] = op.tick // stride
            elif op.kind != "update" and op.micro < n:
                ticks[op.kind, schedule.part(p, op.chunk), op.micro] = op.tick
    forward = _build_table(schedule, ticks, "forward", 0)
    backward = _build_table(schedule, ticks, "backward", 0)
    arrivals = _build_table(schedule, ticks, "forward", 1), _build_table(schedule, ticks, "backward", -1)
    last = max(tick for (kind, _, _), tick in ticks.items() if kind == "forward")
    return TickTables(
        stride,
        schedule.span,
        forward,
        backward,
        update,
        arrivals,
        tuple(
            tuple(_count_kept(schedule, ticks, schedule.part(p, c)) for p in range(schedule.stages))
            for c in range(schedule.chunks)
        ),
        (_count_waiting(schedule, ticks, "forward", -1), _count_waiting(schedule, ticks, "backward", 1)),
        1 + last // stride,
        np.array([proof.forward_delays(part) for part in range(schedule.parts)], np.int32),
        _build_segments(schedule, forward, backward),
    )


def _build_table(
    schedule: PipelineSchedule, ticks: dict[tuple[str, int, int], int], kind: str, shift: int
) -> tuple[np.ndarray, ...]:
    """Builds the table of what each device passes (shift 0), or of what its neighbour has sent to it in that tick."""
    tables = [np.full((schedule.stride, schedule.stages), -1, np.int32) for _ in range(schedule.chunks)]
    for (which, part, j), tick in ticks.items():
        target = part + shift
        if which == kind and 0 <= target < schedule.parts:
            chunk, p = divmod(target, schedule.stages)
            assert tables[chunk][tick % schedule.stride, p] == -1, "two passes of one device in a tick"
            tables[chunk][tick % schedule.stride, p] = tick // schedule.stride * schedule.micro_batches + j
    return tuple(tables)


def _count_kept(schedule: PipelineSchedule, ticks: dict[tuple[str, int, int], int], part: int) -> int:
    """Counts the widest range of micro-batches between their forward and backward pass in `part`."""
    lives = [(ticks["forward", part, j], ticks["backward", part, j]) for j in range(schedule.micro_batches)]
    # In a tick the backward pass comes first, so the place of a micro-batch that goes back is free for one that comes.
    return _widest_range(lives, schedule)


def _count_waiting(
    schedule: PipelineSchedule, ticks: dict[tuple[str, int, int], int], kind: str, source: int
) -> tuple[int, ...]:
    """Counts, for each chunk, the widest range of micro-batches whose message has come and is not used."""
    widest = []
    for chunk in range(schedule.chunks):
        parts = [schedule.part(p, chunk) for p in range(schedule.stages)]
        senders = [(part, part + source) for part in parts if 0 <= part + source < schedule.parts]
        each = [
            _widest_range([(ticks[kind, a, j], ticks[kind, part, j]) for j in range(schedule.micro_batches)], schedule)
            for part, a in senders
        ]
        widest.append(max(each, default=1))
    return tuple(widest)


def _widest_range(lives: list[tuple[int, int]], schedule: PipelineSchedule) -> int:
    """The widest range of micro-batches in use at once, when update after update follows."""
    ages = -(-schedule.span // schedule.stride)
    several = [
        (start + k * schedule.stride, stop + k * schedule.stride) for k in range(2 * ages + 1) for start, stop in lives
    ]
    widest = 1
    for start, _ in several:
        # A place is taken at the end of tick `start` and free again when tick `stop` reads it.
        used = [m for m, (a, b) in enumerate(several) if a <= start < b]
        widest = max(widest, used[-1] - used[0] + 1)
    return widest


def _build_segments(
    schedule: PipelineSchedule, forward: tuple[np.ndarray, ...], backward: tuple[np.ndarray, ...]
) -> tuple[TickSegment, ...]:
    """Cuts a synchronous update into as few loops as let nobody wait for a message that is never sent."""
    if not schedule.synchronous:
        return ()
    f_rows, b_rows = (np.flatnonzero((np.stack(t) >= 0).any((0, 2))) for t in (forward, backward))
    if f_rows.max() < b_rows.min():  # all forward, then all backward
        middle = int(b_rows.min())
        return (
            _build_segment(schedule, forward, backward, 0, middle, 1),
            _build_segment(schedule, forward, backward, middle, schedule.span, 1),
        )
    single = _build_segment(schedule, forward, backward, 0, schedule.span, 1)
    if schedule.span % 2:
        return (single,)
    double = _build_segment(schedule, forward, backward, 0, schedule.span, 2)
    sends = [sum(map(len, (*s.forward, *s.backward))) / len(s.forward) for s in (single, double)]
    return (double,) if sends[1] < sends[0] else (single,)


def _build_segment(
    schedule: PipelineSchedule,
    forward: tuple[np.ndarray, ...],
    backward: tuple[np.ndarray, ...],
    start: int,
    stop: int,
    period: int,
) -> TickSegment:
    def pairs(table: tuple[np.ndarray, ...], shift: int, offset: int) -> StagePairs:
        rows = range(start + offset, stop, period)
        end = schedule.parts - 1 if shift > 0 else 0
        senders = {
            p
            for chunk, per_chunk in enumerate(table)
            for p in range(schedule.stages)
            if schedule.part(p, chunk) != end and (per_chunk[rows, p] >= 0).any()
        }
        return tuple((p, (p + shift) % schedule.stages) for p in sorted(senders))

    busy = [any((t[start:stop] >= 0).any() for t in table) for table in (forward, backward)]
    return TickSegment(
        start,
        stop,
        tuple(pairs(forward, 1, offset) for offset in range(period)),
        tuple(pairs(backward, -1, offset) for offset in range(period)),
        *busy,
    )


def steady_pairs(schedule: PipelineSchedule) -> tuple[StagePairs, StagePairs]:
    """(sender, receiver) of the messages of a pipe that never stops: each stage to the next, and back."""
    return (
        tuple((p, p + 1) for p in range(schedule.stages - 1)),
        tuple((p, p - 1) for p in range(1, schedule.stages)),
    )
