"""A run in processes that come and go, under `multipod launch --survive`: it trains in one world after the other."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec

from multipod import runtime
from multipod.chaos.inject import Injector
from multipod.elastic.worker.jax_world import WorldConnection
from multipod.elastic.worker.mirror import plan_in
from multipod.elastic.worker.peer_reports import PeerReports
from multipod.elastic.worker.snapshots import SnapshotMemory, choose_copy, copy_bytes, restore_copy
from multipod.elastic.worker.update_buffer import UpdateBuffer, append_missing
from multipod.elastic.worker.worker import ElasticWorker, run_worlds
from multipod.elastic.world import World
from multipod.errors import CheckpointError, ClusterError, RunFolderError
from multipod.layout.compatible import conflicts
from multipod.layout.slots import mesh_of_survivors
from multipod.layout.sync import BUILT_IN_SUMS
from multipod.recipe.recipe import Recipe
from multipod.runs.example_log import open_example_log
from multipod.runs.lazy_checkpoints import LazyCheckpoints
from multipod.runs.lock import RunLock, hold
from multipod.runs.object_store import LeaderCopies
from multipod.runs.options import RuntimeOptions
from multipod.runs.request import (
    RunResult,
    TrainRequest,
    logger_arguments,
    reading_arguments,
    remember,
    requested_recipe,
    resume_command,
)
from multipod.runs.stages import (
    identify,
    open_observers,
    prepare_folder,
    print_warning,
    read_events,
    read_past,
    run_facts,
    stop_when_asked,
    write_report,
)
from multipod.runs.world_hooks import CarriedOver, WorldHooks
from multipod.step.checks import layout_use
from multipod.step.program import Program, program_of
from multipod.step.state import State
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.clock import StartTimes, UpdateTimes
from multipod.train.context import LoopHooks, Resumption, RunContext, RunInfo
from multipod.train.events import Ended, Observer, Updated
from multipod.train.goodput import past_seconds
from multipod.train.hooks import Faults, no_faults
from multipod.train.loop import train as train_program
from multipod.train.observers import jsonl
from multipod.train.run_folder import RunFolder
from multipod.train.stop import StopRequest
from multipod.train.updating import run_ahead_of, steps_per_call_of

IN_ORDER = "a run that survives copies its state between two updates"

HANDOVER_S = 15.0
"""How long the first process of a world waits for the one before to let go of the folder."""


def run_elastic(request: TrainRequest, options: RuntimeOptions) -> RunResult:
    """Trains in one world after the other, as the launcher says."""
    beat = options.heartbeat
    assert beat is not None
    beat("starting", 0)
    runtime.keep_stdout_for_python()
    request, options = remember(request, options, options.cluster.processes * options.cpu_devices)
    recipe = requested_recipe(request, replace(options, fail=()))
    refuse_inelastic(recipe, options)
    run_ahead_of(request.run_ahead, recipe.bad_updates, IN_ORDER)  # none, and refused if asked for
    steps_per_call_of(request.steps_per_call, recipe, in_order=IN_ORDER)  # one, likewise
    if request.profile is not None:
        raise ClusterError("--profile goes without --survive, where processes come and go. Leave it out.")
    worker = ElasticWorker(beat, options.cluster.process, options.timeouts)
    faults = Injector(request.inject, options.cluster.process) if request.inject else no_faults
    folder = HeldFolder(options.command)
    with (
        stop_when_asked() as stop,
        LeaderCopies(request.copy_to, recipe.keep_checkpoints, print_warning) as copies,
    ):
        worker.report_ready(identify(recipe))
        run = ElasticRun(request, options, recipe, worker, stop, faults, folder, copies)
        try:
            ended = run_worlds(worker, run.train_in)
        finally:
            folder.let_go()
    beat.close()
    return RunResult(Path(run.carried.folder), ended)


def refuse_inelastic(recipe: Recipe, options: RuntimeOptions) -> None:
    """Refuses a recipe that cannot change its processes on the way.

    Raises:
      ClusterError: --fail, stages, or a sum with which every device has an optimizer state of its own.
    """
    if options.fail:
        raise ClusterError("launch --survive decides itself which chips are missing. Leave out --fail.")
    wrong = conflicts(replace(layout_use(recipe), survives=True))
    if wrong:
        raise ClusterError("\n".join(wrong))


class HeldFolder:
    """The lock on the run's folder, which the first process of each world holds."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._lock: RunLock | None = None

    def hold(self, folder: RunFolder) -> None:
        """Holds the folder if this process is the first of its world, who writes there; else lets go of it.

        Raises:
          RunFolderError: whoever holds it does not let go.
        """
        if jax.process_index() > 0:
            self.let_go()
            return
        until_s = time.monotonic() + HANDOVER_S
        while self._lock is None:
            try:
                self._lock = hold(folder.path, self._command)
            except RunFolderError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)  # who was the first before lets go as this world begins

    def let_go(self) -> None:
        """Lets others write the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@dataclass(frozen=True)
class ElasticRun:
    """A run as one process of it has it in every world: all but the devices.

    Attributes:
      faults: what is to go wrong; nothing, but for `multipod chaos`.
      copies: of what is saved, in an object store.
      carried: what this process takes from world to world.
      prepared: numbers of processes for which the update was compiled ahead.
    """

    request: TrainRequest
    options: RuntimeOptions
    recipe: Recipe
    worker: ElasticWorker
    stop: StopRequest
    faults: Faults
    held: HeldFolder
    copies: LeaderCopies
    carried: CarriedOver = field(default_factory=lambda: CarriedOver(SnapshotMemory(), UpdateBuffer(), UpdateTimes()))
    prepared: set[int] = field(default_factory=set)

    def train_in(self, connection: WorldConnection) -> Ended:
        """Trains in one world: to the end, or until `multipod.train.hooks.WorldLeft`."""
        world, worker, carried = connection.world, self.worker, self.carried
        program = self.program_in(connection, jax.devices())
        _ = program.lowered  # what does not fit the mesh is refused here
        peers = meet_peers(worker, carried, connection)
        self.copies.begin(new=not peers.folder and self.request.resume is None)
        folder = self.find_folder(program, peers)
        worker.beat.note(folder=str(folder.path))
        began_s = time.monotonic()
        self.held.hold(folder)
        with ExitStack() as stack:
            open_them = partial(self.open_checkpoints, folder)
            checkpoints = LazyCheckpoints(open_them, partial(worker.check, world))
            stack.callback(checkpoints.abandon)
            state, source = self.find_state(peers, program, checkpoints)
            update = 0 if state is None else int(state.update)
            past, repeated = self.read_past(folder, update, peers, world.generation)
            observers = stack.enter_context(self.open_observers(folder, update, world.generation))
            hooks = WorldHooks(connection, worker, carried, program, source, update, peers, observers, self.prepare)
            wanted = self.request.log_examples
            log = stack.enter_context(open_example_log(wanted, folder, program, state, world.generation))

            def on_update(state: State, event: Updated, leaving: bool) -> float:
                copied_s = hooks.on_update(state, event, leaving)
                log.on_update(state, event, leaving)
                return copied_s

            started_s = began_s if world.generation else self.options.started_s
            start = StartTimes(started_s)
            start.mark("world")
            context = RunContext(
                checkpoints=checkpoints,  # type: ignore[arg-type]
                observers=observers,
                hooks=LoopHooks(
                    on_phase=log.follow(hooks.on_phase),
                    barrier=hooks.barrier,
                    on_update=on_update,
                    wants_restart=lambda: worker.is_ending(world),
                    faults=self.faults.of_run(folder.checkpoints, world.generation),
                ),
                resumption=Resumption(past, repeated, due_first=world.generation > 0 and update > 0),
                info=RunInfo(
                    folder=str(folder.path),
                    facts=self.facts_in(world, program),
                    resume_command=resume_command(
                        folder, self.options, reading_arguments(self.request.reading) + logger_arguments(self.request)
                    ),
                ),
                times=carried.times,
                stop=self.stop,
                stop_after=self.request.stop_after,
                reading=self.request.reading,
                evaluate_beside=self.request.evaluate_beside,
                start=start,
                began_s=started_s,
            )
            _, ended = train_program(program, context, state)
            checkpoints.close()
        write_report(folder)
        return ended

    def program_in(self, connection: WorldConnection, devices: Sequence[jax.Device], without: int = 0) -> Program:
        """The recipe's program on the mesh of a world's devices, around the empty seats and the last taken ones."""
        world = connection.world
        by_seat: dict[int, list[jax.Device]] = {}
        for device in devices:
            if device.process_index < len(world.slots) - without:
                by_seat.setdefault(world.slots[device.process_index], []).append(device)
        layout, mesh = mesh_of_survivors(self.recipe.layout, by_seat, world.total)
        return program_of(replace(self.recipe, layout=layout), mesh, faulty=self.faults.flips)

    def prepare(self, connection: WorldConnection, devices: Sequence[jax.Device]) -> None:
        """Compiles the update for one process less, into the cache: what is waited for when a process dies.

        In that world process k has the devices that process k has in this one, whoever dies; so this need not know. It
        differs where a schedule goes around the hole: there nothing is prepared. It is told the devices, and asks JAX
        for none: the world may be over by then, and JAX would make some that are of no world.
        """
        world = connection.world
        left = len(world.slots) - 1
        known = left in self.prepared or self.recipe.layout.sync.gradient_sum not in BUILT_IN_SUMS
        if known or left < 1 or world.process_of(self.worker.rank) >= left:
            return
        self.prepared.add(left)
        with suppress(Exception):  # if it is for nothing, the next world says why
            self.program_in(connection, devices, without=1).compile_update()

    def find_folder(self, program: Program, peers: PeerReports) -> RunFolder:
        """The run's folder: known to a peer, or made now."""
        known = peers.folder
        folder = RunFolder(Path(known)) if known else prepare_folder(self.request, self.options, program)
        self.carried.folder = str(folder.path)
        return folder

    def find_state(
        self, peers: PeerReports, program: Program, checkpoints: LazyCheckpoints
    ) -> tuple[State | None, str]:
        """The state to go on from, and where it came from: the peers' memory, else a checkpoint, else nothing."""
        request, memory = self.request, self.carried.memory
        choice = choose_copy(peers.manifests, program.shapes)
        if choice is not None:
            mine = memory.at(choice.stamp)
            assert isinstance(program.mesh, jax.sharding.Mesh)
            state = restore_copy(choice, mine, program.shapes, program.mesh)
            memory.snapshots = [] if mine is None else [mine]
            return state, choice.source
        memory.snapshots = []
        first = not any(idle_s >= 0 for idle_s in peers.idle_s)
        if first and request.begin is not None:
            return request.begin(program), "start"
        if first and request.resume is None and not peers.folder:
            return None, "start"
        try:
            state = checkpoints.restore(program.shapes, request.at if first else None, print_warning)
        except CheckpointError:
            if request.resume is not None or checkpoints.updates():
                raise
            return None, "start"
        return state, "checkpoint"

    def open_checkpoints(self, folder: RunFolder) -> Checkpoints:
        """The run's checkpoints, for the processes of one world; the launcher is told of each that is complete."""
        copy_checkpoint = self.copies.of_world(folder)

        def committed(update: int) -> None:
            self.worker.beat.note(saved=update)
            copy_checkpoint(update)

        return Checkpoints(folder.checkpoints, self.recipe.keep_checkpoints, committed=committed)

    def read_past(
        self, folder: RunFolder, update: int, peers: PeerReports, generation: int
    ) -> tuple[dict[str, float], int]:
        """What the time of the run went into before this world, and the updates that are done again."""
        if jax.process_index() > 0 or not folder.metrics.exists() or not (generation or update):
            return {}, 0
        if not generation:
            return read_past(folder, update, self.options.started_s)
        append_missing(folder.metrics, peers.recent, update)
        return past_seconds(read_events(folder), update, max(peers.idle_s), cause="regroup")

    @contextmanager
    def open_observers(self, folder: RunFolder, update: int, generation: int) -> Iterator[list[Observer]]:
        """The observers of this world: all on its first process, none on the others."""
        if jax.process_index() == 0 and (generation or update):
            jsonl.keep_until(folder.metrics, update, again=("evaluated",) if generation else ())
        with open_observers(folder, self.request, self.recipe, None, first=generation == 0) as observers:
            yield observers

    def facts_in(self, world: World, program: Program) -> dict[str, Any]:
        """What the observers are told of where the run is, and of what its copies in memory cost."""
        plan, kinds = plan_in(world, program.shapes), [leaf.dtype for leaf in jax.tree.leaves(program.shapes)]
        kept = {
            "mirror_every": self.carried.memory.every,
            "bytes_to_neighbour": plan.nbytes_sent(kinds),
            "bytes_kept": copy_bytes(program.shapes)
            + max(plan.nbytes_kept(process, kinds) for process in range(len(world.ranks))),
            "generation": world.generation,
        }
        return run_facts(program, self.request, self.options) | kept


def meet_peers(worker: ElasticWorker, carried: CarriedOver, connection: WorldConnection) -> PeerReports:
    """Tells the peers what this process has, and returns what they and it have."""
    world = connection.world
    carried.memory.every = world.mirror_every
    idle_s = -1.0 if carried.last_s is None else time.monotonic() - carried.last_s
    speaker = next((rank for rank in world.ranks if rank not in world.newcomers), None)
    report = {
        "held": carried.memory.manifest(),
        "folder": carried.folder or world.folder,
        "idle_s": idle_s,
        "made": carried.made,
        "ports": sorted(connection.ports),
        "recent": carried.recent.last_updates(all_of_them=speaker == worker.rank),
    }
    connection.publish("met", msgspec.json.encode(report).decode())
    reports = [msgspec.json.decode(text) for text in connection.collect("met", partial(worker.check, world))]
    connection.peer_ports = {port for report in reports for port in report["ports"]}
    return PeerReports(reports)
