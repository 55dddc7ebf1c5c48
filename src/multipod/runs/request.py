"""What is asked of a run, and what is answered: a `TrainRequest`, a `RunResult`, and the command that goes on."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from multipod import notebook
from multipod.data.reading import InputOptions
from multipod.errors import RecipeError
from multipod.layout.layout import Layout
from multipod.mlperf.benchmarks import benchmark_of
from multipod.plan.pinned import check_planned
from multipod.plan.saved import SavedPlan
from multipod.recipe.recipe import Recipe
from multipod.runs.learnt import learnt
from multipod.runs.options import ProfiledUpdates, RuntimeOptions
from multipod.runs.recipes import configure_recipe, recorded_changes, recorded_recipe
from multipod.runtime import CPU_DEVICES, Timeouts
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.events import Ended, EventSink
from multipod.train.observers.table import MLPERF, names_in, refuse_observers
from multipod.train.observers.text import summary_rows
from multipod.train.run_folder import RunFolder, open_folder

ANOTHER_RUN = "another run"
"""The `origin` of a run that begins with the weights of a run here."""


def no_observers(folder: RunFolder, first: bool) -> Sequence[EventSink]:
    """Returns nobody to tell, whatever the folder."""
    return ()


@dataclass(frozen=True)
class TrainRequest:
    """A run to train: a new one of `recipe`, or the one in `resume` to go on with.

    Attributes:
      recipe: the recipe itself, a name of `multipod list`, or FILE.py:FUNCTION; with `resume` it may be left out.
      changes: typed changes to the recipe, each `name=value`.
      out: the new run's folder; None takes the next free one under runs/.
      resume: the folder of the run to go on with.
      at: the checkpoint to go on from; None takes the newest.
      copy_to: the address in an object store at which a copy of the run is kept; empty keeps none.
      stop_after: stop and save after this update; 0 never does.
      run_ahead: how many updates are given to the devices ahead of the one that is waited for; None is as many as are
        safe there (`multipod.train.updating.default_run_ahead`). It changes no result.
      steps_per_call: how many updates are one program, which the host calls once; 1 is a program for each update.
      reading: how this host makes batches.
      evaluate_beside: evaluate while training goes on, on a copy of the weights.
      begin: makes the first state of a new run; None starts from scratch.
      origin: where the first weights came from, for `run.json`; empty: they are drawn.
      drawn: with `origin`, the names of the parameters that are drawn all the same.
      log_examples: write which examples each update used to the run's folder.
      inject: a folder of faults to be made to happen (`multipod.chaos.inject`).
      profile: the updates to profile; None profiles none.
      plan: the run as it was planned: its changes come before `changes`, and what differs from it is refused.
      loggers: names in `multipod.train.observers.table.OBSERVERS` of who is told of the run beside its own files;
        several may stand in one text, with commas between them.
      observers: makes who else is told, on process 0, given the run's folder and whether these are the first of this
        process. Those with a method `close` are closed at the end.
    """

    recipe: str | Recipe = ""
    changes: Sequence[str] = ()
    out: Path | None = None
    resume: Path | None = None
    at: int | None = None
    copy_to: str = ""
    stop_after: int = 0
    run_ahead: int | None = None
    steps_per_call: int = 1
    reading: InputOptions = field(default_factory=InputOptions)
    evaluate_beside: bool = False
    begin: Callable[[Program], State] | None = None
    origin: str = ""
    drawn: Sequence[str] = ()
    log_examples: bool = False
    inject: Path | None = None
    profile: ProfiledUpdates | None = None
    plan: SavedPlan | None = None
    loggers: Sequence[str] = ()
    observers: Callable[[RunFolder, bool], Sequence[EventSink]] = no_observers

    def __post_init__(self) -> None:
        object.__setattr__(self, "loggers", names_in(self.loggers))
        refuse_observers(self.loggers)

    @property
    def all_changes(self) -> list[str]:
        """The changes of the plan, if there is one, and then the user's."""
        return [*(self.plan.changes() if self.plan else ()), *self.changes]

    @property
    def planned_parts(self) -> Mapping[str, Any]:
        """What was planned of a step, by name; nothing without a plan."""
        return self.plan.prediction if self.plan else {}


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
      folder: the run's folder.
      ended: the summary that observers were told last.
      state: the last state; None where it is not this process's to give (`multipod launch --survive`).
    """

    folder: Path
    ended: Ended
    state: State | None = None

    def _repr_html_(self) -> str:
        """How it ended and what it learnt, in a notebook."""
        ended, told = self.ended, ("updates", "test accuracy", "test AUC")
        tested, loss = learnt(RunFolder(self.folder), ended.update)
        rows: list[notebook.Row] = [
            ("stopped" if ended.interrupted else "done", f"{ended.update:,} updates"),
            *tested,
            *((name.strip(), value) for name, value in summary_rows(ended) if name not in told),
            ("to go on", ended.resume or None),
        ]
        return notebook.card("result of a run", str(self.folder), rows, loss)

    @property
    def values(self) -> dict[str, float]:
        """The values of the last evaluation, `accuracy` and so on."""
        return self.ended.values


def requested_recipe(request: TrainRequest, options: RuntimeOptions) -> Recipe:
    """Returns the recipe of the request with all its changes, as it was planned if it was planned.

    Raises:
      MultipodError: see `configure_recipe`.
      MlperfError: it is to be logged as a run of MLPerf's, and is none.
      PlanError: the fields in which it is not what was planned, all at once.
    """
    recipe = configure_recipe(request.recipe, request.all_changes, options)
    if MLPERF in request.loggers:
        benchmark_of(recipe)  # refuses what is none, before anything is made
    if request.plan is not None:
        check_planned(request.plan, recipe)
    return recipe


def remember(request: TrainRequest, options: RuntimeOptions, devices: int = 0) -> tuple[TrainRequest, RuntimeOptions]:
    """Returns the request and options with what a resumed run's folder remembers: recipe, changes, mesh, failed chips.

    The mesh only if there are `devices` for it (those JAX has, if 0), and the failed chips only with the mesh: a mesh
    in `options` means a whole one. Failed chips in `options` add to those that had failed before.

    Raises:
      RecipeError: the folder is a run of another recipe.
    """
    if request.resume is None:
        return request, options
    folder, facts = open_folder(request.resume)
    if isinstance(request.recipe, str) and request.recipe not in ("", facts["recipe"]):
        raise RecipeError(
            f"{request.resume} is a run of {facts['recipe']}, not of {request.recipe}. Leave the name out."
        )
    asked, recipe = request.changes, request.recipe or recorded_recipe(folder, facts)
    request = replace(request, recipe=recipe, changes=[*recorded_changes(folder, facts), *asked])
    mesh = tuple(facts.get("chips", facts["mesh"].values()))
    elsewhere = any(change.startswith("layout.mesh=") for change in asked)
    fits = math.prod(mesh) * facts.get("tile", 1) <= (devices or jax.device_count())
    if options.mesh is None and not elsewhere and fits:
        failed = tuple(f"{row},{column}" for row, column in facts.get("failed", ()))
        options = replace(options, mesh=mesh, fail=(*failed, *options.fail))
    return request, options


def resume_command(folder: RunFolder, options: RuntimeOptions, arguments: str = "") -> str:
    """The command that goes on with this run, as it was started but for `arguments`."""
    command = f"multipod train --resume {shlex.quote(str(folder.path))}{arguments}"
    if options.cluster.name == "multipod launch":
        cluster, count = options.cluster, options.cluster.processes
        launcher = cluster.launcher or f"multipod launch --processes {count}{' --survive' * cluster.survives}"
        command = f"{launcher} -- {command.removeprefix('multipod ')}"
        # A launcher gives each process its part of `CPU_DEVICES`, if the command does not say otherwise.
        if options.cpu_devices * count != CPU_DEVICES:
            command += f" --cpu-devices {options.cpu_devices}"
        if options.timeouts != Timeouts() and "--timeout" not in shlex.split(launcher):
            command += f" --timeout {options.timeouts.limit_s:g}"
    return command


def relocation_arguments(request: TrainRequest, layout: Layout) -> str:
    """The arguments by which a resumed run lies elsewhere than `run.json` says, which tells how it began."""
    if request.resume is None:
        return ""
    _, facts = open_folder(request.resume)
    began = {tuple(chip) for chip in facts.get("failed", ())}
    arguments, failed = "", set(layout.failed)
    whole = list(facts.get("chips", facts["mesh"].values()))
    if layout.mesh and (list(layout.mesh) != whole or began - failed):
        began, arguments = set(), " --mesh " + "x".join(map(str, layout.mesh))
    return arguments + "".join(f" --fail {row},{column}" for row, column in sorted(failed - began))


def pace_arguments(request: TrainRequest) -> str:
    """The arguments that say again how updates are given to the devices, as far as the user said it."""
    ahead = "" if request.run_ahead is None else f" --run-ahead {request.run_ahead}"
    return ahead + (f" --steps-per-call {request.steps_per_call}" if request.steps_per_call > 1 else "")


def logger_arguments(request: TrainRequest) -> str:
    """The arguments that name again the loggers that are told."""
    return f" --log {shlex.quote(','.join(request.loggers))}" if request.loggers else ""


def copy_arguments(request: TrainRequest) -> str:
    """The arguments that say again where the run is copied to."""
    return f" --copy-to {shlex.quote(request.copy_to)}" if request.copy_to else ""


def reading_arguments(reading: InputOptions) -> str:
    """The arguments that give this reading again, each with a space before it."""
    given = {
        "--read-threads": reading.threads,
        "--read-processes": reading.processes,
        "--read-ahead": reading.ahead,
        "--read-limit": reading.limit_s if reading.limit_s != type(reading).limit_s else 0,
        "--image-order": reading.image_order,
        "--decoded-cache": reading.cache_bytes,
        "--decoded-cache-folder": reading.cache_folder,
    }
    return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value)
