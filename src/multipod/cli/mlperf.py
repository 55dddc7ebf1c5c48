"""`multipod mlperf`: benchmarks, checks of a run's log, and packages of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from multipod.cli.json_output import json_option, print_json
from multipod.mlperf.benchmarks import BENCHMARKS, Benchmark
from multipod.mlperf.check import check as check_log
from multipod.mlperf.lines import FILE
from multipod.mlperf.package import Package, Run, Submission, pack

_FOLDER = click.Path(path_type=Path)


@click.group()
def mlperf() -> None:
    """Hold runs against the rules of MLPerf Training, and pack results as MLCommons' checkers take them.

    \b
    multipod train resnet50 --log mlperf       writes mllog.txt in the run's folder
    multipod mlperf check runs/resnet50-001
    """


@mlperf.command(name="list")
@json_option
def list_benchmarks(as_json: bool) -> None:
    """List the benchmarks: rule sets, target, evaluations, runs of a result, recipe."""
    if as_json:
        print_json({"benchmarks": [_benchmark(each) for each in BENCHMARKS.values()]})
        return
    console = Console(highlight=False, soft_wrap=True)
    for each in BENCHMARKS.values():
        targets = [
            f"{name} {target:g} from {since}".strip()
            for name, by_ruleset in each.targets.items()
            for since, target in by_ruleset.items()
        ]
        console.print(f"{each.name:12} {each.title}", markup=False)
        console.print(f"  rule sets  {each.first} to {each.last}; a result is {each.runs} runs", markup=False)
        console.print(f"  target     {', '.join(targets)}", markup=False)
        console.print(f"  evaluated  {each.schedule}", markup=False)
        console.print(f"  recipe     {each.recipe or 'none of this size'}", markup=False)


def _benchmark(each: Benchmark) -> dict[str, Any]:
    return {
        **{name: getattr(each, name) for name in ("name", "title", "first", "last", "runs", "targets", "recipe")},
        "schedule": str(each.schedule),
    }


@mlperf.command()
@click.argument("run", type=_FOLDER)
@click.option("--ruleset", default="", help="As 1.0.0; the benchmark's last one if it is left out.")
@json_option
def check(run: Path, ruleset: str, as_json: bool) -> int:
    """Check mllog.txt of the RUN, a run's folder or a log: MLCommons' compliance checker, and what it does not see.

    Exits 1 if anything is wrong.
    """
    verdict = check_log(_log_of(run), ruleset)
    if as_json:
        print_json({**vars(verdict), "benchmark": verdict.benchmark.name, "is_good": verdict.is_good})
        return 0 if verdict.is_good else 1
    console = Console(highlight=False, soft_wrap=True)
    benchmark = verdict.benchmark
    console.print(f"{benchmark.name} ({benchmark.title}) under the rules of {verdict.ruleset}", markup=False)
    _print_all(console, "MLCommons' compliance checker refuses", verdict.official, "accepts the log")
    _print_all(console, "wrong beside", verdict.wrong, "")
    _print_all(console, "to know", verdict.notes, "")
    _print_all(console, "the closed division would refuse", verdict.closed, "would accept it, too")
    return 0 if verdict.is_good else 1


@mlperf.command()
@click.argument("runs", nargs=-1, required=True, type=_FOLDER)
@click.option("--out", required=True, type=_FOLDER, help="The package, a new folder.")
@click.option("--org", required=True, help="Who hands it in.")
@click.option("--system", required=True, help="The system's name, as tpu-v4-512; files are named by it.")
@click.option("--division", type=click.Choice(("open", "closed")), default="open", show_default=True)
@click.option("--status", default="research", show_default=True, help="onprem, cloud, preview or research.")
@click.option("--ruleset", default="", help="As 1.0.0; the benchmark's last one if it is left out.")
@json_option
def package(
    runs: tuple[Path, ...],
    out: Path,
    org: str,
    system: str,
    division: str,
    status: str,
    ruleset: str,
    as_json: bool,
) -> int:
    """Pack the logs of RUNS of one benchmark, and have MLCommons' checkers look at the package.

    Exits 1 if they refuse it, or if it is no complete result.
    """
    made = pack([_run(run) for run in runs], Submission(org, system, division, status), out, ruleset)
    if as_json:
        print_json({**vars(made), "benchmark": made.benchmark.name})
        return 1 if made.refused or made.missing else 0
    console = Console(highlight=False, soft_wrap=True)
    times = ", ".join("aborted" if minutes is None else f"{minutes:.3f}" for minutes in made.minutes)
    console.print(f"{made.benchmark.name}: minutes {times}", markup=False)
    console.print(_score(made), markup=False)
    console.print(f"package: {made.folder}", markup=False)
    _print_all(console, "left blank in the system's description", made.blanks, "", joined=True)
    _print_all(console, "not complete", made.missing, "")
    _print_all(console, "MLCommons' checkers refuse", made.refused, "accept it: logs, seeds, system")
    return 1 if made.refused or made.missing else 0


def _score(made: Package) -> str:
    return "score: none" if made.score is None else f"score: {made.score:.3f} minutes (Olympic mean)"


def _print_all(console: Console, title: str, lines: Sequence[str], none: str, joined: bool = False) -> None:
    """Prints the lines under their title; where there are none, what that means."""
    if lines and joined:
        console.print(f"{title}: {', '.join(lines)}", markup=False)
    elif lines:
        console.print(f"{title}:", markup=False)
        for line in lines:
            console.print(f"  - {line}", markup=False)
    elif none:
        subject = title.rsplit(" ", 1)[0].removesuffix(" would")
        console.print(f"{subject} {none}", markup=False)


def _log_of(run: Path) -> Path:
    return run / FILE if run.is_dir() else run


def _run(path: Path) -> Run:
    from multipod.train.run_folder import open_folder

    folder, facts = open_folder(path)
    return Run(_log_of(path), folder.recipe.read_text(), facts)
