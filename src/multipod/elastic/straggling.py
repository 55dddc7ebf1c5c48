"""Which rank is steadily slower than the others: each times a small fixed computation of its own.

In a synchronous run the slowest rank sets everybody's time, so the times of updates say nothing of who it is. What each
does alone does: some milliseconds on its first device, about each second (`elastic/worker/probe.py`).
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the median rank by `factor`, over the last `count` times of each."""

    rank: int
    factor: float
    rank_s: float
    median_s: float
    count: int

    def __str__(self) -> str:
        times = f"{1e3 * self.rank_s:.1f} ms against {1e3 * self.median_s:.1f} ms"
        slow = f"rank {self.rank} is {self.factor:.1f} times as slow as the median rank"
        return f"{slow}: {times} for the same work, over {self.count} times"


@dataclass
class SpeedHistory:
    """The last times of each rank.

    Attributes:
      steady: how many must be there, and agree.
    """

    steady: int = 10
    taken: dict[int, deque[float]] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)

    def add(self, rank: int, seconds: float) -> None:
        """Notes what a beat says: the same value again is no new time."""
        if seconds > 0 and self.seen.get(rank) != seconds:
            self.seen[rank] = seconds
            self.taken.setdefault(rank, deque(maxlen=self.steady)).append(seconds)

    def forget(self, rank: int) -> None:
        """Forgets the times of a rank that is another process now."""
        self.taken.pop(rank, None)
        self.seen.pop(rank, None)

    def find_slow(self, factor: float) -> list[Straggler]:
        """The stragglers among ranks with `steady` times, slowest first; see `find_stragglers`."""
        full = {rank: times for rank, times in self.taken.items() if len(times) == self.steady}
        return find_stragglers(full, factor)


def find_stragglers(times: Mapping[int, Sequence[float]], factor: float) -> list[Straggler]:
    """Ranks whose mean time exceeds the median rank's mean by `factor`, and whose every other time does, too.

    Half of the times must be over, not only a few long ones: a rank that was held up once is no straggler. With fewer
    than three ranks nobody can be told from the median.
    """
    if len(times) < 3:
        return []
    means = {rank: statistics.fmean(rank_times) for rank, rank_times in times.items()}
    median_s = statistics.median(means.values())
    slow = [
        Straggler(rank, mean / median_s, mean, median_s, len(times[rank]))
        for rank, mean in means.items()
        if mean > factor * median_s and statistics.median(times[rank]) > factor * median_s
    ]
    return sorted(slow, key=lambda straggler: -straggler.factor)
