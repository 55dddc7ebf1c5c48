"""Gives a pipeline a clock: every operation starts as soon as its device is free and what it needs has arrived."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from multipod.errors import ScheduleError
from multipod.pipelines.schedule import Op, PipelineSchedule

Time = int | float | Fraction


@dataclass(frozen=True)
class Costs:
    """What the passes of each part of the model take, in any one unit of time.

    Attributes:
      forward, backward: of one micro-batch; one number for all parts, or one for each.
      update: of a device's weights.
      send: between two devices; the sender does not wait.
    """

    forward: Time | Sequence[Time] = 1
    backward: Time | Sequence[Time] = 2
    update: Time = 0
    send: Time = 0

    def of(self, op: Op, part: int) -> Time:
        """What `op` takes, done for this part of the model."""
        if op.kind == "update":
            return self.update
        cost = self.forward if op.kind == "forward" else self.backward
        return cost if isinstance(cost, int | float | Fraction) else cost[part]


@dataclass(frozen=True)
class Timed:
    """A schedule with a clock.

    Attributes:
      schedule: what was timed.
      starts, ends: of each device's operations, in their order.
    """

    schedule: PipelineSchedule
    starts: tuple[tuple[Time, ...], ...]
    ends: tuple[tuple[Time, ...], ...]

    @property
    def total(self) -> Time:
        """From the start to the end of the last operation."""
        return max(max(ends, default=0) for ends in self.ends)

    @property
    def busy(self) -> tuple[Time, ...]:
        """How long each device works."""
        return tuple(
            sum(end - start for start, end in zip(*both, strict=True))
            for both in zip(self.starts, self.ends, strict=True)
        )

    @property
    def utilisation(self) -> Fraction | float:
        """The devices' working time over all their time, first fill and last drain included."""
        busy, all_ = sum(self.busy), self.total * len(self.ends)
        return Fraction(busy) / Fraction(all_) if isinstance(all_, int | Fraction) else busy / all_

    @property
    def steady_utilisation(self) -> Fraction | float:
        """The same over the time between the first two updates of the last device: what a long run comes to.

        Raises:
          ScheduleError: fewer than three updates; a pipe that is about to drain is no long run.
        """
        if self.schedule.updates < 3:
            raise ScheduleError(f"{self.schedule}: steady utilisation needs three updates or more. Build it with them.")
        ends = [e for op, e in zip(self.schedule.ops[-1], self.ends[-1], strict=True) if op.kind == "update"]
        work, all_ = sum(self.busy) / Fraction(self.schedule.updates), (ends[1] - ends[0]) * self.schedule.stages
        return Fraction(work) / Fraction(all_) if isinstance(all_, int | Fraction) else float(work) / all_


def timed(schedule: PipelineSchedule, costs: Costs | None = None) -> Timed:
    """The earliest time of each operation, the order on each device being kept.

    Raises:
      ScheduleError: devices that wait for each other for ever.
    """
    costs = costs or Costs()
    sent: dict[tuple[str, int, int], Time] = {}  # when the result of (kind, micro-batch, part) exists
    free: list[Time] = [0] * schedule.stages
    starts: list[list[Time]] = [[] for _ in range(schedule.stages)]
    ends: list[list[Time]] = [[] for _ in range(schedule.stages)]
    moved = True
    while moved:
        moved = False
        for p, ops in enumerate(schedule.ops):
            while len(ends[p]) < len(ops):
                op = ops[len(ends[p])]
                ready = _ready(schedule, p, op, sent, costs.send)
                if ready is None:
                    break
                part = schedule.part(p, op.chunk)
                start = max(free[p], ready)
                free[p] = start + costs.of(op, part)
                starts[p].append(start)
                ends[p].append(free[p])
                sent[op.kind, op.micro, part] = free[p]
                moved = True
    stuck = [
        f"device {p} at {ops[len(e)].kind} of {ops[len(e)].micro}"
        for p, (ops, e) in enumerate(zip(schedule.ops, ends, strict=True))
        if len(e) < len(ops)
    ]
    if stuck:
        raise ScheduleError(f"{schedule}: devices wait for each other: {', '.join(stuck[:6])}. Change their order.")
    return Timed(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _ready(
    schedule: PipelineSchedule, p: int, op: Op, sent: dict[tuple[str, int, int], Time], send: Time
) -> Time | None:
    """When what `op` needs from other devices is there; None if nobody has sent it yet."""
    part = schedule.part(p, op.chunk)
    source = part - 1 if op.kind == "forward" else part + 1
    if op.kind == "update" or not 0 <= source < schedule.parts:
        return 0
    arrived = sent.get((op.kind, op.micro, source))
    return None if arrived is None else arrived + (send if schedule.stages > 1 else 0)
