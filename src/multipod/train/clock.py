"""Where the time of a run goes. All times are seconds of a monotonic clock, taken when results are there."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass
class StartTimes:
    """Where the time goes from the start of a process to the end of its first update, part by part.

    The parts, in their order: `import` of JAX and of this package, and joining the other processes; `devices`, until
    JAX has them; `trace`, the recipe and the step as a program; `folder`, made or opened, with the state of a run that
    goes on; in a run that survives `world`, all of these; `state`, the first one; `data`, opened, and the first batch
    of them; `compile`, the step; `update`, the first.

    Attributes:
      since_s: what the clock said at the last mark.
      parts_s: seconds of each part so far.
    """

    since_s: float = field(default_factory=time.monotonic)
    parts_s: dict[str, float] = field(default_factory=dict)

    def mark(self, part: str, clock: Clock = time.monotonic) -> None:
        """Counts the time since the last mark to `part`; nothing once the first update is done."""
        if "update" in self.parts_s:
            return
        now_s = clock()
        self.parts_s[part] = self.parts_s.get(part, 0.0) + max(0.0, now_s - self.since_s)
        self.since_s = now_s


@dataclass
class UpdateTimes:
    """Times of the updates of a run, filled by the loop, read by its summary."""

    step_s: list[float] = field(default_factory=list)
    inside_s: list[float] = field(default_factory=list)
    data_s: list[float] = field(default_factory=list)
    first_step_s: float = 0.0

    def add(self, step_s: float, inside_s: float, data_s: float) -> None:
        """One update: end to end; of it the compiled step, from dispatch to result; of it waiting for data."""
        self.step_s.append(step_s)
        self.inside_s.append(inside_s)
        self.data_s.append(data_s)

    @property
    def median_step_s(self) -> float:
        """Over all updates but the first, if there are more."""
        return statistics.median(self.step_s[1:] or self.step_s or [0.0])

    @property
    def total_s(self) -> float:
        """Over all updates but the first, if there are more."""
        return sum(self.step_s[1:] or self.step_s)

    @property
    def outside_share(self) -> float:
        """The share of time in which no update was running."""
        return max(0.0, 1 - sum(self.inside_s) / sum(self.step_s)) if self.step_s else 0.0

    @property
    def data_share(self) -> float:
        """The share of time spent waiting for batches."""
        return sum(self.data_s) / sum(self.step_s) if self.step_s else 0.0

    def rate(self, batch: int) -> float:
        """Examples a second over all updates but the first."""
        counted = len(self.step_s[1:] or self.step_s)
        return counted * batch / self.total_s if self.total_s else 0.0
