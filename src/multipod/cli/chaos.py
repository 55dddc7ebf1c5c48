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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from multipod import runtime
from multipod.chaos.campaign import (
    Attempt,
    Campaign,
    ExampleUse,
    FaultEffect,
    FaultPlan,
    Launch,
    RandomFaults,
    carry_out,
    compare_examples,
    fault_effects,
    find_left_behind,
    largest_difference,
    list_shared_memory,
    loss_difference,
    read_end,
    read_parameters,
    read_plan,
)
from multipod.chaos.hosts import LINK, NetworkHosts, make_hosts
from multipod.chaos.inject import KINDS, Fault, records
from multipod.cli.launching.child_command import read_child
from multipod.cli.launching.workers import make_workers
from multipod.elastic.launcher.membership import ElasticPolicy
from multipod.elastic.launcher.processes import LineSink
from multipod.elastic.launcher.supervise import RunOutcome, supervise
from multipod.elastic.launcher.survive import survive as survive_run
from multipod.errors import ChaosError

CLOSE = 1e-4
"""What sums that are rounded otherwise may make of losses, over the largest."""

NEVER = 1 << 30
"""An update that no run reaches."""

CALM = "undisturbed.json"
"""In the folder of an undisturbed run that ended: how it was run, and for how long."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe")
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
        found = run_campaign(wanted, folder.absolute(), calm, ["train", recipe, *options], timeout, survive, apart)
    show(found)
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["whole"] else 1


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
    return replace(
        wanted,
        random=drawn,
        seed=wanted.seed if seed is None else seed,
        processes=processes or wanted.processes,
    )


def run_campaign(
    plan: FaultPlan,
    folder: Path,
    undisturbed: Path,
    train: Sequence[str],
    timeout: float | None,
    survives: bool = False,
    hosts: NetworkHosts | None = None,
) -> dict[str, Any]:
    """Both runs, and what there is to say of them: plain values."""
    console = Console(stderr=True)
    command = read_child(train)
    timeouts = command.settle_timeouts(timeout)
    arguments = command.worker_arguments(plan.processes, timeouts)
    added = arguments[len(train) :]

    def launch(words: Sequence[str], show: LineSink, survives: bool = survives) -> RunOutcome:
        kept = [*words, *(added if words[1] == "--resume" else [])]
        made = make_workers(kept, plan.processes, os.environ, survives=survives)
        if not survives:
            return supervise(made if hosts is None else hosts.place(made), timeouts, show)
        if hosts is None:
            return survive_run(made, ElasticPolicy(plan.processes), timeouts, show)
        with hosts.agents(timeouts.limit_s) as apart:
            placed = apart.place(made, plan.processes)
            return survive_run(placed, ElasticPolicy(plan.processes), timeouts, show, coordinator=apart.coordinator)

    link = "" if hosts is None else LINK
    memory = list_shared_memory()
    asked = [fault for fault in plan.fault if fault.kind == "flip"]
    flips = bool(asked) or (plan.random.count > 0 and "flip" in plan.random.kinds)
    nothing = [Fault("flip", NEVER)] if flips else []
    console.print("undisturbed", style="dim")
    calm = calm_run(undisturbed, nothing, arguments, partial(launch, survives=False), link)
    faults = plan.faults(calm.attempts[-1].updates)
    console.print(
        f"disturbed: {', '.join(f'{fault.kind} at {fault.at}' for fault in faults)}", style="dim", soft_wrap=True
    )
    began = time.monotonic()
    wild = carry_out([*faults, *nothing], folder / "disturbed", arguments, launch, link)
    wild_s = time.monotonic() - began
    runtime.prepare(cpu_devices=1)
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    apart = largest_difference(read_parameters(wild.run), read_parameters(calm.run))
    used = compare_examples(wild.folder, calm.folder, plan.processes)
    left = find_left_behind(folder, memory)
    for run in (calm.run, wild.run):
        shutil.rmtree(run / "tensorboard", ignore_errors=True)
    return summarize(calm, wild, fault_effects(wild.folder, plan.processes), used, apart, survives, left) | {
        "plan": asdict(plan),
        "survives": survives,
        "undisturbed_s": json.loads((calm.folder / CALM).read_text())["seconds"],
        "disturbed_s": wild_s,
    }


def calm_run(folder: Path, faults: Sequence[Fault], train: Sequence[str], launch: Launch, link: str) -> Campaign:
    """The undisturbed run: that in `folder`, if there is one.

    Raises:
      ChaosError: what is there was run by another command, or is no such run.
    """
    told = folder / CALM
    if told.exists():
        said = json.loads(told.read_text())
        if said["command"] != list(train):
            raise ChaosError(
                f"{folder} holds the undisturbed run of another command: multipod {shlex.join(said['command'])}. "
                "Name another folder by --undisturbed."
            )
        return Campaign(folder, (Attempt(RunOutcome(0), said["updates"]),))
    if folder.exists():
        raise ChaosError(f"{folder} is there already, and holds no undisturbed run. Name another by --undisturbed.")
    began = time.monotonic()
    found = carry_out(faults, folder, train, launch, link)
    facts = {"command": list(train), "updates": found.attempts[-1].updates, "seconds": time.monotonic() - began}
    told.write_text(json.dumps(facts) + "\n")
    return found


def summarize(
    calm: Campaign,
    wild: Campaign,
    found: Sequence[FaultEffect],
    used: ExampleUse,
    apart: float,
    survives: bool,
    left: Sequence[str],
) -> dict[str, Any]:
    """The figures of both runs.

    The result is whole if losses are the same, and parameters, where the same processes did all of both.
    """
    ended, losses = read_end(wild.run), loss_difference(wild.run, calm.run)
    same = losses <= CLOSE and (apart <= CLOSE or survives)
    events = records(wild.run / "metrics.jsonl")
    return {
        "faults": [
            {**asdict(blow.fault), "update": blow.update, "recovered_s": blow.recovered_s, "repeated": blow.repeated}
            for blow in found
        ],
        "starts": len(wild.attempts),
        "worlds": sum(record["event"] == "regrouped" for record in events),
        "reasons": [attempt.outcome.reason for attempt in wild.attempts if attempt.outcome.reason],
        "repeated": sum(blow.repeated for blow in found),
        "goodput": ended["goodput"],
        "lost_s": ended["lost_s"],
        "run_s": ended["run_s"],
        "goodput_undisturbed": read_end(calm.run)["goodput"],
        "difference": apart,
        "losses": losses,
        "examples": asdict(used),
        "troubled": [record for record in events if record["event"] == "troubled"],
        "not_saved": sum(record["event"] == "savefailed" for record in events),
        "left_behind": list(left),
        "whole": same and used.same and used.uneven == 0 and not left,
    }


def show(found: dict[str, Any]) -> None:
    """Prints the figures."""
    console = Console()
    table = Table("fault", "rank", "at update", "recovered after", "updates done again")
    for blow in found["faults"]:
        took = "-" if blow["recovered_s"] is None else f"{blow['recovered_s']:.1f} s"
        table.add_row(blow["kind"], str(blow["rank"]), str(blow["update"]), took, str(blow["repeated"]))
    console.print(table)
    for record in found["troubled"]:
        console.print(f"bad update {record['update']}: {record['kind']}, {record['action']}. {record['verdict']}")
    lost = sorted(found["lost_s"].items(), key=lambda item: -item[1])
    examples, apart = found["examples"], found["difference"]
    rows = {
        "starts": str(found["starts"]) + (f", and {found['worlds']} changes of processes" if found["survives"] else ""),
        "time": f"{found['disturbed_s']:.1f} s; undisturbed {found['undisturbed_s']:.1f} s",
        "goodput": f"{found['goodput']:.1%}; undisturbed {found['goodput_undisturbed']:.1%}",
        "lost to": ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in lost if seconds >= 0.05),
        "updates done again": str(found["repeated"]),
        "saves that failed": str(found["not_saved"]),
        "losses": f"differ by {found['losses']:.2g} of the largest, at most",
        "parameters": "the undisturbed run's, bit for bit" if apart == 0 else f"differ by {apart:.2g} of the largest",
        "examples": f"{examples['used']:,}, the undisturbed run's: {'yes' if examples['same'] else 'NO'}; "
        + ("each once an epoch" if not examples["uneven"] else f"{examples['uneven']} used too often"),
        "left behind": ", ".join(found["left_behind"]) or "nothing",
    }
    grid = Table.grid(padding=(0, 3, 0, 0))
    for name, value in rows.items():
        grid.add_row(f"[dim]{name}[/]", value)
    console.print(grid)
