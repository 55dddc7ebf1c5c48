"""Goodput against failure rate and checkpoint interval: measured, by Young and Daly's formula, and simulated."""

import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from multipod.errors import CheckpointError
from multipod.experiments.outcome import Claim, Section
from multipod.experiments.perceptron import Perceptron
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.plan.goodput import Failing, daly_s, goodput, simulated, young_s
from multipod.recipes.digits import digits
from multipod.step.program import program_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.context import LoopHooks, RunContext
from multipod.train.events import Saved, Updated
from multipod.train.loop import train

INTERVALS = (4, 16, 64)
"""Updates between two checkpoints."""
RATES_S = (2.0, 6.0)
"""Mean seconds between failures: hours of a large machine, so that a cell takes seconds here."""
WORK_S = 12.0
"""Time of a cell, without its failures."""
STEP_S = 0.02
"""An update is made this long by sleeping, so that a machine with two cores measures checkpoints and not its load."""
DRAWS = 200
"""Simulated runs beside each measured one."""

MISSION = "our own goal"


class Failure(Exception):
    """The machine fails: nothing that is not in a committed checkpoint is left."""


class _Failures:
    """Fails at a drawn time, and makes each update `slept_s` longer; notes when it began, and when it got where."""

    sticky = flips = False

    def __init__(self, after_s: float, slept_s: float = STEP_S) -> None:
        self.began_s = self.failed_s = 0.0
        self.reached: list[tuple[float, int]] = []
        self._after_s, self._slept_s = after_s, slept_s

    def of_run(self, checkpoints: Path, world: int = 0) -> "_Failures":
        """Returns itself: these faults are the same in every run and world."""
        return self

    def before(self, update: int, given: Any) -> int:
        """Fails if it is time to."""
        self.began_s = self.began_s or time.monotonic()
        time.sleep(self._slept_s)
        if time.monotonic() >= self.began_s + self._after_s:
            self.failed_s = time.monotonic()
            raise Failure
        return 0

    def after(self, update: int) -> None:
        """Notes the update."""
        self.reached.append((time.monotonic(), update))


@dataclass(frozen=True)
class Cell:
    """One run with failures.

    Attributes:
      between_s: mean time between failures.
      every: updates between checkpoints.
      failures: that there were.
      goodput: useful updates times the undisturbed update, over all time.
      step_s: an undisturbed update.
      failing: what the formulas are told: the mean time between failures, and costs measured before this run.
    """

    between_s: float
    every: int
    failures: int
    goodput: float
    step_s: float
    failing: Failing

    @property
    def formula(self) -> float:
        """By Daly's formula."""
        return goodput(self.every * self.step_s, self.failing)

    @property
    def drawn(self) -> tuple[float, float]:
        """By the simulator: the ends of the middle 90 % of runs of this length."""
        runs = sorted(simulated(self.every * self.step_s, self.failing, WORK_S, seed) for seed in range(DRAWS))
        return runs[DRAWS // 20], runs[-1 - DRAWS // 20]


def measured(report: Callable[[str], None]) -> tuple[list[Claim], Section, list[Cell]]:
    """Trains the perceptron with real checkpoints through failures that end the loop, beside what was predicted."""
    report("what a save, a commit and a restart cost, before the runs that are predicted")
    before = _costs()
    cells = []
    for between_s in RATES_S:
        for every in INTERVALS:
            report(f"a failure each {between_s:g} s, a checkpoint each {every} updates")
            cells.append(_cell(between_s, every, before))
    rows = [
        (
            f"{cell.between_s:g}", str(cell.every), str(cell.failures), f"{cell.goodput:.1%}", f"{cell.formula:.1%}",
            f"{cell.drawn[0]:.1%} to {cell.drawn[1]:.1%}",
            f"{young_s(cell.failing) / cell.step_s:.0f}, {daly_s(cell.failing) / cell.step_s:.0f}",
        )
        for cell in cells
    ]  # fmt: skip
    text = (
        f"A perceptron with updates of {1e3 * STEP_S:.0f} ms (slept), asynchronous checkpoints on this host's disk, "
        "and failures drawn in time that end the loop; the next one compiles again and restores the newest committed "
        "checkpoint, so a restart here is one without starting a process. The formula (`multipod.plan.goodput`) and "
        f"the simulator know of each run only the mean time between failures. The rest was measured before, in a run "
        f"of its own: a save holds up {1e3 * before.save_s:.1f} ms (the slower updates while it is written included), "
        f"is committed after {before.commit_s:.2f} s, and a restart takes {before.restart_s:.2f} s. A run of "
        f"{WORK_S:.0f} s has few failures, so its goodput scatters about the formula: simulated are {DRAWS} runs of "
        "its length, of which the middle 90 % are shown. `best` is the number of updates between checkpoints that "
        "Young's and Daly's formulas call best for these."
    )
    head = (
        "s between failures", "updates a checkpoint", "failures", "goodput", "formula", "simulated",
        "best: Young, Daly",
    )  # fmt: skip
    return [predicted_claim(cells)], Section("Goodput with failures", text, head, rows, "goodput"), cells


def predicted_claim(cells: Sequence[Cell]) -> Claim:
    """The claim that goodput is known before a run, from costs measured earlier."""
    outside = sum(not cell.drawn[0] <= cell.goodput <= cell.drawn[1] for cell in cells)
    return Claim(
        f"runs with failures whose goodput lies outside the middle 90 % of what was simulated before, of {len(cells)}",
        "doi:10.1016/j.future.2004.11.016", outside, "at most 1", outside <= 1,
        fails_if="saves, commits and restarts cost otherwise among failures than before, or the model leaves costs out",
    )  # fmt: skip


def _program(every: int, updates: int) -> Any:
    layout = Layout((1, 1))
    recipe = replace(
        digits(), model=Perceptron(), layout=layout, updates=updates, evaluate_every=0, checkpoint_every=every
    )
    return program_of(recipe, make_mesh(layout))


def _lives(program: Any, failures: Iterator[_Failures]) -> "list[_Life]":
    """The run through failures to its end."""
    lives: list[_Life] = []
    with tempfile.TemporaryDirectory() as folder:
        while not lives or lives[-1].faults.failed_s:
            lives.append(_Life(program, Path(folder), next(failures)))
    return lives


def _costs(every: int = 16) -> Failing:
    """What saves, commits and restarts cost, from a run that fails twice; failures are not expected in it."""
    lives = _lives(_program(every, 300), map(_Failures, chain((2.0, 2.0), repeat(math.inf))))
    steps = [event.step_s for life in lives for event in life.updated]
    saves = [s for life in lives for s in life.saves_s]
    # While a save is written, updates are slower: that belongs to what it costs. What is usual, the median knows.
    held_up_s = (sum(steps) + sum(saves) - len(steps) * statistics.median(steps)) / max(1, len(saves))
    return Failing(
        math.inf,
        max(0.0, held_up_s),
        statistics.mean(b.faults.began_s - a.faults.failed_s for a, b in pairwise(lives)),
        statistics.median([seconds for life in lives for seconds in life.commits_s] or [0.0]),
    )


def _cell(between_s: float, every: int, before: Failing) -> Cell:
    updates, rng = round(WORK_S / STEP_S), random.Random(every)
    drawn = iter(lambda: _Failures(rng.expovariate(1 / between_s)), None)
    lives = _lives(_program(every, updates), drawn)
    step_s = statistics.median([event.step_s for life in lives for event in life.updated])
    took_s = lives[-1].faults.reached[-1][0] - lives[0].faults.began_s
    share = min(1.0, updates * step_s / took_s)
    return Cell(between_s, every, len(lives) - 1, share, step_s, replace(before, between_s=between_s))


class _Life:
    """The run from its newest checkpoint to its end or to a failure, after which nothing uncommitted is left."""

    def __init__(self, program: Any, folder: Path, faults: _Failures) -> None:
        self.faults = faults
        self.updated: list[Any] = []
        self.saves_s: list[float] = []
        self.commits_s: list[float] = []
        self._begun_s: dict[int, float] = {}
        self._committed: dict[int, float] = {}
        with closing(Checkpoints(folder, 3, committed=self._commit)) as store:
            state = store.restore(program.shapes) if store.updates() else None
            with suppress(Failure):
                train(
                    program,
                    RunContext(checkpoints=store, observers=[self._hear], hooks=LoopHooks(faults=faults)),
                    state,
                )
            with suppress(CheckpointError):
                store.wait()
        if faults.failed_s:
            for update, at_s in self._committed.items():
                if at_s > faults.failed_s:
                    shutil.rmtree(folder / str(update), ignore_errors=True)

    def _hear(self, event: Any) -> None:
        if isinstance(event, Updated):
            self.updated.append(event)
        elif isinstance(event, Saved):
            self.saves_s.append(event.seconds)
            self._begun_s[event.update] = time.monotonic() - event.seconds

    def _commit(self, update: int) -> None:
        now_s = time.monotonic()
        self._committed[update] = now_s
        if update in self._begun_s:
            self.commits_s.append(now_s - self._begun_s[update])


def held_up(report: Callable[[str], None], every: int = 50, updates: int = 200) -> tuple[list[Claim], Section]:
    """By how much asynchronous saves make the updates of a run longer, with cores to spare on the host and without."""
    found = {}
    for slept_s, host in ((STEP_S, "its cores to itself"), (0.0, "all cores busy with updates")):
        report(f"{updates} updates, with a checkpoint each {every} and without, in turn: a host with {host}")
        found[host] = [_pair(slept_s, every, updates) for _ in range(3)]
    free = statistics.median(pair.longer for pair in found["its cores to itself"])
    waited = max(statistics.median(pair.waited for pair in pairs) for pairs in found.values())
    claims = saving_claims(waited, free, every)
    rows = [
        (
            host, *(f"{1e3 * statistics.median(of(pair) for pair in pairs):.1f}" for of in (_without, _with, _wait)),
            f"{statistics.median(pair.waited for pair in pairs):.1%}",
            f"{statistics.median(pair.longer for pair in pairs):+.1%}",
            ", ".join(f"{pair.longer:+.1%}" for pair in pairs),
        )
        for host, pairs in found.items()
    ]  # fmt: skip
    text = (
        "A perceptron of 1.1 million parameters with momentum, 9 MB of state, one device, a save each "
        f"{every} updates; medians of three pairs of runs of {updates} updates. A save copies the arrays from the "
        "device, which the loop waits for; writing, committing and checksums go on behind the next updates. On an "
        f"accelerator the host's cores are free for that: so are they where {1e3 * STEP_S:.0f} ms of each update are "
        "slept and the batch is small. Where the updates themselves need every core of this host, writing takes its "
        f"share of them: then a save of 9 MB each {every} updates, several a second of work, costs what the last line "
        "says."
    )
    head = ("the host has", "update, ms", "with saves, ms", "a save waits, ms", "share", "longer", "of each pair")
    return claims, Section("What saving costs", text, head, rows)


def saving_claims(waited: float, longer: float, every: int) -> list[Claim]:
    """What the share of the time that updates wait, and how much longer they are with saves, say."""
    return [
        Claim(
            f"share of the time that updates wait for asynchronous saves, one each {every}",
            MISSION, waited, "<= 0.05", waited <= 0.05,
            fails_if="a save is written while the loop waits for it",
        ),
        Claim(
            "updates take longer with these saves, on a host whose cores do not compute the updates",
            MISSION, longer, "<= 0.05", longer <= 0.05,
            fails_if="writing in the background holds updates up although there are cores for it",
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Pair:
    """A run without checkpoints and one with: the mean update of each in seconds, and what the loop waits for a save.

    Attributes:
      waited: the waits over the time of the updates.
      longer: by how much an update is longer, the waits included.
    """

    without_s: float
    with_s: float
    wait_s: float
    waited: float

    @property
    def longer(self) -> float:
        return self.with_s / self.without_s - 1


def _without(pair: _Pair) -> float:
    return pair.without_s


def _with(pair: _Pair) -> float:
    return pair.with_s


def _wait(pair: _Pair) -> float:
    return pair.wait_s


def _pair(slept_s: float, every: int, updates: int) -> _Pair:
    layout = Layout((1, 1))
    recipe = replace(digits(), model=Perceptron(hidden=(1024, 1024)), layout=layout, updates=updates, evaluate_every=0)
    recipe = replace(recipe, batch=16) if slept_s else recipe
    mean_s, held = {}, list[float]()
    for saves in (False, True):
        events: list[Any] = []
        program = program_of(replace(recipe, checkpoint_every=every if saves else 0), make_mesh(layout))
        with tempfile.TemporaryDirectory() as folder, closing(Checkpoints(Path(folder), 3)) as store:
            slow = _Failures(math.inf, slept_s)
            train(
                program,
                RunContext(
                    checkpoints=store if saves else None, observers=[events.append], hooks=LoopHooks(faults=slow)
                ),
            )
        steps = [event.step_s for event in events if isinstance(event, Updated)][1:]
        held = [event.seconds for event in events if isinstance(event, Saved)][:-1]  # the last is waited for
        mean_s[saves] = (sum(steps) + sum(held)) / len(steps)
    return _Pair(mean_s[False], mean_s[True], statistics.median(held), sum(held) / (mean_s[True] * len(steps)))


def cells_of(told: list[dict[str, Any]]) -> list[Cell]:
    """The cells again, from what `dataclasses.asdict` made of them."""
    return [Cell(**{**cell, "failing": Failing(**cell["failing"])}) for cell in told]


def figure(cells: list[Cell]) -> object:
    """Goodput over the interval between checkpoints, for each rate of failures: measured, and the formula."""

    drawing = Figure(figsize=(6, 3.6), layout="constrained")
    axes = drawing.add_subplot()
    for between_s in RATES_S:
        row = [cell for cell in cells if cell.between_s == between_s]
        (line,) = axes.plot(
            [cell.every for cell in row],
            [100 * cell.goodput for cell in row],
            "o",
            label=f"a failure each {between_s:g} s",
        )
        curve = [2**power for power in range(1, 9)]
        middle = row[len(row) // 2]
        values = [100 * goodput(every * middle.step_s, middle.failing) for every in curve]
        axes.plot(curve, values, "-", color=line.get_color(), label=f"formula, costs as at {middle.every}")
    axes.set(xscale="log", xlabel="updates between checkpoints", ylabel="goodput, %", ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return drawing
