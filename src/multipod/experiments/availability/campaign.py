"""The campaign of random faults: series of runs, cut in pieces of a few minutes that are kept as they are done.

A piece is one `multipod chaos` with `PER_PIECE` faults, in processes of its own. Pieces are numbered, and what happens
in piece k is a function of k alone: a campaign of more faults has those of a smaller one, and one that was broken off
goes on with the pieces that are not there yet.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from matplotlib.figure import Figure

from multipod.errors import ChaosError
from multipod.experiments.outcome import Claim, Section

PER_PIECE = 10
MISSION = "our own goal"
LOST = "lost-runs.txt"
"""A line for each run that gave no result. Doing it again does not take the line away."""

QUIET = ("--set", "evaluate_every=0")
SMALLER = (
    "--set",
    "batch=16",
    "--set",
    "evaluation_batch=64",
    "--set",
    "model.features=64",
    "--set",
    "model.hidden=128",
)
WATCHED = ("--set", "bad_updates.action=skip", "--set", "bad_updates.spike=10")

Found = dict[str, Any]
"""What `multipod chaos --json` wrote of a piece."""


@dataclass(frozen=True)
class Series:
    """Runs of one kind: a recipe, what may go wrong, and what is done about it.

    Attributes:
      name: of the recipe.
      options: of `multipod train`.
      kinds: of faults.
      processes: of the run.
      survives: the others go on without a process that dies; else all start again from a checkpoint.
    """

    name: str
    options: tuple[str, ...]
    kinds: str
    processes: int
    survives: bool

    @property
    def title(self) -> str:
        """What the tables call the series."""
        return f"{self.name}, {'survive' if self.survives else 'restart'}"


DIGITS = ("--set", "checkpoint_every=25", *QUIET)
THIRDS = ("--set", "batch=120", *DIGITS)
DOCS = ("--set", "checkpoint_every=10", *QUIET, *SMALLER, *WATCHED)
SERIES = (
    Series("digits", ("--mesh", "1x3", "--set", "updates=1000", *THIRDS), "kill,stop,cut,slow,fill-disk", 3, True),
    Series("digits", ("--mesh", "1x2", "--set", "updates=400", *DIGITS), "kill,corrupt,stop,cut,slow", 2, False),
    Series("stdlib-docs", ("--mesh", "1x2", "--set", "updates=300", *DOCS), "kill,flip,stop,slow", 2, True),
    Series("stdlib-docs", ("--mesh", "1x2", "--set", "updates=120", *DOCS), "flip,fill-disk,slow,kill", 2, False),
)
"""A flipped bit needs a recipe that looks for trouble; the digits' loss comes so close to 0 that all is a spike."""


def carry_out(report: Callable[[str], None], count: int, folder: Path) -> dict[int, Found]:
    """The pieces with `count` faults in all, by number; those that lie in `folder` are not done again."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for number, faults in enumerate(cut(count)):
        series = SERIES[number % len(SERIES)]
        file = folder / f"piece-{number:03d}-{faults}.json"
        if not file.exists():
            report(f"piece {number}: {series.title}, {faults} random faults among {series.kinds}")
            try:
                _run(series, faults, number, folder, file)
            except ChaosError as error:
                report(str(error))
                with (folder / LOST).open("a") as lost:
                    lost.write(f"{file.stem}: {str(error).splitlines()[0]}\n")
                continue  # counted by `claims`, also once it has been tried again
        found[number] = json.loads(file.read_text())
    return found


def lost_runs(folder: Path) -> int:
    """How many runs of the campaign in `folder` gave no result, those among them that were done again later."""
    lost = folder / LOST
    return len(lost.read_text().splitlines()) if lost.exists() else 0


def cut(count: int) -> list[int]:
    """Faults of each piece."""
    return [min(PER_PIECE, count - done) for done in range(0, count, PER_PIECE)]


def _run(series: Series, faults: int, seed: int, folder: Path, file: Path) -> None:
    calm = folder / f"undisturbed-{series.title.replace(', ', '-')}"
    words = [
        sys.executable, "-m", "multipod", "chaos", series.name, "--random", str(faults), "--kinds", series.kinds,
        "--seed", str(seed), "--processes", str(series.processes), "--timeout", "30", "--undisturbed", str(calm),
        *(["--survive"] if series.survives else []), "--json", f"{file}.part", "--", *series.options,
    ]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            process.terminate()  # it ends its run and removes what it made; it may have had the Ctrl-C, too
            process.communicate()
            raise
    part = Path(f"{file}.part")
    if not part.exists():
        raise ChaosError(f"piece {seed} ({series.title}) gave no result:\n{said[-2000:]}\nRun it by hand.")
    part.rename(file)  # whole or not there: the next run takes it as it is


def claims(found: dict[int, Found], count: int, lost: int = 0) -> list[Claim]:
    """What the pieces of a campaign of `count` faults say of our goals, when `lost` runs gave no result."""
    pieces = list(found.values())
    faults = [blow for piece in pieces for blow in piece["faults"]]
    apart = {survives: [p["difference"] for p in pieces if p["survives"] == survives] for survives in (False, True)}
    uneven = sum(piece["examples"]["uneven"] for piece in pieces)
    same = all(piece["examples"]["same"] for piece in pieces)
    left = [one for piece in pieces for one in piece["left_behind"]]
    never = [blow for blow in faults if blow["recovered_s"] is None]
    made = [
        Claim(
            f"largest difference of final parameters, over the largest parameter, {after}",
            MISSION, max(apart[survives]), "<= 1e-4", max(apart[survives]) <= 1e-4,
            fails_if="what is restored, or who goes on, is not where the run was: other numbers are learnt",
        )
        for survives, after in ((False, "when all start again"), (True, "when the others go on"))
        if apart[survives]
    ]  # fmt: skip
    told = [piece["losses"] for piece in pieces if "losses" in piece]  # campaigns begun before have not all of them
    if told:
        curve = f"largest difference of the losses of an update, over the largest, in {len(told)} of {len(pieces)} runs"
        other = "an update after a fault is not the one of the undisturbed run"
        made.append(Claim(curve, MISSION, max(told), "<= 1e-4", max(told) <= 1e-4, fails_if=other))
    missing = len(cut(count)) - len(found)
    return [
        *made,
        Claim("runs that did not reach their end, those counted that were done again", MISSION, missing + lost, "0",
              missing + lost == 0, fails_if="a run stands still or ends early, also where the next try gets through"),
        Claim(
            f"examples used more than once an epoch, or in other updates than undisturbed, in {len(faults)} faults",
            MISSION, uneven if same else "other updates", "0", uneven == 0 and same,
            fails_if="an example is skipped or given twice when processes come and go",
        ),
        Claim("processes, ports and shared memory left behind", MISSION, len(left), "0", not left,
              fails_if="something of a run outlives it"),
        Claim("faults that a run did not get over, in runs that reached their end", MISSION, len(never), "0", not never,
              fails_if="a run ends without having come further than where the fault struck"),
    ]  # fmt: skip


def runs(found: dict[int, Found]) -> Section:
    """A line for each series."""
    rows = []
    for place, series in enumerate(SERIES):
        pieces = [piece for number, piece in found.items() if number % len(SERIES) == place]
        if not pieces:
            continue
        lost: dict[str, float] = {}
        for piece in pieces:
            for cause, seconds in piece["lost_s"].items():
                lost[cause] = lost.get(cause, 0.0) + seconds
        most = sorted(lost.items(), key=lambda item: -item[1])[:3]
        run_s = sum(piece["run_s"] for piece in pieces)
        rows.append(
            (
                series.title, str(series.processes), str(len(pieces)), str(sum(len(p["faults"]) for p in pieces)),
                str(sum(p["starts"] - 1 for p in pieces)), str(sum(p["worlds"] for p in pieces)),
                str(sum(p["repeated"] for p in pieces)), str(sum(p["not_saved"] for p in pieces)),
                f"{max(p['difference'] for p in pieces):.2g}", f"{pieces[0]['undisturbed_s']:.0f}",
                f"{sum(p['disturbed_s'] for p in pieces) / len(pieces):.0f}",
                f"{sum(p['goodput'] * p['run_s'] for p in pieces) / run_s:.1%}",
                ", ".join(f"{cause} {seconds / run_s:.0%}" for cause, seconds in most),
            )
        )  # fmt: skip
    text = (
        "`multipod chaos` with random faults (seeded), ten a run, against the same run undisturbed. `restart`: the run "
        "is started again from its newest good checkpoint whenever it ends early; `survive`: the others go on, and a "
        "new process takes the place of the dead. Every process writes down which examples it gives to each update. "
        "`difference` is of the final parameters, over the largest of a tensor; with fewer processes sums are rounded "
        "otherwise, and Adam makes much of that in a language model: two undisturbed runs of it, in one process and in "
        "two, end 0.03 apart, while their losses differ by 2.4e-5 at most over 300 updates. "
        "These are minutes of training with a fault each few seconds, in as many processes as the host has cores, or "
        "more: the goodput says what faults cost here, nothing of long runs. The language model has a quarter of its "
        "usual batch and half its width."
    )
    head = (
        "series", "processes", "runs", "faults", "restarts", "changes of processes", "updates done again",
        "saves failed", "difference", "undisturbed, s", "disturbed, s", "goodput", "most lost to",
    )  # fmt: skip
    return Section("Campaign", text, head, rows)


def times(found: dict[int, Found]) -> dict[str, list[float]]:
    """Seconds to recover, by what happened and what was done about it."""
    kinds: dict[str, list[float]] = {}
    for piece in found.values():
        for blow in piece["faults"]:
            if blow["recovered_s"] is not None:
                kinds.setdefault(f"{blow['kind']}, {_way(piece)}", []).append(blow["recovered_s"])
    return dict(sorted(kinds.items()))


def _way(piece: Found) -> str:
    return "survive" if piece["survives"] else "restart"


def recovery(found: dict[int, Found]) -> Section:
    """The times as a distribution."""
    rows = [
        (kind, str(len(all_s)), *(f"{value:.1f}" for value in spread(all_s))) for kind, all_s in times(found).items()
    ]
    text = (
        "Seconds from the fault until the run was further than ever before. Under `restart` a fault may strike while "
        "the run is still behind what an earlier one cost: it is over when that is."
    )
    head = ("fault", "times", "least, s", "quarter, s", "median, s", "three quarters, s", "90 %, s", "most, s")
    return Section("Time to recover", text, head, rows, "recovery")


def spread(all_s: Sequence[float]) -> tuple[float, ...]:
    """Least, quarter, median, three quarters, nine tenths, most."""
    if len(all_s) == 1:
        return (all_s[0],) * 6
    parts = quantiles(all_s, n=20, method="inclusive")
    return min(all_s), parts[4], parts[9], parts[14], parts[17], max(all_s)


def figure(found: dict[int, Found]) -> object:
    """How many of the faults were over after so many seconds."""

    drawing = Figure(figsize=(6, 3.4), layout="constrained")
    axes = drawing.add_subplot()
    for way, line in (("survive", "-"), ("restart", "--")):
        for kind in ("kill", "stop", "cut"):
            all_s = sorted(times(found).get(f"{kind}, {way}", []))
            shares = [(place + 1) / len(all_s) for place in range(len(all_s))]
            if all_s:
                axes.step([0, *all_s], [0, *shares], line, where="post", label=f"{kind}, {way}")
    axes.set(xlabel="time to recover, s", ylabel="share of faults", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return drawing
