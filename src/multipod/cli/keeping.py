"""What one process does at each update of a world: copies of the state, the launcher's news, and what is told of it."""

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from multipod.cli.surviving import Here
    from multipod.elastic.straggling import Probe
    from multipod.elastic.worker.jax_world import WorldConnection
    from multipod.elastic.worker.peer_reports import PeerReports
    from multipod.step.program import Program
    from multipod.step.state import State
    from multipod.train.events import Regrouped, Updated


class Keeper:
    """Keeps the state and the peace of one world: what the loop calls at each update."""

    def __init__(
        self,
        here: "Here",
        connection: "WorldConnection",
        program: "Program",
        source: str,
        update: int,
        met: "PeerReports",
    ) -> None:
        from multipod.elastic.worker.snapshots import Mirror

        self.here, self.connection, self.world = here, connection, connection.world
        self.source, self.update, self.met = source, update, met
        self.mirror = Mirror(program.shapes, mesh_of(program))
        self.probe: Probe | None = None
        self.began_s = time.monotonic()
        self.first = True

    def pulse(self, phase: str, update: int) -> None:
        """Tells the launcher, and stops here if this world is over."""
        self.here.member.check(self.world)
        self.here.member.beat(phase, update)

    def meet(self, name: str) -> None:
        """Waits until all processes of this world are here."""
        self.connection.publish(name, "")
        self.connection.collect(name, lambda: self.here.member.check(self.world))

    def keep(self, state: "State", event: "Updated", leaving: bool, observers: list[Any]) -> float:
        """Copies the state to memory if that is due, and remembers the update; returns the seconds that it copied."""
        import jax

        from multipod.elastic.worker.snapshots import take_snapshot

        here = self.here
        here.member.check(self.world)
        assert here.memory is not None
        assert here.recent is not None
        update = int(state.update)  # not the event's, where the run has gone back to a checkpoint
        start = now = time.monotonic()
        if leaving or update % here.memory.every == 0 or update < event.update:
            here.memory.add(self.mirror(take_snapshot(state, (update, self.world.generation))))
            now = time.monotonic()
        if self.first:
            self.first = False
            here.member.beat.note(joined=True)
            ahead = (self.connection, jax.devices())
            threading.Thread(target=here.prepare, args=ahead, name="ahead", daemon=True).start()
            if self.world.generation:
                for observer in observers:
                    observer(self.regrouped(now))
        self.measure()
        here.recent.add(event, now)
        here.last_s, here.made = now, max(here.made, event.update)
        return now - start

    def measure(self) -> None:
        """Tells the launcher how fast this process's device is, about each second."""
        from multipod.elastic.straggling import Probe

        if time.monotonic() - self.began_s < 1.0:
            return  # others wait for the first updates
        self.probe = self.probe or Probe()
        seconds = self.probe()
        if seconds:
            self.here.member.beat.note(speed_s=seconds)

    def regrouped(self, now: float) -> "Regrouped":
        """What is told of how this world came to be."""
        from multipod.train.events import Regrouped

        idle_s = max(self.met.idle_s)
        return Regrouped(
            update=self.update,
            generation=self.world.generation,
            processes=len(self.world.slots),
            seats=self.world.total,
            lost=self.world.lost,
            came=list(self.world.newcomers),
            source=self.source,
            repeated=max(0, self.met.updates_done - self.update),
            seconds=max(0.0, idle_s) + now - self.began_s,
            planned=self.world.planned,
        )


def mesh_of(program: "Program") -> "Mesh":
    """The program's mesh, which has devices here."""
    from jax.sharding import Mesh

    assert isinstance(program.mesh, Mesh)
    return program.mesh
