"""Hosts that are threads of this process, so that collectives of the host side can be tested without processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Room:
    """Where the hosts meet; one that does not come breaks the barrier for all."""

    count: int
    messages: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.count, timeout=60)


@dataclass(frozen=True)
class ThreadHost:
    index: int
    room: Room

    @property
    def count(self) -> int:
        return self.room.count

    def gather(self, message: bytes) -> list[bytes]:
        self.room.messages[self.index] = message
        self.room.barrier.wait()
        everything = [self.room.messages[index] for index in range(self.count)]
        self.room.barrier.wait()
        return everything


def on_hosts(count: int, work: Callable[[ThreadHost], Any]) -> list[Any]:
    """What `work` returns, or raises, on each of `count` hosts."""

    def run(host: ThreadHost) -> Any:
        try:
            return work(host)
        except Exception as error:
            return error

    room = Room(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, [ThreadHost(index, room) for index in range(count)]))
