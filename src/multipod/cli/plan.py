"""`multipod plan`: how long a step and a run will take on a machine, and which layout is best."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from multipod import runtime
from multipod.cli import completion, plan_text
from multipod.cli.json_output import json_option, print_json
from multipod.cli.plan_families import predict_from
from multipod.cli.plan_picture import draw_layouts, draw_scaling
from multipod.cli.plan_text import compare
from multipod.cli.schedules.machine import failure_options
from multipod.errors import PlanError
from multipod.extras import require
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout
from multipod.layout.text import spelled
from multipod.plan.asked import asked_for
from multipod.plan.calibration.steps import fit_steps, read_steps
from multipod.plan.machine import find, here, read, write
from multipod.plan.placing import on_machine
from multipod.plan.run import Saving, predict_run, save_s
from multipod.plan.saved import SavedPlan, write_plan
from multipod.plan.search import Every, remember_costs, scaling, search
from multipod.plan.tables.models import MODELS
from multipod.plan.trace import write_step_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from multipod.plan.calibration.fit import Fit
    from multipod.plan.machine import Machine
    from multipod.plan.predict import Prediction
    from multipod.plan.run import RunPrediction
    from multipod.plan.search import Found
    from multipod.plan.traced.subject import ToPlan
    from multipod.plan.workload import Dtype, Workload

FILE = click.Path(path_type=Path, dir_okay=False)
POSITIVE = click.FloatRange(0)


CACHE = click.option(
    "--cache", metavar="DIR", help="Simulated costs; `off` for none.  [default: ~/.cache/multipod/plan]"
)


class PlanGroup(click.Group):
    """Commands of the planner; words that name none of them go to `recipe`, whose name can be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts the name of the command in front, wherever it stands among the options."""
        if args[:1] in (["--help"], ["-h"]):
            return super().parse_args(ctx, args)
        name = next((word for word in args if word in self.commands), "recipe")
        if name in args:
            args = [*args[: args.index(name)], *args[args.index(name) + 1 :]]
        return super().parse_args(ctx, [name, *args])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, or `recipe`."""
        return self.commands.get(cmd_name, self.commands["recipe"])


@click.group(cls=PlanGroup)
def plan() -> None:
    """Plan RECIPE on a machine, calibrate a machine, or compare two plans.

    \b
    multipod plan resnet50 --on tpu-v3-multipod --batch 65536
    multipod plan ssd --on tpu-v3-pod --batch 2048 --scale 16..1024 --draw ssd.svg
    multipod plan calibrate                            measure this host, for --on here
    multipod plan calibrate steps.json --on dgx-a100 --save a100.json      fit a machine to measured steps
    multipod plan calibrate --from runs.toml --predict 64,256:8192         larger runs from measured small ones
    multipod plan digits --on here:8 --save plan.json
    multipod plan compare a.json b.json

    The word `recipe` can be left out; `multipod plan RECIPE --help` has its options.
    """


def machine_options(command: Any) -> Any:
    """Adds what says a machine: --on, failures, constants, hosts and price."""
    for option in reversed((
        click.option("--on", metavar="MACHINE", shell_complete=completion.machines,
                     help="tpu-v3-pod:8x8, dgx-h100:4, here:8, or see `topology list`."),
        failure_options,
        click.option("--host-rate", type=POSITIVE, default=0.0, help="Examples a second that a host prepares."),
        click.option("--host-spread", type=POSITIVE, default=0.0, help="Deviation of its batches over their mean."),
        click.option("--failures", type=POSITIVE, default=0.0, help="Of one chip in an hour, as 2e-5."),
        click.option("--price", type=POSITIVE, default=0.0, help="Of a chip for an hour, in any currency."),
        click.option("--calibration", type=FILE, metavar="FILE", help="Constants, as `plan calibrate` writes."),
        CACHE,
    )):  # fmt: skip
        command = option(command)
    return command


@plan.command("recipe")
@click.argument("names", nargs=-1, metavar="RECIPE", shell_complete=completion.planned)
@machine_options
@click.option("--batch", type=click.IntRange(1), help="Examples in an update.  [default: the recipe's]")
@click.option("--updates", type=float, help="Of the run.  [default: the recipe's, or the table of epochs]")
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="Change a field of the recipe. Repeatable.")
@click.option("--explain", metavar="LAYOUT", help="Take one apart: its number in the table, or model=4,sum=torus-2d.")
@click.option("--scale", metavar="FROM..TO", help="A scaling table over machine sizes, doubling: 16..4096.")
@click.option("--draw", type=FILE, metavar="OUT.svg", help="Draw the layouts' steps, or --scale's time and price.")
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="Layouts to show.")
@click.option("--precision", type=click.Choice(["float32", "bfloat16", "any"]), help="Of products.  [default: its own]")
@click.option("--evaluate-every", type=float, help="Updates between evaluations.  [default: the recipe's]")
@click.option("--mirror-every", type=click.IntRange(0), default=0, help="As `launch --survive` has it; 0: no copies.")
@click.option("--save-every", type=POSITIVE, help="Seconds of work between checkpoints.  [default: the best]")
@click.option("--save-seconds", type=POSITIVE, help="That one takes.  [default: 1 GB/s a host]")
@click.option("--restart-seconds", type=POSITIVE, default=120.0, show_default=True, help="After a failure.")
@click.option("--save", type=FILE, metavar="PLAN.json", help="Write the best layout, or --explain's, for train.")
@click.option("--trace", type=FILE, metavar="OUT.json", help="A step, for ui.perfetto.dev: the best, or --explain's.")
@click.option("--splits", is_flag=True, help="Also split a recipe's model: compiles its step here, once for each.")
@click.option("--compile", "compiled", is_flag=True, help="Also ask XLA: compile a recipe's step for this TPU.")
@json_option
def plan_recipe(names: tuple[str, ...], **asked: Any) -> None:
    """Plan RECIPE on a machine: a table of layouts, the quickest first, without the machine.

    RECIPE is a published model (resnet50, bert, transformer, ssd, maskrcnn), a name from `multipod list`, or
    FILE.py:FUNCTION. Pipeline stages and experts are searched where the model has them; other splits for published
    models, and for recipes with --splits. Fully sharded weights and large replicas are tried where nothing else fits.
    """
    if len(names) != 1:
        raise click.UsageError("name one recipe, as `multipod plan resnet50 --on tpu-v3-pod`, or compare two plans.")
    if not asked["on"]:
        raise click.UsageError("there is no machine. Give --on, as --on tpu-v3-pod:8x8.")
    if asked["updates"] is not None and not asked["updates"] > 0:
        raise click.UsageError(f"--updates {asked['updates']:g} is no run. Give a number above 0.")
    others = ("scale", "draw", "explain", "save", "trace", "compiled")
    given = [f"--{'compile' if name == 'compiled' else name}" for name in others if asked[name]]
    if asked["as_json"] and given:
        raise click.UsageError(f"--json prints the layouts alone. Leave out {' and '.join(given)}, or --json.")
    _check_folders(asked[name] for name in ("draw", "save", "trace"))
    if asked["draw"] is not None:
        require("--draw", "matplotlib")
    _plan(_console(), names[0], asked)


@plan.command("calibrate")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@machine_options
@click.option("--save", type=FILE, metavar="FILE", help="Of constants or predictions.  [default: --on here's own]")
@click.option("--from", "runs", type=FILE, metavar="RUNS.toml", help="Measured runs, and questions.")
@click.option("--predict", multiple=True, metavar="N[:BATCH],...", help="Sizes for --from. Repeatable.")
@json_option
def plan_calibrate(file: Path | None, runs: Path | None, predict: tuple[str, ...], **asked: Any) -> None:
    """Fit a machine's constants: to this host, measured now, or to the measured steps in FILE.

    With --from: predict larger runs from one or more measured ones of the same job, with 90 % intervals. No constants
    are fitted; other jobs' runs at several sizes (MLPerf v0.7 and v1.0) say how throughput and epochs change.
    """
    _check_folders([asked["save"]])
    if runs is not None:
        if file is not None or asked["on"]:
            raise click.UsageError("--from takes runs alone: leave out FILE and --on.")
        predict_from(_console(), runs, predict, asked["save"], asked["as_json"])
    elif predict:
        raise click.UsageError("--predict needs measured runs. Give them with --from RUNS.toml.")
    elif file is None:
        _calibrate(_console(), asked["as_json"])
    else:
        _calibrate_from(_console(), file, {**asked, "scale": None, "splits": False})


@plan.command("compare")
@click.argument("files", nargs=-1, metavar="A B")
@json_option
@click.option("--cache", hidden=True, expose_value=False)
def plan_compare(files: tuple[str, ...], as_json: bool) -> None:
    """Compare two plans that were saved, A and B."""
    if as_json:
        print_json(plan_text.compared(files))
    else:
        compare(_console(), files)


def _check_folders(files: "Iterable[Path | None]") -> None:
    """Refuses files whose folder is not there, before anything is worked out."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"{file.parent} is no folder to write in. Make it first.")


def _console() -> "Console":
    """The terminal, or a wide page where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _plan(console: "Console", name: str, asked: dict[str, Any]) -> None:
    _remember(asked["cache"])
    told_of = _to_plan(name, asked)
    workload, batch, updates, every = told_of.workload, told_of.batch, told_of.updates, told_of.every
    machine = _machine(asked)
    every = every if asked["evaluate_every"] is None else asked["evaluate_every"]
    dtypes = _dtypes(workload, asked["precision"])
    if asked["scale"]:
        _scale(console, workload, {**asked, "updates": asked["updates"] or updates}, batch)
        return
    with _bar() as told:
        found = search(workload, machine, batch, every, told, dtypes, asked["mirror_every"])
    often = Every(every, asked["mirror_every"])
    number, chosen = asked_for(asked["explain"] or "1", found, workload, machine, batch, often)
    asked["updates"] = updates = asked["updates"] or updates
    if asked["as_json"]:
        _print_figures(told_of, found, machine, asked)
        return
    for line in told_of.remarks:
        console.print(line, highlight=False, markup=False)
    plan_text.table(console, found, machine, asked["top"], _run_of(machine, asked))
    if asked["fail"] or asked["fail_link"]:
        _hole(console, workload, found, asked, batch)
    if asked["compiled"]:
        _compile(console, told_of, machine, found, asked["cache"])
    if asked["explain"]:
        words = spelled(on_machine(chosen.layout, machine), always=("gradient_sum", "shard_update"))
        plan_text.explain(console, chosen, number, words)
        plan_text.survival(console, chosen, machine)
    if asked["draw"] is not None:
        layouts = [step for _, step in plan_text.shown(found, asked["top"])]
        draw_layouts(
            layouts, [plan_text.short_name(step) for step in layouts], f"{told_of.name} on {machine}", asked["draw"]
        )
        click.echo(f"steps drawn in {asked['draw']}")
    if asked["trace"] is not None:
        write_step_trace(chosen, workload, machine, asked["trace"])
        which = f"layout {number}" if number else "that layout"
        click.echo(f"a step of {which} in {asked['trace']}: open it in ui.perfetto.dev")
    if asked["save"] is not None:
        _save(told_of, asked, machine, chosen)


def _print_figures(told_of: "ToPlan", found: "Found", machine: "Machine", asked: dict[str, Any]) -> None:
    """What `--json` prints: the quickest layouts, each with its words for `--layout` and its run."""
    run = _run_of(machine, asked)
    layouts = [
        step.data()
        | {"layout": spelled(on_machine(step.layout, machine), always=("gradient_sum", "shard_update"))}
        | {"fits": step.fits, "run": run(step).data() if run else None}
        for step in found.predictions[: asked["top"]]
    ]
    print_json({
        "recipe": told_of.name, "machine": asked["on"], "devices": machine.devices, "batch": found.best.batch,
        "updates": asked["updates"], "remarks": told_of.remarks, "priced": found.tried, "left_out": found.left_out,
        "layouts": layouts,
    })  # fmt: skip


def _machine(asked: dict[str, Any]) -> "Machine":
    """The machine that was asked for, with what the user said of it."""
    if asked["on"].partition(":")[0] == "here":
        if asked["fail"] or asked["fail_link"] or asked["scale"]:
            raise click.UsageError("--fail and --scale are for machines with chips and links; `here` is this one host.")
        machine = _here(asked["on"], asked["calibration"])
    else:
        machine = find(asked["on"], asked["fail"], asked["fail_link"], asked["calibration"])
    return _told(machine, asked)


def _told(machine: "Machine", asked: dict[str, Any]) -> "Machine":
    """The machine with what the user said of it."""
    told = {"price": asked["price"], "host_examples_per_s": asked["host_rate"]}
    told |= {"host_spread": asked["host_spread"], "chip_failures_per_hour": asked["failures"]}
    return replace(machine, **{name: value for name, value in told.items() if value})


def _run_of(machine: "Machine", asked: dict[str, Any]) -> "Callable[[Prediction], RunPrediction] | None":
    """From a step to its run; None if nobody knows how many updates it has."""

    def run(step: "Prediction") -> "RunPrediction":
        seconds = save_s(step, machine) if asked["save_seconds"] is None else asked["save_seconds"]
        saving = Saving(asked["save_every"], seconds, asked["restart_seconds"])
        return predict_run(step, machine, asked["updates"], saving=saving)

    return run if asked["updates"] else None


def _dtypes(workload: "Workload", precision: str | None) -> "tuple[Dtype | Literal[''], ...]":
    """The types of products to search; "" is the model's own.

    Raises:
      PlanError: the model has none but its own.
    """
    if precision is None or precision == "any":
        return (workload.dtypes or (workload.dtype,)) if precision else ("",)
    return (workload.of("bfloat16" if precision == "bfloat16" else "float32").dtype,)


def _here(words: str, calibration: Path | None) -> "Machine":
    """This host: `here`, or `here:4` for four devices; with its own constants, if it was calibrated."""
    size = words.partition(":")[2] or "8"
    if not size.isdecimal() or not 0 < int(size) <= 4096:
        raise click.UsageError(f"--on {words}: write here, or the number of devices, as here:4.")
    machine = here(int(size), os.cpu_count() or 1)
    file = calibration or _own()
    if not file.exists() and calibration is None:
        click.echo("this host is not calibrated, so its constants are guesses: run `multipod plan calibrate`", err=True)
        return machine
    return replace(machine, calibration=read(file)["calibration"])


def _own() -> Path:
    """Where this host's constants are kept."""
    return runtime.default_cache().parent / "plan" / "here.json"


def _calibrate(console: "Console", as_json: bool) -> None:
    """Measures small recipes here and keeps the constants that fit them."""
    runtime.prepare(cpu_devices=8, cache=runtime.default_cache())
    from multipod.plan.calibration.host import calibrate

    with console.status("") as status:
        fit, measured = calibrate(here(8, os.cpu_count() or 1), told=status.update)
    _show_fit(console, fit, measured, as_json)
    _own().parent.mkdir(parents=True, exist_ok=True)
    write(fit.machine, _own(), measured=measured)
    click.echo(f"median error {fit.median_error:.0%}; constants in {_own()}", err=as_json)


def _show_fit(console: "Console", fit: "Fit", measured: dict[str, float], as_json: bool) -> None:
    if as_json:
        print_json({"measured_s": measured, "constants": fit.constants, "errors": fit.errors, "twins": fit.twins,
                    "loose": fit.loose, "median_error": fit.median_error})  # fmt: skip
    else:
        plan_text.fitted(console, fit, measured)


def _calibrate_from(console: "Console", file: Path, asked: dict[str, Any]) -> None:
    """Fits the constants of a machine to the measured steps in a file."""
    if not asked["on"] or asked["save"] is None:
        raise click.UsageError("say whose constants are fitted and where they go: --on dgx-a100 --save a100.json.")
    _remember(asked["cache"])
    steps = read_steps(file)
    workloads = {
        name: _to_plan(name, {**asked, "batch": 1 if name in MODELS else None}).workload
        for name in {step.model for step in steps}
    }
    fit = fit_steps(steps, _machine(asked), workloads.__getitem__)
    _show_fit(console, fit, {str(step): step.step_ms / 1e3 for step in steps}, asked["as_json"])
    write(fit.machine, asked["save"], steps=[str(step) for step in steps])
    click.echo(f"median error {fit.median_error:.0%}; plan with --calibration {asked['save']}", err=asked["as_json"])


def _remember(cache: str | None) -> None:
    remember_costs(None if cache == "off" else _folder(cache))


def _folder(cache: str | None) -> Path:
    """Where simulated costs and what XLA said are kept."""
    return runtime.default_cache().parent / "plan" if cache is None else Path(cache)


def _to_plan(name: str, asked: dict[str, Any]) -> "ToPlan":
    """What a name stands for, see `recipe_to_plan`.

    Raises:
      PlanError: nothing of this name; a table without a batch.
      RecipeError: changes that do not fit, or a file that is no recipe.
    """
    runtime.prepare()
    from multipod.plan.traced.subject import recipe_to_plan  # JAX

    folder = None if asked["cache"] == "off" else _folder(asked["cache"])
    return recipe_to_plan(
        name, asked["batch"], asked.get("sets", ()), folder, partial(click.echo, err=True) if asked["splits"] else None
    )


class _bar:
    """A progress bar on the terminal that is told (done, all); gone when it is finished."""

    def __enter__(self) -> Any:
        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._progress.start()
        task = self._progress.add_task("pricing layouts", total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _compile(console: "Console", planned: "ToPlan", machine: "Machine", found: "Found", cache: str | None) -> None:
    """What XLA says of the step of a recipe, beside the prediction."""
    if planned.name in MODELS or planned.recipe is None:
        raise PlanError(
            f"{planned.name} is a table of layers, and XLA compiles programs. Give a recipe, or leave --compile out."
        )
    runtime.absent_tpus()
    from multipod.plan.traced.program import compiled_step

    folder = None if cache == "off" else Path(cache) if cache else runtime.default_cache().parent / "plan"
    with console.status("compiling"):
        facts = compiled_step(planned.recipe, machine, folder)
    best = found.best
    flops, peak = f"{facts.flops / 1e9:,.2f} GFLOP", facts.memory.peak / 2**20
    console.print(
        f"XLA, on a device: {flops} (predicted {best.flops / best.devices / 1e9:,.2f}), {peak:,.1f} MiB of memory"
    )
    if facts.seconds:
        compute = f"predicted {1e3 * best.compute_s:.2f} ms"
        console.print(f"XLA's own estimate, which knows no network: {1e3 * facts.seconds:.2f} ms ({compute})")
    sizes = dict(zip(DATA_AXES, on_machine(Layout(), machine).mesh, strict=True))
    moved: dict[str, list[int]] = {}
    for one in facts.collectives:
        row = moved.setdefault(f"{one.kind} over {', '.join(one.axes(sizes) or ('?',))}", [0, 0])
        row[0], row[1] = row[0] + one.times, row[1] + one.times * one.nbytes
    for what, (times, nbytes) in moved.items():
        console.print(f"  {times} x {what}: {nbytes:,} bytes together", highlight=False)


def _hole(console: "Console", workload: "Workload", found: "Found", asked: dict[str, Any], batch: int) -> None:
    """What the failed chips cost: the same search on the whole machine."""
    whole = search(workload, find(asked["on"], file=asked["calibration"]), batch).best
    best = found.best
    before, after = (f"{1e3 * step.step_s:.2f} ms by {step.layout.sync.gradient_sum}" for step in (whole, best))
    console.print(
        f"whole: {before}; with the hole: {after}, {best.step_s / whole.step_s - 1:+.1%} for "
        f"{best.devices / whole.devices - 1:+.1%} devices",
        highlight=False,
    )


def _scale(console: "Console", workload: "Workload", asked: dict[str, Any], batch: int) -> None:
    steps = scaling(workload, asked["on"], _sizes(asked["scale"]), batch)
    table = Table(box=SIMPLE_HEAD, title=f"{workload.name}, batch {batch:,}")
    for k, column in enumerate(("chips", "layout", "step ms", "examples/s", "speed-up", "efficiency")):
        table.add_column(column, justify="left" if k == 1 else "right")
    first = steps[0]
    for step in steps:
        more, faster = step.devices / first.devices, first.step_s / step.step_s
        cells = (f"{1e3 * step.step_s:.2f}", f"{step.examples_per_s:,.0f}", f"{faster:.2f}", f"{faster / more:.0%}")
        table.add_row(_chips(step), plan_text.name_of(step), *cells)
    console.print(table)
    if asked["draw"] is not None:
        machines = [_told(find(step.machine), asked) for step in steps]
        by_machine = [_run_of(machine, asked) for machine in machines]
        runs = [run(step) for run, step in zip(by_machine, steps, strict=True) if run]
        chips = [machine.chips for machine in machines]
        draw_scaling(steps, chips, runs, f"{workload.name}, batch {batch:,}", asked["draw"])
        click.echo(f"scaling drawn in {asked['draw']}")


def _chips(step: "Prediction") -> str:
    return step.machine.partition(":")[2] or step.machine


def _sizes(text: str) -> list[int]:
    """16, 32, ..., 4096 for `16..4096`."""
    found = re.fullmatch(r"(\d{1,6})\.\.(\d{1,6})", text)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise click.UsageError(f"--scale {text!r} is no range. Write the fewest and the most chips, as 16..1024.")
    sizes = [int(found[1])]
    while sizes[-1] * 2 <= int(found[2]):
        sizes.append(sizes[-1] * 2)
    return sizes


def _save(planned: "ToPlan", asked: dict[str, Any], machine: "Machine", chosen: "Prediction") -> None:
    name, on = planned.name, asked["on"]
    if ".py:" in name:
        path, _, function = name.rpartition(":")
        name = f"{Path(path).absolute()}:{function}"  # as `train` knows it
    run = _run_of(machine, asked)
    prediction = chosen.data() | (run(chosen).data() if run else {})
    if planned.recipe is None:
        plan = SavedPlan(name, on, on_machine(chosen.layout, machine), chosen.batch, prediction)
        then = "a table, which cannot be trained"
    else:
        from multipod.plan.pinned import plan_of

        updates = max(1, round(asked["updates"]))
        plan = plan_of(name, on, chosen, machine, planned.recipe, asked["sets"], updates)
        plan = replace(plan, prediction=prediction)
        then = f"train it with `multipod train {name} --layout {asked['save']}`, which sets {' '.join(plan.settings)}"
    write_plan(plan, asked["save"])
    click.echo(f"plan in {asked['save']}: {then}")
