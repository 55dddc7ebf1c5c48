"""How a host reads: with how many threads or processes, how far ahead. Nothing here changes what a run learns."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from multipod.errors import DataError


@dataclass(frozen=True)
class InputOptions:
    """How batches are made on this host.

    Attributes:
      threads: that read and decode. 0: begins with one (with half of the cores where data are decoded), and doubles up
        to the number of cores as long as the devices wait for data.
      processes: that do so instead, each with a Python of its own: for augmentation written in Python. 0: threads.
      ahead: batches made ahead. 0: begins with 2, up to 8 while the devices wait.
      cache_bytes: of host memory for decoded images (0: none), for data that decode whole images.
      cache_folder: keeps these images on disk instead, and from run to run; empty: in memory.
      limit_s: a process that needs longer for a part of a batch (64 rows) is taken to hang.
      image_order: memory layout in which images are sent (`multipod.step.memory_layout`): empty, auto, HWNC, HWCN.
    """

    threads: int = 0
    processes: int = 0
    ahead: int = 0
    cache_bytes: int = 0
    cache_folder: str = ""
    limit_s: float = 300.0
    image_order: Literal["", "auto", "HWNC", "HWCN"] = ""

    def __post_init__(self) -> None:
        wrong = [f"{name}={value}" for name, value in vars(self).items() if isinstance(value, int) and value < 0]
        if not self.limit_s > 0:
            wrong.append(f"limit_s={self.limit_s}: give the seconds after which a process is taken to hang")
        if self.processes and self.cache_bytes:
            wrong.append(f"processes={self.processes} with a cache: the cache belongs to one process, take threads")
        if self.cache_folder and not self.cache_bytes:
            wrong.append("cache_folder without cache_bytes: say how large it may become")
        if wrong:
            raise DataError(f"reading: {'; '.join(wrong)}. Numbers are 0 or more.")


class SkippedExample(NamedTuple):
    """An example that was left out: another stands in its place, or, in evaluation, none."""

    number: int
    name: str
    reason: str


@dataclass
class ReadStatistics:
    """What happened while reading: examples that were left out, and where the time went. Used by many threads."""

    skipped: dict[int, SkippedExample] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    _news: list[SkippedExample] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def skip(self, number: int, name: str, reason: str) -> None:
        """Notes an example; the same one again is no news."""
        with self._lock:
            if number not in self.skipped:
                self.skipped[number] = SkippedExample(number, name, reason)
                self._news.append(self.skipped[number])

    def news(self) -> list[SkippedExample]:
        """The examples noted since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news

    @contextmanager
    def stage(self, name: str, count: int = 1) -> Iterator[None]:
        """Adds the time inside, of so many examples, to the stage of this name; stages do not nest."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start, count)

    def add(self, name: str, seconds: float, count: int = 1) -> None:
        """Adds a piece of work, on so many examples, to a stage."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.counts[name] = self.counts.get(name, 0) + count

    def take(self) -> dict[str, tuple[float, int]]:
        """Seconds and examples of each stage since the last call, which are no longer held here."""
        with self._lock:
            stages = {name: (seconds, self.counts[name]) for name, seconds in self.seconds.items()}
            self.seconds, self.counts = {}, {}
        return stages

    def __getstate__(self) -> dict[str, object]:
        return {}  # another process notes what it sees anew

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]


@runtime_checkable
class Monitored(Protocol):
    """A source that notes what it left out and where its time went."""

    @property
    def statistics(self) -> ReadStatistics:
        """The notes, which go on while it is read."""
        ...


def statistics_of(source: object) -> ReadStatistics:
    """The source's statistics, or new ones that nothing writes into."""
    return source.statistics if isinstance(source, Monitored) else ReadStatistics()


@dataclass
class Tuner:
    """Raises threads and batches ahead, from few to what keeps the devices fed. One decision each `window` updates.

    Doubling the threads comes first. Where that did not lower the time waited by a tenth, more threads are no cure (the
    disk is, or memory's bandwidth), so it is taken back, and only the depth grows. The time, not its share: where
    reading takes nearly all of an update, twice the threads halve the update and leave the share as it was.
    """

    reading: InputOptions
    window: int = 8
    enough: float = 0.02
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    first: int = 1

    def __post_init__(self) -> None:
        self.threads = self.reading.threads or self.first
        self.ahead = self.reading.ahead or 2
        self.shares: list[float] = []
        self._waits = self._steps = 0.0
        self._count = 0
        self._waited_s = 0.0
        self._helped = True

    def adapt(self, waited_s: float, step_s: float) -> bool:
        """One update of `step_s`, of which the devices waited for data `waited_s`. Returns whether anything changed."""
        self._waits, self._steps, self._count = self._waits + waited_s, self._steps + step_s, self._count + 1
        if self._count < self.window or self._steps <= 0:
            return False
        share, waited_s = self._waits / self._steps, self._waits / self._count
        self._waits, self._steps, self._count = 0.0, 0.0, 0
        before = (self.threads, self.ahead)
        if share > self.enough:
            self._grow(waited_s)
        self.shares.append(share)
        self._waited_s = waited_s
        return before != (self.threads, self.ahead)

    def _grow(self, waited_s: float) -> None:
        may_thread = not self.reading.threads and not self.reading.processes and self._helped
        if may_thread and self.threads > 1 and self.shares and waited_s > 0.9 * self._waited_s:
            self.threads, self._helped = self.threads // 2, False
        elif may_thread and self.threads < self.cores:
            self.threads = min(2 * self.threads, self.cores)
        elif not self.reading.ahead and self.ahead < 8:
            self.ahead = min(2 * self.ahead, 8)
