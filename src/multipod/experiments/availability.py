"""Availability: random faults in real runs, goodput with failures, and what a hole in the mesh costs."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from multipod.errors import ChaosError
from multipod.experiments import availability_goodput, availability_holes
from multipod.experiments.outcome import Claim, Outcome, Section

FAULTS = 8
"""Unless asked otherwise: about ten minutes, most of them starts of Python."""

MISSION = "our own goal"

RUNS = {
    "digits": (
        ["digits", "--mesh", "1x2", "--set", "updates=60", "--set", "checkpoint_every=5", "--set", "evaluate_every=0"],
        "kill,corrupt,stop,cut,slow",
    ),
    "stdlib-docs": (
        [
            "stdlib-docs", "--mesh", "1x2", "--set", "updates=40", "--set", "checkpoint_every=5",
            "--set", "evaluate_every=0", "--set", "batch=16", "--set", "evaluation_batch=64",
            "--set", "trouble.action=skip", "--set", "trouble.spike=10",
        ],
        "flip,fill-disk,slow,kill",
    ),
}  # fmt: skip
"""Of each campaign: what `multipod chaos` is given, and the kinds of faults."""


def run(report: Callable[[str], None], count: int = FAULTS) -> Outcome:
    """Simulated holes, measured holes, goodput, then campaigns of `count` faults in all."""
    _, holes, simulated = availability_holes.simulated(report)
    throughput, measured = availability_holes.measured(report)
    formula, goodput, cells = availability_goodput.measured(report)
    saving, held_up = availability_goodput.held_up(report)
    campaigns = {}
    for number, (name, (command, kinds)) in enumerate(RUNS.items()):
        part = count // len(RUNS) + (number < count % len(RUNS))
        report(f"campaign: {name}, {part} random faults among {kinds}")
        campaigns[name] = _campaign(command, kinds, part, seed=number)
    return Outcome(
        "Availability",
        (*_claims(campaigns), *saving, *formula, *throughput, *holes),
        (_campaigns(campaigns), _recovery(campaigns), goodput, held_up, measured, simulated),
        {"goodput": availability_goodput.figure(cells), "recovery": _figure(campaigns)},
        {"campaigns": campaigns},
    )


def _campaign(command: list[str], kinds: str, count: int, seed: int) -> dict[str, Any]:
    """What `multipod chaos` found, in processes of its own: this one's devices are not theirs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        asked = ["--random", str(count), "--kinds", kinds, "--seed", str(seed), "--processes", "2", "--timeout", "30"]
        words = [sys.executable, "-m", "multipod", "chaos", command[0], *asked, "--json", str(file), "--", *command[1:]]
        done = subprocess.run(words, capture_output=True, text=True)
        if not file.exists():
            raise ChaosError(f"the campaign on {command[0]} gave no result:\n{done.stderr[-2000:]}\nRun it by hand.")
        return json.loads(file.read_text())


def _claims(campaigns: dict[str, Any]) -> list[Claim]:
    total = sum(len(found["faults"]) for found in campaigns.values())
    apart = max(found["difference"] for found in campaigns.values())
    uneven = sum(found["examples"]["uneven"] for found in campaigns.values())
    same = all(found["examples"]["same"] for found in campaigns.values())
    left = [one for found in campaigns.values() for one in found["left_behind"]]
    return [
        Claim(
            f"largest difference of final parameters after {total} random faults, over the largest parameter",
            MISSION, apart, "<= 1e-4", apart <= 1e-4,
        ),
        Claim(
            "examples used more than once an epoch, or in other updates than undisturbed",
            MISSION, uneven if same else "other updates", "0", uneven == 0 and same,
        ),
        Claim("processes and shared memory left behind", MISSION, len(left), "0", not left),
    ]  # fmt: skip


def _campaigns(campaigns: dict[str, Any]) -> Section:
    rows = []
    for name, found in campaigns.items():
        lost = sorted(found["lost_s"].items(), key=lambda item: -item[1])[:4]
        rows.append(
            (
                name, str(len(found["faults"])), str(found["starts"]), str(found["repeated"]), str(found["not_saved"]),
                f"{found['difference']:.2g}", f"{found['undisturbed_s']:.0f}", f"{found['disturbed_s']:.0f}",
                f"{found['goodput']:.1%}", ", ".join(f"{cause} {seconds:.0f} s" for cause, seconds in lost),
            )
        )  # fmt: skip
    text = (
        "`multipod chaos` with random faults (seeded; kinds below) in two processes, each run again from its newest "
        "good checkpoint whenever it ends early, against the same run undisturbed. Every process writes down the "
        "examples of each update; `difference` is of the final parameters. These runs are seconds of training and "
        "minutes of starting Python: their goodput says what a restart costs on this host, nothing of long runs."
    )
    head = (
        "run", "faults", "starts", "updates done again", "saves failed", "difference", "undisturbed, s", "disturbed, s",
        "goodput", "most lost to",
    )  # fmt: skip
    return Section("Campaigns", text, head, rows)


def _by_kind(campaigns: dict[str, Any]) -> dict[str, list[float]]:
    kinds: dict[str, list[float]] = {}
    for found in campaigns.values():
        for blow in found["faults"]:
            if blow["recovered_s"] is not None:
                kinds.setdefault(blow["kind"], []).append(blow["recovered_s"])
    return kinds


def _recovery(campaigns: dict[str, Any]) -> Section:
    rows = [
        (kind, str(len(times)), *(f"{value:.1f}" for value in (min(times), median(times), max(times))))
        for kind, times in sorted(_by_kind(campaigns).items())
    ]
    text = "From the fault until the run was further than ever before: ending the others, starting anew, repeating."
    return Section("Time to recover", text, ("fault", "times", "least, s", "median, s", "most, s"), rows, "recovery")


def _figure(campaigns: dict[str, Any]) -> object:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    kinds = sorted(_by_kind(campaigns).items())
    for place, (_, times) in enumerate(kinds):
        axes.plot(times, [place] * len(times), "o", alpha=0.6)
    axes.set(yticks=range(len(kinds)), yticklabels=[kind for kind, _ in kinds], xlabel="time to recover, s")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3, axis="x")
    return figure
