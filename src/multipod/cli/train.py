"""`multipod train`: trains a recipe, or goes on with a run."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from multipod import runs
from multipod.cli import completion
from multipod.cli.main import discard_output
from multipod.cli.options import plan_file, start_options, what_options, where_options
from multipod.cli.reading import reading_options
from multipod.errors import PlanError
from multipod.plan.saved import read_plan
from multipod.plan.tables.models import MODELS
from multipod.runs.options import RuntimeOptions, parse_profiled
from multipod.train.observers.table import OBSERVERS, PRINTED, ObservedRun, make_observers

if TYPE_CHECKING:
    from multipod.data.reading import InputOptions
    from multipod.plan.saved import SavedPlan
    from multipod.runs.request import RunResult
    from multipod.train.events import Event, Observer
    from multipod.train.run_folder import RunFolder

INTERRUPTED = 130


@click.command()
@click.argument("recipe", required=False, shell_complete=completion.recipes)
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
    "--start-from",
    metavar="WEIGHTS",
    help="Begin with another program's weights: a .safetensors, .pt or .pth file, a folder, an Orbax checkpoint, "
    "hf:ORG/NAME.",
)
@start_options
@click.option(
    "--at",
    type=click.IntRange(0),
    metavar="UPDATE",
    help="With --resume or --from: from this checkpoint, not the newest.",
)
@click.option(
    "--copy-to", default="", metavar="URL", help="Keep a copy of the run in an object store: s3://..., gs://..."
)
@click.option(
    "--stop-after",
    type=click.IntRange(1),
    default=None,
    metavar="UPDATE",
    help="Stop and save, as by Ctrl-C, after this update.",
)
@click.option(
    "--run-ahead",
    type=click.IntRange(0, 16),
    metavar="N",
    help="Updates given to the devices ahead of the one that is waited for.  [default: 2; 0 where that could deadlock]",
)
@click.option(
    "--steps-per-call",
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="Updates in one program, one after the other on the devices.  [default: 1]",
)
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--evaluate-beside", is_flag=True, help="Evaluate while training goes on, on a copy of the weights.")
@click.option("--log-examples", is_flag=True, help="Write which examples each update used to the run's folder.")
@click.option(
    "--profile",
    metavar="FIRST:LAST",
    help="Profile these updates, as 10:13, for XProf, TensorBoard and ui.perfetto.dev.",
)
@click.option(
    "--log",
    "loggers",
    multiple=True,
    metavar="NAME,...",
    help=f"Also tell loggers: {', '.join(name for name in OBSERVERS if name not in PRINTED)}. Repeatable.",
)
@click.option("--inject", type=click.Path(path_type=Path, exists=True, file_okay=False), hidden=True)
@reading_options
@what_options
@where_options
def train(
    recipe: str | None,
    out: Path | None,
    resume: Path | None,
    begin_from: Path | None,
    start_from: str | None,
    fresh: tuple[str, ...],
    without: tuple[str, ...],
    library: str,
    at: int | None,
    copy_to: str,
    stop_after: int | None,
    run_ahead: int | None,
    steps_per_call: int,
    quiet: bool,
    evaluate_beside: bool,
    log_examples: bool,
    profile: str | None,
    loggers: tuple[str, ...],
    inject: Path | None,
    changes: list[str],
    where: RuntimeOptions,
    reading: "InputOptions",
) -> int:
    """Train RECIPE: a name from `multipod list`, or FILE.py:FUNCTION.

    Ctrl-C finishes the update that is running, saves, and prints the command that goes on.
    """
    refuse_contradictions(recipe, out, resume, begin_from, start_from, at)
    refuse_beside_survival(where, start_from=start_from, profile=profile, begin_from=begin_from)
    weights = runs.ForeignStart(start_from, fresh, without, library) if start_from else None
    recipe = absolute_recipe(recipe or "")
    file = plan_file(click.get_current_context().params["layout"])
    if resume is not None and file is not None:
        raise click.UsageError("--resume goes on with a run, which is planned no more: leave out the plan.")
    plan = None if file is None else planned(file, recipe, where)
    request = runs.TrainRequest(
        recipe=recipe,
        changes=changes,
        out=out,
        resume=resume,
        at=at,
        copy_to=copy_to,
        stop_after=stop_after or 0,
        run_ahead=run_ahead,
        steps_per_call=steps_per_call,
        reading=reading,
        evaluate_beside=evaluate_beside,
        log_examples=log_examples,
        profile=None if profile is None else parse_profiled(profile),
        inject=inject,
        plan=plan,
        loggers=loggers,
        observers=ConsoleObservers(quiet, where, plan),
    )
    if where.cluster.waits:
        from multipod.cli.standby import stand_by

        return stand_by(request, where)
    return exit_code_of(runs.train_request(request, where, start_from=begin_from, weights=weights))


def refuse_contradictions(
    recipe: str | None,
    out: Path | None,
    resume: Path | None,
    begin_from: Path | None,
    start_from: str | None,
    at: int | None,
) -> None:
    """Refuses options that contradict each other, before anything is imported or made.

    Raises:
      click.UsageError: says which to leave out.
    """
    if resume is None and begin_from is None and at is not None:
        raise click.UsageError("--at names a checkpoint of a run: give the run by --resume or --from.")
    if resume is not None and begin_from is not None:
        raise click.UsageError("--resume goes on in a run's own folder, --from in a new one: give one of them.")
    if resume is not None and out is not None:
        raise click.UsageError("--resume goes on in the run's own folder: leave out --out.")
    if resume is None and begin_from is None and recipe is None:
        raise click.UsageError("say which recipe to train. `multipod list` shows them; try `multipod train digits`.")
    if start_from and (resume is not None or begin_from is not None):
        raise click.UsageError("--start-from begins a new run: leave out --resume and --from.")


def refuse_beside_survival(
    where: RuntimeOptions, *, start_from: str | None, profile: str | None, begin_from: Path | None
) -> None:
    """Refuses what needs the same processes from the first update to the last.

    Raises:
      click.UsageError: says which to leave out.
    """
    if not (where.cluster.survives or where.cluster.waits):
        return
    if begin_from is not None:
        raise click.UsageError(
            "--from begins without --survive: stop the run once it has saved, then go on by --resume."
        )
    if start_from:
        raise click.UsageError("--start-from begins without --survive: stop the run once it has saved, then go on.")
    if profile is not None:
        raise click.UsageError("--profile goes without --survive, where processes come and go.")


def absolute_recipe(recipe: str) -> str:
    """The name of a recipe, that of a file with its whole path: a run is gone on with from anywhere."""
    if ".py:" not in recipe:
        return recipe
    path, _, function = recipe.rpartition(":")
    return f"{Path(path).absolute()}:{function}"


def exit_code_of(result: "RunResult") -> int:
    """The exit code of a run: 130 if it was asked to stop."""
    return INTERRUPTED if result.ended.interrupted else 0


def planned(file: Path, recipe: str, where: RuntimeOptions) -> "SavedPlan":
    """The plan in `file`, without its mesh where the user gave one.

    Raises:
      PlanError: no plan, one of another recipe, or a layout that recipes cannot have.
    """
    from multipod.recipes.find import RECIPES

    plan = read_plan(file)
    if plan.name != recipe:
        raise PlanError(f"{file} is a plan of {plan.name}, not of {recipe or 'this'}. Plan {recipe} with --save first.")
    if recipe in MODELS and recipe not in RECIPES:
        raise PlanError(f"{file} is a plan of a published table, which cannot be trained. Plan a recipe of `list`.")
    if where.mesh is None:
        return plan
    return replace(plan, layout=replace(plan.layout, mesh=(), replica_shape=()))


def planned_lines(plan: "SavedPlan | None") -> list[str]:
    """What a plan makes of the recipe, and what it leaves open; nothing without one."""
    if plan is None:
        return []
    lines = [f"planned for {plan.machine}: {' '.join(plan.changes())}"]
    if plan.silent:
        lines.append(f"  of a former format, which does not hold {plan.silent}: plan again to hold them, too")
    return lines


class UntilClosed:
    """An observer that prints; when nobody reads its output any more, it asks the run to stop, as Ctrl-C does."""

    def __init__(self, observer: "Observer") -> None:
        self._observer = observer

    def __call__(self, event: "Event") -> None:
        """Passes the event on."""
        self._printing(lambda: self._observer(event))

    def close(self) -> None:
        """Closes the observer."""
        self._printing(self._observer.close)

    def _printing(self, prints: Callable[[], None]) -> None:
        try:
            prints()
        except BrokenPipeError:
            self._stop()
        except SystemExit as end:
            if not isinstance(end.__context__, BrokenPipeError):  # Rich ends the program so
                raise
            self._stop()

    def _stop(self) -> None:
        discard_output()
        signal.raise_signal(signal.SIGTERM)


class ConsoleObservers:
    """Makes the observers that print: a progress bar or lines, and the table at the end; none if `quiet`."""

    def __init__(self, quiet: bool, where: RuntimeOptions, plan: "SavedPlan | None" = None) -> None:
        self._quiet, self._where, self._plan = quiet, where, plan

    def __call__(self, folder: "RunFolder", first: bool) -> "Sequence[Observer]":
        """Makes them for a run in `folder`; the `first` of this process also say where they write."""
        if self._quiet:
            return ()
        from multipod.recipe.scaling import remarks_on_text

        console = Console()
        if first:
            console.print(f"run folder         {folder.path}", highlight=False, soft_wrap=True)
            console.print(f"compiled programs  {self._where.cache or 'not kept'}", highlight=False, soft_wrap=True)
            for line in [*planned_lines(self._plan), *remarks_on_text(folder.recipe.read_text())]:
                console.print(line, highlight=False, soft_wrap=True, markup=False)
        return [UntilClosed(observer) for observer in make_observers(ObservedRun(folder, console), PRINTED)]
