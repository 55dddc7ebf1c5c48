"""Gives a pipeline a clock: every operation starts as soon as its device is free and what it needs has arrived."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from multipod.errors import ScheduleError
from multipod.pipelines.schedule import KINDS, Kind, PipelineSchedule

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

    def of_parts(self, kind: Kind, parts: int) -> Sequence[Time]:
        """What an operation of this kind takes, for each part of the model."""
        cost = {"forward": self.forward, "backward": self.backward, "update": self.update}[kind]
        return [cost] * parts if isinstance(cost, int | float | Fraction) else cost


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
        """The utilisation between the first two updates of the last device: what a long run comes to.

        Raises:
          ScheduleError: fewer than three updates; a pipe that is about to drain is no long run.
        """
        if self.schedule.updates < 3:
            raise ScheduleError(f"{self.schedule}: steady utilisation needs three updates or more. Build it with them.")
        ends = [e for op, e in zip(self.schedule.ops[-1], self.ends[-1], strict=True) if op.kind == "update"]
        work, all_ = sum(self.busy) / Fraction(self.schedule.updates), (ends[1] - ends[0]) * self.schedule.stages
        return Fraction(work) / Fraction(all_) if isinstance(all_, int | Fraction) else float(work) / all_


def time_schedule(schedule: PipelineSchedule, costs: Costs | None = None) -> Timed:
    """The earliest time of each operation, the order on each device being kept.

    Raises:
      ScheduleError: devices that wait for each other for ever.
    """
    begun, done = _clock(schedule, costs or Costs())
    starts: list[list[Time]] = [[] for _ in range(schedule.stages)]
    ends: list[list[Time]] = [[] for _ in range(schedule.stages)]
    for step, start, end in zip(schedule.flow, begun, done, strict=True):
        starts[step.device].append(start)
        ends[step.device].append(end)
    return Timed(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def total(schedule: PipelineSchedule, costs: Costs) -> Time:
    """`time_schedule(schedule, costs).total` and nothing beside it, for those who price many layouts.

    Raises:
      ScheduleError: devices that wait for each other for ever.
    """
    return max(_clock(schedule, costs)[1], default=0)


def _clock(schedule: PipelineSchedule, costs: Costs) -> tuple[list[Time], list[Time]]:
    """When each step of `schedule.flow` starts and ends: as soon as its device is free and what it needs is there."""
    prices = {kind: costs.of_parts(kind, schedule.parts) for kind in KINDS}
    send = costs.send if schedule.stages > 1 else 0
    free: list[Time] = [0] * schedule.stages
    starts: list[Time] = []
    ends: list[Time] = []
    for device, kind, part, need in schedule.flow:
        start = free[device]
        if need >= 0 and (arrived := ends[need] + send) > start:
            start = arrived
        end = free[device] = start + prices[kind][part]
        starts.append(start)
        ends.append(end)
    return starts, ends
