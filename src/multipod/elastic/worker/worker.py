"""A rank's side of a run that survives: goes from world to world as the launcher says.

Each world runs in a thread of its own, so that the main thread stays free to learn of the next one and to cut what
hangs in the old one. A thread that does not come back within `ESCAPE_S` is abandoned: what it holds stays in memory,
and it ends at its next look at the clock or when its time-out comes.
"""

import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from multipod.elastic.heartbeat import Heartbeat
from multipod.elastic.worker.jax_world import WorldConnection, join, leave
from multipod.elastic.world import World, read_go, read_world
from multipod.errors import ClusterError, PeerLostError
from multipod.runtime import Timeouts
from multipod.train.hooks import WorldLeft

ESCAPE_S = 3.0
T = TypeVar("T")


class ElasticWorker:
    """A rank of a run that survives: what it knows of the worlds, and what it reports of itself.

    Args:
      beat: the connection to the launcher.
      rank: the launcher's number of this process.
      timeouts: as the launcher has them.
    """

    def __init__(self, beat: Heartbeat, rank: int, timeouts: Timeouts) -> None:
        self.beat, self.rank, self.timeouts = beat, rank, timeouts
        self._news = threading.Condition()
        self._world: World | None = None
        self._refused = ""
        self._go = -1
        beat.on_line = self._receive

    def report_ready(self, identity: str) -> None:
        """Reports that this process waits for a world, and what it would train there."""
        self.beat.note(identity=identity)

    def next_world(self, after: int, limit_s: float | None = None) -> World:
        """The newest world after this generation that this rank is in, as soon as there is one.

        Raises:
          PeerLostError: none came within `limit_s`.
          ClusterError: the launcher wants nothing of this process, with its reason.
        """
        with self._news:
            came = self._news.wait_for(lambda: self._refused or self._after(after) is not None, limit_s)
            if self._refused:
                raise ClusterError(self._refused)
            world = self._after(after)
            if not came or world is None:
                raise PeerLostError(f"rank {self.rank} heard of no new world for {limit_s:g} s.")
            return world

    def wait_for_all(self, world: World) -> None:
        """Returns when all processes of `world` are ready to join it.

        JAX's client is not asked to wait for them: it ends the process if one does not come.

        Raises:
          Left: the world broke before.
        """
        with self._news:
            self._news.wait_for(lambda: self._go >= world.generation or self.is_broken(world))
        self.check(world)

    def is_broken(self, world: World) -> bool:
        """Whether `world` is over, and its last update with it."""
        latest = self._after(world.generation)
        return latest is not None and not latest.planned

    def is_ending(self, world: World) -> bool:
        """Whether `world` is to be left after an update, by all at the same."""
        latest = self._after(world.generation)
        return latest is not None and latest.planned

    def check(self, world: World) -> None:
        """Raises `WorldLeft` if `world` is broken."""
        if self.is_broken(world):
            raise WorldLeft(f"world {world.generation}")

    def _after(self, generation: int) -> World | None:
        latest = self._world
        return latest if latest is not None and latest.generation > generation else None

    def _receive(self, line: str) -> None:
        world, go = read_world(line), read_go(line)
        with self._news:
            if go >= 0:
                self._go = go
            elif world is None:
                self._refused = line
            elif self.rank in world.ranks:
                self._world = world
            self._news.notify_all()


def run_worlds(worker: ElasticWorker, train_in: Callable[[WorldConnection], T]) -> T:
    """Calls `train_in` in one world after the other, until it returns; that is the result.

    `train_in` raises `WorldLeft` where the world is to be left after an update; whatever it raises in a world that is
    broken is part of the break.

    Raises:
      MultipodError: what `train_in` refused.
      Exception: what it raised, if nobody else saw the world break.
    """
    generation, clean = -1, True
    while True:
        world = worker.next_world(generation)
        generation = world.generation
        worker.beat.restart()  # else leaving the last world would count as an update without progress
        worker.beat.note(generation=generation, joined=False, broken="")
        attempt = _Attempt(worker, world, train_in)
        ended = attempt.run()
        if ended and attempt.error is None:
            return attempt.result  # type: ignore[return-value]
        if ended and attempt.error is not None and not isinstance(attempt.error, WorldLeft):
            _report_broken(worker, world, attempt.error)
        attempt.error = None  # its frames hold arrays
        leave(attempt.connection if ended else None)
        clean = clean and ended
        if clean:
            worker.beat.note(left=generation)


class _Attempt(Generic[T]):
    """One world's thread."""

    def __init__(self, worker: ElasticWorker, world: World, train_in: Callable[[WorldConnection], T]) -> None:
        self.worker, self.world, self.train_in = worker, world, train_in
        self.connection: WorldConnection | None = None
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> bool:
        """Waits for the thread's end, or for the world's; False if the thread had to be abandoned."""
        thread = threading.Thread(target=self._go, name=f"world-{self.world.generation}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            if thread.is_alive() and self.worker.is_broken(self.world):
                return self._escape(thread)
        return True

    def _escape(self, thread: threading.Thread) -> bool:
        until_s = time.monotonic() + ESCAPE_S
        while thread.is_alive() and time.monotonic() < until_s:
            if self.connection is not None:
                self.connection.cut()
            thread.join(0.05)
        return not thread.is_alive()

    def _go(self) -> None:
        limits = self.worker.timeouts
        try:
            self.worker.wait_for_all(self.world)
            self.connection = join(self.world, self.worker.rank, limits.service_s)
            self.worker.check(self.world)
            self.result = self.train_in(self.connection)
        except BaseException as error:
            self.error = error


def _report_broken(worker: ElasticWorker, world: World, error: BaseException) -> None:
    """Returns when the launcher knows that `world` is broken; raises `error` again where that was not the reason."""
    if worker.is_broken(world):
        return
    first = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
    lost = isinstance(error, jax.errors.JaxRuntimeError | PeerLostError)
    if lost:
        worker.beat.note(broken=first)
    try:
        # What is no sign of a lost peer may still come of one: the news of it is then under way.
        worker.next_world(world.generation, worker.timeouts.collective_s if lost else 2.0)
    except PeerLostError:
        raise error from None
    print(f"world {world.generation}: {first}", file=sys.stderr, flush=True)


def identity_of(recipe_text: str, versions: dict[str, Any], data: dict[str, str]) -> str:
    """What processes must have in common to train together, as one line of text a person can read."""
    parts = [f"{name} {versions[name]}" for name in ("multipod", "jax", "jaxlib") if name in versions]
    return ", ".join(
        [
            *parts,
            f"recipe {zlib.crc32(recipe_text.encode()):08x}",
            f"data {zlib.crc32(repr(sorted(data.items())).encode()):08x}",
        ]
    )
