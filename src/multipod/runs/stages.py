"""The stages of a run that alone processes and those of a world have in common, from the program to the report."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from multipod.elastic.worker.worker import identity_of
from multipod.errors import PeerLostError
from multipod.extras import has_extra, pip_install
from multipod.layout.mesh import make_mesh
from multipod.recipe.recipe import Recipe
from multipod.recipe.tables import table_changes
from multipod.recipe.text import to_text
from multipod.runs.facts import data_identities, facts, versions
from multipod.runs.lengthening import change_length
from multipod.runs.lock import RunLock, hold
from multipod.runs.options import RuntimeOptions
from multipod.runs.request import TrainRequest, requested_recipe
from multipod.runs.standby import reuse_prepared
from multipod.step.program import Program, program_of
from multipod.step.state import State
from multipod.train.events import Observer
from multipod.train.goodput import past_seconds
from multipod.train.hooks import Faults
from multipod.train.multihost import assert_same, barrier, broadcast_from_0
from multipod.train.observers import jsonl
from multipod.train.observers.table import ObservedRun, as_observer, files_of_runs, make_observers
from multipod.train.run_folder import (
    RUNS,
    RunFolder,
    check_data,
    check_pipe,
    check_same,
    create,
    next_free,
    open_folder,
)
from multipod.train.stop import StopRequest, stop_on_signals

OPTIONAL_FILES = {"report": "report.html", "tensorboard": "tensorboard/"}
"""What a run leaves behind where these extras are installed."""
NOTICE = "stopping after this update and saving; Ctrl-C again exits at once"


def prepare_program(request: TrainRequest, options: RuntimeOptions, faults: Faults) -> Program:
    """Returns the program of the request, which fits the mesh and is the same in all processes; makes no folder yet.

    Raises:
      MultipodError: it cannot be, or a process is missing or has another version, recipe or data.
    """
    recipe = requested_recipe(request, options)
    program = reuse_prepared(program_of(recipe, make_mesh(recipe.layout), faulty=faults.flips))
    _ = program.lowered  # what does not fit the mesh is refused here
    barrier("ready", options.timeouts.collective_s)
    if options.cluster.processes > 1:
        assert_same(identify(recipe))
    return program


def identify(recipe: Recipe) -> str:
    """What processes must have in common to train `recipe` together, as a line of text."""
    return identity_of(to_text(recipe), versions(), data_identities(recipe))


def prepare_folder(request: TrainRequest, options: RuntimeOptions, program: Program) -> RunFolder:
    """Returns the run's folder: made by process 0, or the one to go on in.

    Raises:
      RunFolderError: it cannot be made, or the run in it is another's.
    """
    if request.resume is not None:
        folder, known = open_folder(request.resume)
        check_same(folder, program.recipe)
        check_data(folder, known, data_identities(program.recipe))
        check_pipe(folder, known, program.recipe, dict(program.mesh.shape))
        broadcast_from_0(lambda: change_length(folder, program.recipe.updates, request.at))
        return folder

    def make() -> str:
        path = request.out or next_free(RUNS, program.recipe.name)
        return str(create(path, program.recipe, run_facts(program, request, options)).path)

    return RunFolder(Path(broadcast_from_0(make)))


def run_facts(program: Program, request: TrainRequest, options: RuntimeOptions) -> dict[str, Any]:
    """What `run.json` says of this run, and what was planned, if it was."""
    cache = str(options.cache or "off")
    # With the rows that the data set: a run can be opened where its data are not.
    changes = [*request.all_changes, *table_changes(program.recipe, request.all_changes)]
    known = facts(program, recipe_name(request), changes, options.command, cache)
    known |= {} if isinstance(request.recipe, str) else {"recipe_is_value": True}
    known |= {"weights_from": request.origin} if request.origin else {}
    known |= {"weights_drawn": list(request.drawn)} if request.drawn else {}
    return known if request.plan is None else known | {"plan": dict(request.plan.prediction)}


def recipe_name(request: TrainRequest) -> str:
    """The name by which the run's recipe is found again; of a recipe given as a value its own name."""
    return request.recipe if isinstance(request.recipe, str) else request.recipe.name


def hold_folder(folder: RunFolder, command: str) -> Callable[[], None]:
    """Takes the folder for this run; returns what lets go of it.

    Raises:
      RunFolderError: on all processes, if a run that is alive holds it.
    """
    locks: list[RunLock] = []

    def take() -> str:
        locks.append(hold(folder.path, command))
        return ""

    broadcast_from_0(take)

    def let_go() -> None:
        for lock in locks:
            lock.release()

    return let_go


def print_warning(line: str) -> None:
    """Tells of a damaged checkpoint or of files left out, whatever is quiet; process 0 alone."""
    if jax.process_index() == 0:
        print(f"multipod: {line}", file=sys.stderr, flush=True)


def read_past(folder: RunFolder, update: int | None, started_s: float) -> tuple[dict[str, float], int]:
    """What the time of a run resumed at `update` went into before this process, and the updates that it does again."""
    if update is None or jax.process_index() > 0 or not folder.metrics.exists():
        return {}, 0
    away_s = time.time() - folder.metrics.stat().st_mtime - (time.monotonic() - started_s)
    return past_seconds(read_events(folder), update, away_s)


def read_events(folder: RunFolder) -> list[Any]:
    """The events that the run has written down so far."""
    return [event for record in jsonl.read(folder.metrics) if (event := jsonl.decode(record)) is not None]


@contextmanager
def open_observers(
    folder: RunFolder, request: TrainRequest, recipe: Recipe, state: State | None, first: bool = True
) -> Iterator[list[Observer]]:
    """The observers of this process: all of them on process 0, none on the others; closed at the end.

    What was written behind `state`, if it is given, goes. The request is told which are the `first` of this process.
    """
    if jax.process_index() > 0:
        yield []
        return
    if state is not None:
        jsonl.keep_until(folder.metrics, int(state.update))
    named = make_observers(ObservedRun(folder, Console(), recipe), [*files_of_runs(), *request.loggers])
    observers = [*named, *map(as_observer, request.observers(folder, first))]
    with ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.close)
        yield observers


@contextmanager
def stop_when_asked() -> Iterator[StopRequest]:
    """A request to stop that Ctrl-C and the signals of clusters set; outside the main thread nobody sets it."""
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    with stop_on_signals(NOTICE) as stop:
        yield stop


def report_to_launcher(options: RuntimeOptions, stack: ExitStack, folder: RunFolder) -> Callable[[int], None]:
    """Tells the launcher, if there is one, of the folder; returns what tells it of each checkpoint on disk."""
    beat = options.heartbeat
    if beat is None:
        return lambda update: None
    stack.callback(beat.close)
    beat.note(folder=str(folder.path))
    return lambda update: beat.note(saved=update)


def write_report(folder: RunFolder) -> None:
    """Writes the run's page, on process 0; says how to get what was left out for want of a package."""
    if jax.process_index() > 0:
        return
    left_out = {extra: file for extra, file in OPTIONAL_FILES.items() if not has_extra(extra)}
    if "report" not in left_out:
        from multipod.train.observers import report

        report.write(folder.path)
    if left_out:
        print_warning(f"left out {' and '.join(left_out.values())}. To have them: {pip_install(left_out)}")


@contextmanager
def translate_lost_peers(options: RuntimeOptions) -> Iterator[None]:
    """Turns what JAX says when a peer is gone into one message and the exit code that the launcher knows.

    Raises:
      PeerLostError: instead of JAX's own, where there are peers.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if options.cluster.processes == 1:
            raise
        first = str(error).strip().splitlines()[0][:200]
        raise PeerLostError(
            f"process {options.cluster.process} lost a peer and stopped: {first}\n"
            "Go on from the last checkpoint with --resume."
        ) from error
