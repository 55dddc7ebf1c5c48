"""`multipod train`: trains a recipe, or goes on with a run."""

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from multipod.cli.example_logging import example_log
from multipod.cli.main import started_s
from multipod.cli.options import Where, chosen_recipe, plan_file, what_options, where_options
from multipod.cli.reading import as_options, reading_options
from multipod.cli.relaying import taken_over
from multipod.errors import PeerLostError, PlanError, RecipeError

if TYPE_CHECKING:
    from multipod.data.reading import Reading
    from multipod.layout.layout import Layout
    from multipod.plan.search import Plan
    from multipod.step.program import Program
    from multipod.step.state import State
    from multipod.train.hooks import Faults
    from multipod.train.run_folder import RunFolder


@dataclass(frozen=True)
class Request:
    """What was asked for: a new run of `recipe`, from `begin` if given, or to go on with the run in `resume`."""

    recipe: str
    changes: list[str]
    out: Path | None
    resume: Path | None
    at: int | None
    stop_after: int
    quiet: bool
    reading: "Reading"
    plan: "Plan | None" = None
    evaluate_beside: bool = False
    begin: "Callable[[Program], State] | None" = None
    log_examples: bool = False
    inject: Path | None = None


@click.command()
@click.argument("recipe", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="The folder of this run.  [default: runs/RECIPE-NNN]")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Go on with the run in this folder.")
@click.option(
    "--from",
    "begin_from",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Go on, in a new folder, from the run in this one, laid out otherwise: other stages, or none.",
)
@click.option(
    "--at",
    type=click.IntRange(0),
    metavar="UPDATE",
    help="With --resume or --from: from this checkpoint, not the newest.",
)
@click.option(
    "--stop-after",
    type=click.IntRange(1),
    default=None,
    metavar="UPDATE",
    help="Stop and save, as by Ctrl-C, after this update.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--evaluate-beside", is_flag=True, help="Evaluate while training goes on, on a copy of the weights.")
@click.option("--log-examples", is_flag=True, help="Write which examples each update used to the run's folder.")
@click.option("--inject", type=click.Path(path_type=Path, exists=True, file_okay=False), hidden=True)
@reading_options
@what_options
@where_options
def train(
    recipe: str | None,
    out: Path | None,
    resume: Path | None,
    begin_from: Path | None,
    at: int | None,
    stop_after: int | None,
    quiet: bool,
    evaluate_beside: bool,
    log_examples: bool,
    inject: Path | None,
    changes: list[str],
    where: Where,
    reading: "Reading",
) -> int:
    """Train RECIPE: a name from `multipod list`, or FILE.py:FUNCTION.

    Ctrl-C finishes the update that is running, saves, and prints the command that goes on.
    """
    if resume is None and begin_from is None and at is not None:
        raise click.UsageError("--at names a checkpoint of a run: give the run by --resume or --from.")
    if resume is not None and begin_from is not None:
        raise click.UsageError("--resume goes on in a run's own folder, --from in a new one: give one of them.")
    if resume is not None and out is not None:
        raise click.UsageError("--resume goes on in the run's own folder: leave out --out.")
    if resume is None and begin_from is None and recipe is None:
        raise click.UsageError("say which recipe to train. `multipod list` shows them; try `multipod train digits`.")
    if recipe is not None and ".py:" in recipe:
        path, _, function = recipe.rpartition(":")
        recipe = f"{Path(path).absolute()}:{function}"
    if begin_from is not None and (where.cluster.survives or where.cluster.waits):
        raise click.UsageError(
            "--from begins without --survive: stop the run once it has saved, then go on by --resume."
        )
    file = plan_file(click.get_current_context().params["layout"])
    if resume is not None and file is not None:
        raise click.UsageError("--resume goes on with a run, which is planned no more: leave out the plan.")
    plan = None if file is None else planned(file, recipe or "", where)
    changes = [*(plan.changes() if plan else ()), *changes]
    request = Request(
        recipe or "", changes, out, resume, at, stop_after or 0, quiet, reading, plan, evaluate_beside,
        log_examples=log_examples, inject=inject,
    )  # fmt: skip
    if where.cluster.waits:
        from multipod.cli.standby import stand_by

        return stand_by(request, where)
    with peers_may_be_lost(where):
        if begin_from is not None:
            name, changes, begin = taken_over(begin_from, recipe or "", changes, at, where)
            request = replace(request, recipe=name, changes=changes, begin=begin)
        return run(request, where)


def run(request: Request, where: Where) -> int:
    """Prepares the run, trains, reports; returns the exit code."""
    from multipod.chaos.inject import Injector
    from multipod.layout.mesh import topology_of
    from multipod.train.checkpoint import Checkpoints
    from multipod.train.hooks import no_faults, silent
    from multipod.train.loop import RunContext
    from multipod.train.loop import train as loop
    from multipod.train.multihost import meet
    from multipod.train.stop import stop_on_signals

    if where.cluster.survives:
        from multipod.cli.surviving import run_in_worlds

        return run_in_worlds(request, where)
    request, where = remembered(request, where)
    faults = Injector(request.inject, where.cluster.process) if request.inject else no_faults
    program = ready_program(request, where, faults)
    recipe = program.recipe
    folder = run_folder(request, where, program)
    with ExitStack() as stack:
        stack.callback(held(folder))
        saved = tell_launcher(where, stack, folder)
        stop = stack.enter_context(stop_on_signals("stopping after this update and saving; Ctrl-C again exits at once"))
        chips = topology_of(recipe.layout, program.mesh).chips if recipe.layout.local_state else ()
        checkpoints = Checkpoints(folder.checkpoints, recipe.keep_checkpoints, committed=saved, chips=chips)
        stack.callback(checkpoints.close)
        state = checkpoints.restore(program.shapes, request.at, said) if request.resume else None
        past, repeated = before(folder, None if state is None else int(state.update))
        observers = stack.enter_context(watched_by(folder, request, where, state))
        state = request.begin(program) if request.begin else state
        log = stack.enter_context(example_log(request, folder, program, state))
        around = RunContext(
            checkpoints=checkpoints,
            observers=observers,
            on_phase=log.pulse(where.heartbeat or silent),
            on_update=log.keep,
            barrier=lambda name: meet(name, where.timeouts.compile_s),
            stop=stop,
            stop_after=request.stop_after,
            evaluate_beside=request.evaluate_beside,
            reading=request.reading,
            resume=resume_command(folder, where, moved(request, recipe.layout) + as_options(request.reading)),
            folder=str(folder.path),
            facts=facts_of(program, request, where),
            began=started_s(),
            past=past,
            repeated=repeated,
            faults=faults.of_run(folder.checkpoints),
        )
        _, ended = loop(program, around, state)
    finish(folder, where)
    return 130 if ended.interrupted else 0


def ready_program(request: Request, where: Where, faults: "Faults") -> "Program":
    """The program of the request, which fits the mesh and is the same in all processes; no folder is made yet.

    Raises:
      MultipodError: it cannot be, or a process is missing or has another version, recipe or data.
    """
    from multipod.cli import standby
    from multipod.elastic.worker.worker import identity
    from multipod.layout.mesh import make_mesh
    from multipod.recipe.text import to_text
    from multipod.runs.facts import data_identities, versions
    from multipod.step.program import program_of
    from multipod.train.multihost import check_alike, meet

    recipe = chosen_recipe(request.recipe, request.changes, where)
    program = standby.ready(program_of(recipe, make_mesh(recipe.layout), faulty=faults.flips))
    _ = program.lowered  # what does not fit the mesh is refused here
    meet("ready", where.timeouts.collective_s)
    if where.cluster.processes > 1:
        check_alike(identity(to_text(recipe), versions(), data_identities(recipe)))
    return program


def remembered(request: Request, where: Where, devices: int = 0) -> tuple[Request, Where]:
    """A resumed run's recipe, changes, mesh and failed chips, from its folder; `devices` there are, JAX's if 0.

    The mesh only if there are devices for it, and the failed chips only with the mesh: a --mesh of its own
    means a whole one. A --fail of its own adds to those that had failed before.
    """
    if request.resume is None:
        return request, where
    import jax

    from multipod.train.run_folder import open_folder

    _, facts = open_folder(request.resume)
    if request.recipe and request.recipe != facts["recipe"]:
        raise RecipeError(
            f"{request.resume} is a run of {facts['recipe']}, not of {request.recipe}. Leave the name out."
        )
    asked = request.changes
    request = replace(request, recipe=facts["recipe"], changes=[*facts["overrides"], *asked])
    mesh = tuple(facts.get("chips", facts["mesh"].values()))
    elsewhere = any(change.startswith("layout.mesh=") for change in asked)
    if (
        where.mesh is None
        and not elsewhere
        and math.prod(mesh) * facts.get("tile", 1) <= (devices or jax.device_count())
    ):
        failed = tuple(f"{row},{column}" for row, column in facts.get("failed", ()))
        where = replace(where, mesh=mesh, fail=(*failed, *where.fail))
    return request, where


def run_folder(request: Request, where: Where, program: "Program") -> "RunFolder":
    """The run's folder: made by process 0, or the one to go on in."""
    from multipod.runs.facts import data_identities
    from multipod.train.multihost import decided_by_first
    from multipod.train.run_folder import RunFolder, check_data, check_pipe, check_same, create, next_free, open_folder

    if request.resume is not None:
        folder, facts = open_folder(request.resume)
        check_same(folder, program.recipe)
        check_data(folder, facts, data_identities(program.recipe))
        check_pipe(folder, facts, program.recipe, dict(program.mesh.shape))
        return folder

    def made() -> str:
        path = request.out or next_free(Path("runs"), program.recipe.name)
        return str(create(path, program.recipe, facts_of(program, request, where)).path)

    return RunFolder(Path(decided_by_first(made)))


def held(folder: "RunFolder") -> Callable[[], None]:
    """Takes the folder for this run; returns what lets go of it.

    Raises:
      RunFolderError: on all processes, if a run that is alive holds it.
    """
    from multipod.runs.lock import RunLock, hold
    from multipod.train.multihost import decided_by_first

    taken: list[RunLock] = []

    def take() -> str:
        taken.append(hold(folder.path, shlex.join(["multipod", *sys.argv[1:]])))
        return ""

    decided_by_first(take)

    def let_go() -> None:
        for lock in taken:
            lock.release()

    return let_go


def said(line: str) -> None:
    """Tells of a damaged checkpoint, whatever is quiet; process 0 alone."""
    import jax

    if jax.process_index() == 0:
        click.echo(f"multipod: {line}", err=True)


def before(folder: "RunFolder", update: int | None) -> tuple[dict[str, float], int]:
    """What the time of a resumed run went into before this process, and the updates that it does again."""
    import jax

    from multipod.train.goodput import past_of
    from multipod.train.observers import jsonl

    if update is None or jax.process_index() > 0 or not folder.metrics.exists():
        return {}, 0
    away_s = time.time() - folder.metrics.stat().st_mtime - (time.monotonic() - started_s())
    events = [event for record in jsonl.read(folder.metrics) if (event := jsonl.decode(record)) is not None]
    return past_of(events, update, away_s)


def facts_of(program: "Program", request: Request, where: Where) -> dict[str, Any]:
    """What `run.json` says of this run; what was planned, if it was."""
    from multipod.runs.facts import facts

    command = shlex.join(["multipod", *sys.argv[1:]])
    found = facts(program, request.recipe, request.changes, command, str(where.cache or "off"))
    return found if request.plan is None else found | {"plan": request.plan.prediction}


def planned(file: Path, recipe: str, where: Where) -> "Plan":
    """The plan in `file`, without its mesh where the user gave one.

    Raises:
      PlanError: no plan, one of another recipe, or a layout that recipes cannot have.
    """
    from multipod.plan.search import read_plan

    plan = read_plan(file)
    if plan.name != recipe:
        raise PlanError(f"{file} is a plan of {plan.name}, not of {recipe or 'this'}. Plan {recipe} with --save first.")
    from multipod.plan.models import MODELS
    from multipod.recipes.find import RECIPES

    if recipe in MODELS and recipe not in RECIPES:
        raise PlanError(f"{file} is a plan of a published table, which cannot be trained. Plan a recipe of `list`.")
    return plan if where.mesh is None else replace(plan, mesh=())


@contextmanager
def watched_by(
    folder: "RunFolder", request: Request, where: Where, state: "State | None", first: bool = True
) -> Iterator[list[Any]]:
    """The observers of this process: all of them on process 0, none on the others. The `first` say where they write."""
    import jax

    from multipod.train.observers import jsonl, progress, tensorboard

    if jax.process_index() > 0:
        yield []
        return
    if state is not None:
        jsonl.keep_until(folder.metrics, int(state.update))
    observers: list[Any] = [jsonl.JsonLines(folder.metrics), tensorboard.TensorBoard(folder.tensorboard)]
    if not request.quiet:
        console = Console()
        if first:
            announce(console, folder, where)
        observers.append(progress.Bar(console) if console.is_terminal else progress.PlainLines(sys.stdout))
        observers.append(Summary(console))
    with ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.close)
        yield observers


class Summary:
    """Prints the table at the end of a run, and how to go on with one that was stopped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ended: Any = None

    def __call__(self, event: Any) -> None:
        """Remembers the end."""
        from multipod.train.events import Ended

        if isinstance(event, Ended):
            self._ended = event

    def close(self) -> None:
        """Prints, once the progress bar is gone."""
        from multipod.train.observers.progress import summary_table

        if self._ended is None:
            return
        self._console.print(summary_table(self._ended))
        if self._ended.resume:
            self._console.print(f"Go on with:\n  {self._ended.resume}", soft_wrap=True, highlight=False)


def announce(console: Console, folder: "RunFolder", where: Where) -> None:
    """Where the run is written, and where compiled programs are kept."""
    console.print(f"run folder         {folder.path}", highlight=False, soft_wrap=True)
    console.print(f"compiled programs  {where.cache or 'not kept'}", highlight=False, soft_wrap=True)


def moved(request: Request, layout: "Layout") -> str:
    """The options by which a resumed run lies elsewhere than `run.json` says, which tells how it began."""
    if request.resume is None:
        return ""
    from multipod.train.run_folder import open_folder

    _, facts = open_folder(request.resume)
    began = {tuple(chip) for chip in facts.get("failed", ())}
    options, failed = "", set(layout.failed)
    whole = list(facts.get("chips", facts["mesh"].values()))
    if layout.mesh and (list(layout.mesh) != whole or began - failed):
        began, options = set(), " --mesh " + "x".join(map(str, layout.mesh))
    return options + "".join(f" --fail {row},{column}" for row, column in sorted(failed - began))


def resume_command(folder: "RunFolder", where: Where, options: str = "") -> str:
    """The command that goes on with this run, as it was started or, by `options`, moved."""
    command = f"multipod train --resume {shlex.quote(str(folder.path))}{options}"
    if where.cluster.name == "multipod launch":
        survive = " --survive" if where.cluster.survives else ""
        command = command.removeprefix("multipod ")
        command = f"multipod launch --processes {where.cluster.processes}{survive} -- {command}"
    return command


def tell_launcher(where: Where, stack: ExitStack, folder: "RunFolder") -> Callable[[int], None]:
    """Tells the launcher, if there is one, of the folder; returns what tells it of each checkpoint on disk."""
    beat = where.heartbeat
    if beat is None:
        return lambda update: None
    stack.callback(beat.close)
    beat.note(folder=str(folder.path))
    return lambda update: beat.note(saved=update)


def finish(folder: "RunFolder", where: Where) -> None:
    """Writes the report, on process 0."""
    import jax

    from multipod.train.observers import report

    if jax.process_index() == 0:
        report.write(folder.path)


@contextmanager
def peers_may_be_lost(where: Where) -> Iterator[None]:
    """Turns what JAX says when a peer is gone into one message and the exit code that the launcher knows."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if where.cluster.processes == 1:
            raise
        first = str(error).strip().splitlines()[0][:200]
        raise PeerLostError(
            f"process {where.cluster.process} lost a peer and stopped: {first}\n"
            "Go on from the last checkpoint with --resume."
        ) from error
