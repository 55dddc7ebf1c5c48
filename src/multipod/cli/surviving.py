"""`multipod train` in processes that come and go: under `multipod launch --survive`."""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from multipod.cli.cluster import keep_stdout_for_python
from multipod.cli.keeping import Keeper, mesh_of
from multipod.cli.main import started_s
from multipod.cli.options import Where, chosen_recipe
from multipod.errors import CheckpointError, ClusterError, RunFolderError

if TYPE_CHECKING:
    from jax import Device

    from multipod.cli.train import Request
    from multipod.elastic.worker.jax_world import Connection
    from multipod.elastic.worker.peer_reports import Met
    from multipod.elastic.worker.snapshots import Memory
    from multipod.elastic.worker.update_buffer import Recent
    from multipod.elastic.worker.worker import Member
    from multipod.recipe.recipe import Recipe
    from multipod.runs.lock import RunLock
    from multipod.step.program import Program
    from multipod.step.state import State
    from multipod.train.events import Ended, Updated
    from multipod.train.hooks import Faults
    from multipod.train.run_folder import RunFolder
    from multipod.train.stop import StopRequest


HANDOVER_S = 15.0
"""How long the first process of a world waits for the one before to let go of the folder."""


def run_in_worlds(request: "Request", where: Where) -> int:
    """Trains in one world after the other, as the launcher says; returns the exit code."""
    from multipod.chaos.inject import Injector
    from multipod.cli.train import remembered
    from multipod.elastic.worker.worker import Member, identity, live_through
    from multipod.recipe.text import to_text
    from multipod.runs.facts import data_identities, versions
    from multipod.train.hooks import no_faults
    from multipod.train.stop import stop_on_signals

    beat = where.heartbeat
    assert beat is not None
    beat("starting", 0)
    keep_stdout_for_python()
    request, where = remembered(request, where, where.cluster.processes * where.cpu_devices)
    recipe = checked(chosen_recipe(request.recipe, request.changes, replace(where, fail=())), where)
    member = Member(beat, where.cluster.process, where.timeouts)
    faults = Injector(request.inject, where.cluster.process) if request.inject else no_faults
    with stop_on_signals("stopping after this update and saving; Ctrl-C again exits at once") as stop:
        member.ready(identity(to_text(recipe), versions(), data_identities(recipe)))
        here = Here(request, where, recipe, member, stop, faults)
        try:
            ended = live_through(member, here.train_in)
        finally:
            here.let_go()
        beat.close()
    return 130 if ended.interrupted else 0


def checked(recipe: "Recipe", where: Where) -> "Recipe":
    """Refuses what cannot change its processes on the way.

    Raises:
      ClusterError: --fail, stages, or a sum with which every device has an optimizer state of its own.
    """
    if where.fail:
        raise ClusterError("launch --survive decides itself which chips are missing. Leave out --fail.")
    if recipe.layout.stage > 1:
        raise ClusterError(
            f"layout.stage={recipe.layout.stage}: a pipeline is not cut anew around a lost process. Leave out "
            "--survive (--restarts works)."
        )
    if recipe.layout.local_state:
        raise ClusterError(
            f"layout.gradient_sum={recipe.layout.gradient_sum} keeps an optimizer state on every device, which cannot "
            "be handed on. Leave out --survive (--restarts works), or take another sum."
        )
    return recipe


@dataclass
class Here:
    """What one process carries from world to world: all but the devices.

    Attributes:
      faults: what is to go wrong; nothing, but for `multipod chaos`.
      folder: of the run; empty while not known.
      memory, recent: copies of the state, and the last updates, for who comes later; made in the first world.
      last_s: when the last of them was done, on this process's clock; None before the first.
      made: the most updates done so far, those done again not counted twice.
      lock: on the folder, while this process writes there.
      prepared: numbers of processes for which the update was compiled ahead.
    """

    request: "Request"
    where: Where
    recipe: "Recipe"
    member: "Member"
    stop: "StopRequest"
    faults: "Faults"
    memory: "Memory | None" = None
    recent: "Recent | None" = None
    folder: str = ""
    times: Any = None
    last_s: float | None = None
    made: int = 0
    lock: "RunLock | None" = None
    prepared: set[int] = field(default_factory=set)

    def train_in(self, connection: "Connection") -> "Ended":
        """Trains in one world: to the end, or until `Left`."""
        import jax

        from multipod.cli.example_logging import example_log
        from multipod.cli.train import finish
        from multipod.train.loop import RunContext
        from multipod.train.loop import train as loop

        world, member = connection.world, self.member
        program = self.program_in(connection, jax.devices())
        _ = program.lowered  # what does not fit the mesh is refused here
        met = self.meet_peers(connection)
        folder = self.found_folder(program, met)
        member.beat.note(folder=str(folder.path))
        began_s = time.monotonic()
        self.hold(folder)
        with ExitStack() as stack:
            checkpoints: Any = Later(lambda: self.checkpoints(folder), partial(member.look, world))
            stack.callback(checkpoints.abandon)
            state, source = self.found_state(met, program, checkpoints)
            update = 0 if state is None else int(state.update)
            past, repeated = self.past(folder, update, met, world.generation)
            observers = stack.enter_context(self.observers(folder, update, world.generation))
            keeper = Keeper(self, connection, program, source, update, met)
            log = stack.enter_context(example_log(self.request, folder, program, state, world.generation))

            def keep(state: "State", event: "Updated", leaving: bool) -> float:
                copied_s = keeper.keep(state, event, leaving, observers)
                log.keep(state, event, leaving)
                return copied_s

            around = RunContext(
                checkpoints=checkpoints,
                observers=observers,
                on_phase=log.pulse(keeper.pulse),
                barrier=keeper.meet,
                on_update=keep,
                wants_restart=lambda: member.ending(world),
                resume_with_due=world.generation > 0 and update > 0,
                times=self.times,
                stop=self.stop,
                stop_after=self.request.stop_after,
                reading=self.request.reading,
                evaluate_beside=self.request.evaluate_beside,
                resume=self.resume_command(folder),
                folder=str(folder.path),
                facts=self.facts(program, world.generation),
                began=began_s if world.generation else started_s(),
                past=past,
                repeated=repeated,
                faults=self.faults.of_run(folder.checkpoints, world.generation),
            )
            _, ended = loop(program, around, state)
            checkpoints.close()
        finish(folder, self.where)
        return ended

    def program_in(self, connection: "Connection", made: "Sequence[Device]", without: int = 0) -> "Program":
        """The recipe's program on the mesh of a world's devices, around the empty seats; and the last taken ones."""
        from multipod.layout.seats import seated
        from multipod.step.program import program_of

        world = connection.world
        devices: dict[int, list[Device]] = {}
        for device in made:
            if device.process_index >= len(world.seats) - without:
                continue
            devices.setdefault(world.seats[device.process_index], []).append(device)
        layout, mesh = seated(self.recipe.layout, devices, world.total)
        return program_of(replace(self.recipe, layout=layout), mesh, faulty=self.faults.flips)

    def prepare(self, connection: "Connection", made: "Sequence[Device]") -> None:
        """Compiles the update for one process less, into the cache: what is waited for when a process dies.

        In that world process k has the devices that process k has in this one, whoever dies; so this need not know. It
        differs where a schedule goes around the hole: there nothing is prepared. It is told the devices, and asks JAX
        for none: the world may be over by then, and JAX would make some that are of no world.
        """
        from multipod.layout.layout import BUILT_IN_SUMS

        world = connection.world
        left = len(world.seats) - 1
        known = left in self.prepared or self.recipe.layout.gradient_sum not in BUILT_IN_SUMS
        if known or left < 1 or world.process_of(self.member.rank) >= left:
            return
        self.prepared.add(left)
        with suppress(Exception):  # if it is for nothing, the next world says why
            self.program_in(connection, made, without=1).compile_update()

    def meet_peers(self, connection: "Connection") -> "Met":
        """Tells the peers what this process has, and hears what they have."""
        from multipod.elastic.worker.peer_reports import Met
        from multipod.elastic.worker.snapshots import Memory
        from multipod.elastic.worker.update_buffer import Recent
        from multipod.train.clock import Times

        world = connection.world
        if self.memory is None or self.recent is None:
            self.memory, self.recent, self.times = Memory(), Recent(), Times()
        self.memory.every = world.mirror_every
        idle_s = -1.0 if self.last_s is None else time.monotonic() - self.last_s
        speaks = next((rank for rank in world.ranks if rank not in world.came), None)
        recent = self.recent.told(all_of_them=speaks == self.member.rank)
        said = {
            "held": self.memory.manifest(),
            "folder": self.folder or world.folder,
            "idle_s": idle_s,
            "made": self.made,
            "ports": sorted(connection.ports),
        }
        connection.post("met", msgspec.json.encode({**said, "recent": recent}).decode())
        heard = [msgspec.json.decode(text) for text in connection.posted("met", partial(self.member.look, world))]
        connection.peers = {port for one in heard for port in one["ports"]}
        return Met(heard)

    def found_folder(self, program: "Program", met: "Met") -> "RunFolder":
        """The run's folder: known to a peer, or made now."""
        from multipod.cli.train import run_folder
        from multipod.train.run_folder import RunFolder

        known = met.folder
        folder = RunFolder(Path(known)) if known else run_folder(self.request, self.where, program)
        self.folder = str(folder.path)
        return folder

    def found_state(self, met: "Met", program: "Program", checkpoints: Any) -> "tuple[State | None, str]":
        """The state to go on from, and where it came from: the peers' memory, else a checkpoint, else nothing."""
        from multipod.cli.train import said
        from multipod.elastic.worker.snapshots import chosen, placed

        assert self.memory is not None
        choice = chosen(met.held, program.shapes)
        if choice is not None:
            own = self.memory.at(choice.stamp)
            state = placed(choice, own, program.shapes, mesh_of(program))
            self.memory.kept = [] if own is None else [own]
            return state, choice.source
        self.memory.kept = []
        first = not any(idle_s >= 0 for idle_s in met.idle_s)
        if first and self.request.begin is not None:
            return self.request.begin(program), "start"
        if first and self.request.resume is None and not met.folder:
            return None, "start"
        try:
            state = checkpoints.restore(program.shapes, self.request.at if first else None, said)
        except CheckpointError:
            if self.request.resume is not None or checkpoints.updates():
                raise
            return None, "start"
        return state, "checkpoint"

    def checkpoints(self, folder: "RunFolder") -> Any:
        """Those of the run, for the processes of this world."""
        from multipod.train.checkpoint import Checkpoints

        beat = self.member.beat
        return Checkpoints(folder.checkpoints, self.recipe.keep_checkpoints, committed=lambda n: beat.note(saved=n))

    def hold(self, folder: "RunFolder") -> None:
        """Holds the folder for the first process of this world, who writes there; lets go of it for any other.

        Raises:
          RunFolderError: whoever holds it does not let go.
        """
        import jax

        from multipod.runs.lock import hold

        if jax.process_index() > 0:
            self.let_go()
            return
        until_s = time.monotonic() + HANDOVER_S
        while self.lock is None:
            try:
                self.lock = hold(folder.path, shlex.join(["multipod", *sys.argv[1:]]))
            except RunFolderError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)  # who was the first before lets go as this world begins

    def let_go(self) -> None:
        """Lets others write the folder."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def past(self, folder: "RunFolder", update: int, met: "Met", generation: int) -> tuple[dict[str, float], int]:
        """What the time of the run went into before this world, and the updates that are done again."""
        import jax

        from multipod.cli.train import before
        from multipod.elastic.worker.update_buffer import fill
        from multipod.train.goodput import past_of
        from multipod.train.observers import jsonl

        if jax.process_index() > 0 or not folder.metrics.exists() or not (generation or update):
            return {}, 0
        if not generation:
            return before(folder, update)
        fill(folder.metrics, met.recent, update)
        events = [event for record in jsonl.read(folder.metrics) if (event := jsonl.decode(record)) is not None]
        return past_of(events, update, max(met.idle_s), cause="regroup")

    @contextmanager
    def observers(self, folder: "RunFolder", update: int, generation: int) -> Iterator[list[Any]]:
        """The observers of this world: all on its first process, none on the others."""
        import jax

        from multipod.cli.train import watched_by
        from multipod.train.observers import jsonl

        request = self.request
        if jax.process_index() == 0 and (generation or update):
            jsonl.keep_until(folder.metrics, update, again=("evaluated",) if generation else ())
        with watched_by(folder, request, self.where, None, first=generation == 0) as observers:
            yield observers

    def facts(self, program: "Program", generation: int) -> dict[str, Any]:
        """What the observers are told of where the run is, and of what its copies in memory cost."""
        from multipod.cli.train import facts_of
        from multipod.elastic.worker.snapshots import copy_bytes, mirror_bytes

        assert self.memory is not None
        kept = {"mirror_every": self.memory.every, "bytes_to_neighbour": mirror_bytes(program.shapes)}
        kept |= {"bytes_kept": copy_bytes(program.shapes) + kept["bytes_to_neighbour"], "generation": generation}
        return facts_of(program, self.request, self.where) | kept

    def resume_command(self, folder: "RunFolder") -> str:
        """The command that goes on with the run, should it be stopped."""
        from multipod.cli.reading import as_options
        from multipod.cli.train import resume_command

        return resume_command(folder, self.where, as_options(self.request.reading))


class Later:
    """Checkpoints that are opened when they are first used: processes meet for that. Each use looks around before."""

    def __init__(self, make: Any, look: Any) -> None:
        self._make, self._look, self._made = make, look, None

    def abandon(self) -> None:
        """As theirs, if they were opened."""
        if self._made is not None:
            self._made.abandon()

    def __getattr__(self, name: str) -> Any:
        self._look()
        if self._made is None:
            if name in ("close", "wait"):
                return lambda: None
            if name == "has_failed":
                return False
            self._made = self._make()
        return getattr(self._made, name)
