"""`multipod chaos`: lets things go wrong in a run, and says what came of it."""

import json
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from multipod import runtime
from multipod.chaos.campaign import Attempt, Campaign, Launch, carry_out
from multipod.chaos.effects import (
    compare_examples,
    fault_effects,
    find_left_behind,
    largest_difference,
    list_shared_memory,
    loss_difference,
    read_end,
    read_parameters,
)
from multipod.chaos.fault_plan import FaultPlan, RandomFaults, read_plan
from multipod.chaos.hosts import LINK, NetworkHosts, make_hosts
from multipod.chaos.inject import KINDS, Fault, records
from multipod.cli import completion
from multipod.cli.launching.child_command import read_child
from multipod.cli.launching.workers import make_workers
from multipod.elastic.launcher.membership import ElasticPolicy
from multipod.elastic.launcher.processes import LineSink, WorkerCommand
from multipod.elastic.launcher.supervise import RunOutcome, supervise
from multipod.elastic.launcher.survive import survive as survive_run
from multipod.errors import ChaosError
from multipod.runtime import Timeouts

CLOSE = 1e-4
"""What sums that are rounded otherwise may make of losses, over the largest."""

NEVER = 1 << 30
"""An update that no run reaches."""

CALM = "undisturbed.json"
"""In the folder of an undisturbed run that ended: how it was run, and for how long."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe", shell_complete=completion.recipes)
@click.option(
    "--plan", type=click.Path(path_type=Path), help="What goes wrong when, as TOML: see docs/availability.md."
)
@click.option("--random", "count", type=click.IntRange(1), metavar="N", help="Draw so many faults, beside the plan's.")
@click.option("--kinds", metavar="K,K", help="Kinds to draw from: " + ", ".join(KINDS) + ".")
@click.option("--seed", type=click.IntRange(0), help="Of the draw.")
@click.option("--processes", type=click.IntRange(1), help="Of the run.  [default: the plan's, or 2]")
@click.option("--timeout", type=click.FloatRange(min=3), metavar="SECONDS", help="As of `launch`.")
@click.option("--survive", is_flag=True, help="As of `launch`: the others go on without a process that dies.")
@click.option("--hosts", is_flag=True, help="Each process on a host of its own: a network namespace. Needs root.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the runs and what was recorded in this new folder.")
@click.option(
    "--undisturbed",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the undisturbed run in this folder, and take it from there the next time.",
)
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures here.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def chaos(
    recipe: str,
    plan: Path | None,
    count: int | None,
    kinds: str | None,
    seed: int | None,
    processes: int | None,
    timeout: float | None,
    survive: bool,
    hosts: bool,
    out: Path | None,
    undisturbed: Path | None,
    file: Path | None,
    options: tuple[str, ...],
) -> int:
    """Train RECIPE in several processes while things go wrong, and compare it with a run in which nothing does.

    multipod chaos digits --plan plan.toml -- --mesh 2x2 --set updates=60 --set checkpoint_every=10

    What follows `--` goes to `multipod train`. Exits 1 if the result differs from the undisturbed run's, if examples
    were lost or used twice, or if anything is left behind.
    """
    wanted = settle_plan(plan, count, kinds, seed, processes)
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="multipod-chaos-")))
        if out is not None and out.exists():
            raise ChaosError(f"{out} is there already. Choose another --out, or leave it out.")
        apart = stack.enter_context(make_hosts(wanted.processes + survive)) if hosts else None  # one to launch from
        calm = (undisturbed or folder / "undisturbed").absolute()
        figures = run_campaign(wanted, folder.absolute(), calm, ["train", recipe, *options], timeout, survive, apart)
    show(figures)
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["whole"] else 1


def settle_plan(
    plan: Path | None, count: int | None, kinds: str | None, seed: int | None, processes: int | None
) -> FaultPlan:
    """The plan of the file, changed as the options say.

    Raises:
      ChaosError: no fault is asked for, an unknown kind, or a file that is no plan.
    """
    wanted = FaultPlan() if plan is None else read_plan(plan)
    chosen = tuple(kinds.split(",")) if kinds else wanted.random.kinds
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        raise ChaosError(f"--kinds {kinds}: there is no {', '.join(unknown)}. Known: {', '.join(KINDS)}.")
    drawn = RandomFaults(wanted.random.count if count is None else count, chosen, wanted.random.seconds)  # type: ignore[arg-type]
    if not (drawn.count or wanted.fault):
        raise ChaosError("nothing is to go wrong. Give a --plan with faults, or --random 5.")
    return msgspec.structs.replace(
        wanted,
        random=drawn,
        seed=wanted.seed if seed is None else seed,
        processes=processes or wanted.processes,
    )


@dataclass(frozen=True)
class CampaignProcesses:
    """How the processes of a campaign's runs are started.

    Attributes:
      count: processes of a run.
      timeouts: theirs and the launcher's.
      added: arguments that a resumed run needs too.
      hosts: where each process is; None is this host.
    """

    count: int
    timeouts: Timeouts
    added: Sequence[str]
    hosts: NetworkHosts | None = None

    def supervise(self, words: Sequence[str], show: LineSink) -> RunOutcome:
        """Runs `multipod` with these words in processes that end with the first of them."""
        workers = self._make_workers(words, survives=False)
        return supervise(workers if self.hosts is None else self.hosts.place(workers), self.timeouts, show)

    def survive(self, words: Sequence[str], show: LineSink) -> RunOutcome:
        """Runs `multipod` with these words in processes that go on without those that die."""
        workers, policy = self._make_workers(words, survives=True), ElasticPolicy(self.count)
        if self.hosts is None:
            return survive_run(workers, policy, self.timeouts, show)
        with self.hosts.agents(self.timeouts.limit_s) as agents:
            placed = agents.place(workers, self.count)
            return survive_run(placed, policy, self.timeouts, show, coordinator=agents.coordinator)

    def _make_workers(self, words: Sequence[str], survives: bool) -> list[WorkerCommand]:
        kept = [*words, *(self.added if words[1] == "--resume" else [])]
        return make_workers(kept, self.count, os.environ, survives=survives)


def run_campaign(
    plan: FaultPlan,
    folder: Path,
    undisturbed: Path,
    train: Sequence[str],
    timeout: float | None,
    survives: bool = False,
    hosts: NetworkHosts | None = None,
) -> dict[str, Any]:
    """Runs with and without faults; returns the figures of both, as plain values."""
    console = Console(stderr=True)
    command = read_child(train)
    timeouts = command.settle_timeouts(timeout)
    arguments = command.worker_arguments(plan.processes, timeouts)
    processes = CampaignProcesses(plan.processes, timeouts, arguments[len(train) :], hosts)
    link = "" if hosts is None else LINK
    memory = list_shared_memory()
    never = [Fault("flip", NEVER)] if plan.flips else []  # both runs must be compiled for a flip, or for none
    console.print("undisturbed", style="dim")
    calm = find_or_run_undisturbed(undisturbed, never, arguments, processes.supervise, link)
    faults = plan.faults(calm.attempts[-1].updates)
    listed = ", ".join(f"{fault.kind} at {fault.at}" for fault in faults)
    console.print(f"disturbed: {listed}", style="dim", soft_wrap=True)
    began_s = time.monotonic()
    launch = processes.survive if survives else processes.supervise
    disturbed = carry_out([*faults, *never], folder / "disturbed", arguments, launch, link)
    disturbed_s = time.monotonic() - began_s
    runtime.prepare(cpu_devices=1)
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    figures = compare_runs(disturbed, calm, plan.processes, survives, find_left_behind(folder, memory))
    for run in (calm.run, disturbed.run):
        shutil.rmtree(run / "tensorboard", ignore_errors=True)
    return figures | {
        "plan": msgspec.to_builtins(plan),
        "survives": survives,
        "undisturbed_s": json.loads((calm.folder / CALM).read_text())["seconds"],
        "disturbed_s": disturbed_s,
    }


def find_or_run_undisturbed(
    folder: Path, faults: Sequence[Fault], train: Sequence[str], launch: Launch, link: str
) -> Campaign:
    """The undisturbed run: that in `folder` if there is one, else it is run there.

    Raises:
      ChaosError: what is there was run by another command, or is no such run.
    """
    record = folder / CALM
    if record.exists():
        facts = json.loads(record.read_text())
        if facts["command"] != list(train):
            raise ChaosError(
                f"{folder} holds the undisturbed run of another command: multipod {shlex.join(facts['command'])}. "
                "Name another folder by --undisturbed."
            )
        return Campaign(folder, (Attempt(RunOutcome(0), facts["updates"]),))
    if folder.exists():
        raise ChaosError(f"{folder} is there already, and holds no undisturbed run. Name another by --undisturbed.")
    began_s = time.monotonic()
    calm = carry_out(faults, folder, train, launch, link)
    facts = {"command": list(train), "updates": calm.attempts[-1].updates, "seconds": time.monotonic() - began_s}
    record.write_text(json.dumps(facts) + "\n")
    return calm


def compare_runs(
    disturbed: Campaign, calm: Campaign, processes: int, survives: bool, left_behind: Sequence[str]
) -> dict[str, Any]:
    """The figures of both runs.

    The result is whole if losses are the same, and parameters, where the same processes did all of both.
    """
    difference = largest_difference(read_parameters(disturbed.run), read_parameters(calm.run))
    losses = loss_difference(disturbed.run, calm.run)
    used = compare_examples(disturbed.folder, calm.folder, processes)
    effects = fault_effects(disturbed.folder, processes)
    ended, events = read_end(disturbed.run), records(disturbed.run / "metrics.jsonl")
    same = losses <= CLOSE and (difference <= CLOSE or survives)
    return {
        "faults": [
            msgspec.to_builtins(effect.fault)
            | {"update": effect.update, "recovered_s": effect.recovered_s, "repeated": effect.repeated}
            for effect in effects
        ],
        "starts": len(disturbed.attempts),
        "worlds": sum(record["event"] == "regrouped" for record in events),
        "reasons": [attempt.outcome.reason for attempt in disturbed.attempts if attempt.outcome.reason],
        "repeated": sum(effect.repeated for effect in effects),
        "goodput": ended["goodput"],
        "lost_s": ended["lost_s"],
        "run_s": ended["run_s"],
        "goodput_undisturbed": read_end(calm.run)["goodput"],
        "difference": difference,
        "losses": losses,
        "examples": asdict(used),
        "troubled": [record for record in events if record["event"] == "troubled"],
        "not_saved": sum(record["event"] == "savefailed" for record in events),
        "left_behind": list(left_behind),
        "whole": same and used.same and used.uneven == 0 and not left_behind,
    }


def show(figures: dict[str, Any]) -> None:
    """Prints the figures."""
    console = Console()
    table = Table("fault", "rank", "at update", "recovered after", "updates done again")
    for fault in figures["faults"]:
        took = "-" if fault["recovered_s"] is None else f"{fault['recovered_s']:.1f} s"
        table.add_row(fault["kind"], str(fault["rank"]), str(fault["update"]), took, str(fault["repeated"]))
    console.print(table)
    for record in figures["troubled"]:
        console.print(f"bad update {record['update']}: {record['kind']}, {record['action']}. {record['verdict']}")
    lost = sorted(figures["lost_s"].items(), key=lambda item: -item[1])
    examples, apart = figures["examples"], figures["difference"]
    rows = {
        "starts": str(figures["starts"])
        + (f", and {figures['worlds']} changes of processes" if figures["survives"] else ""),
        "time": f"{figures['disturbed_s']:.1f} s; undisturbed {figures['undisturbed_s']:.1f} s",
        "goodput": f"{figures['goodput']:.1%}; undisturbed {figures['goodput_undisturbed']:.1%}",
        "lost to": ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in lost if seconds >= 0.05),
        "updates done again": str(figures["repeated"]),
        "saves that failed": str(figures["not_saved"]),
        "losses": f"differ by {figures['losses']:.2g} of the largest, at most",
        "parameters": "the undisturbed run's, bit for bit" if apart == 0 else f"differ by {apart:.2g} of the largest",
        "examples": f"{examples['used']:,}, the undisturbed run's: {'yes' if examples['same'] else 'NO'}; "
        + ("each once an epoch" if not examples["uneven"] else f"{examples['uneven']} used too often"),
        "left behind": ", ".join(figures["left_behind"]) or "nothing",
    }
    grid = Table.grid(padding=(0, 3, 0, 0))
    for name, value in rows.items():
        grid.add_row(f"[dim]{name}[/]", value)
    console.print(grid)
