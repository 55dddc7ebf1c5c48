"""What one process does at each update of a world: copies of the state, the launcher's news, and what is told of it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from multipod.elastic.worker.jax_world import WorldConnection
from multipod.elastic.worker.mirror import Mirror, plan_in
from multipod.elastic.worker.peer_reports import PeerReports
from multipod.elastic.worker.probe import Probe
from multipod.elastic.worker.snapshots import SnapshotMemory, take_snapshot
from multipod.elastic.worker.update_buffer import UpdateBuffer
from multipod.elastic.worker.worker import ElasticWorker
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.clock import UpdateTimes
from multipod.train.events import Observer, Regrouped, Updated


@dataclass
class CarriedOver:
    """What one process takes from one world into the next.

    Attributes:
      memory: copies of the state.
      recent: the last updates, for who comes later.
      times: of all updates so far.
      folder: the run's; empty while not known.
      last_s: when the last update was done, on this process's clock; None before the first.
      made: the most updates done so far, those done again not counted twice.
    """

    memory: SnapshotMemory
    recent: UpdateBuffer
    times: UpdateTimes
    folder: str = ""
    last_s: float | None = None
    made: int = 0


class WorldHooks:
    """Keeps the state of one world in memory, and looks for the launcher's news: what the loop calls at each update.

    Args:
      connection: this process's part in the world.
      worker: what this process knows of the worlds.
      carried: where copies and the last updates go.
      program: of this world.
      source: where its first state came from (`multipod.train.events.Regrouped`).
      update: the updates done in that state.
      peers: what the processes reported when the world began.
      observers: told how the world came to be.
      prepare: compiles ahead for the next world, given the connection and the devices.
    """

    def __init__(
        self,
        connection: WorldConnection,
        worker: ElasticWorker,
        carried: CarriedOver,
        program: Program,
        source: str,
        update: int,
        peers: PeerReports,
        observers: Sequence[Observer],
        prepare: Callable[[WorldConnection, Sequence[jax.Device]], None],
    ) -> None:
        self.connection, self.world, self.worker, self.carried = connection, connection.world, worker, carried
        self.source, self.update, self.peers, self.observers, self.prepare = source, update, peers, observers, prepare
        assert isinstance(program.mesh, jax.sharding.Mesh)
        self.mirror = Mirror(plan_in(connection.world, program.shapes), program.shapes, program.mesh)
        self.probe: Probe | None = None
        self.began_s = time.monotonic()
        self.first = True

    def on_phase(self, phase: str, update: int) -> None:
        """Tells the launcher, and stops here if this world is over."""
        self.worker.check(self.world)
        self.worker.beat(phase, update)

    def barrier(self, name: str) -> None:
        """Waits until all processes of this world are here."""
        self.connection.publish(name, "")
        self.connection.collect(name, lambda: self.worker.check(self.world))

    def on_update(self, state: State, event: Updated, leaving: bool) -> float:
        """Copies the state to memory if that is due, and remembers the update; returns the seconds that it copied."""
        self.worker.check(self.world)
        memory, carried = self.carried.memory, self.carried
        update = int(state.update)  # not the event's, where the run has gone back to a checkpoint
        start = now = time.monotonic()
        if leaving or update % memory.every == 0 or update < event.update:
            memory.add(self.mirror(take_snapshot(state, (update, self.world.generation))))
            now = time.monotonic()
        if self.first:
            self.first = False
            self.begin(now)
        self.measure()
        carried.recent.add(event, now)
        carried.last_s, carried.made = now, max(carried.made, event.update)
        return now - start

    def begin(self, now: float) -> None:
        """Says that this world's first update is done, and begins to compile for the next world."""
        self.worker.beat.note(joined=True)
        ahead = (self.connection, jax.devices())
        threading.Thread(target=self.prepare, args=ahead, name="ahead", daemon=True).start()
        if self.world.generation:
            for observer in self.observers:
                observer(self.regrouped(now))

    def measure(self) -> None:
        """Tells the launcher how fast this process's device is, about each second."""
        if time.monotonic() - self.began_s < 1.0:
            return  # others wait for the first updates
        self.probe = self.probe or Probe()
        seconds = self.probe()
        if seconds:
            self.worker.beat.note(speed_s=seconds)

    def regrouped(self, now: float) -> Regrouped:
        """What is told of how this world came to be."""
        idle_s = max(self.peers.idle_s)
        return Regrouped(
            update=self.update,
            generation=self.world.generation,
            processes=len(self.world.slots),
            seats=self.world.total,
            lost=self.world.lost,
            came=list(self.world.newcomers),
            source=self.source,
            repeated=max(0, self.peers.updates_done - self.update),
            seconds=max(0.0, idle_s) + now - self.began_s,
            planned=self.world.planned,
        )
