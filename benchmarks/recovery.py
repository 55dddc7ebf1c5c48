"""How long a run stands still when a process dies, hangs or comes back: `python benchmarks/recovery.py > recovery.md`.

Processes train digits under `multipod launch --survive`; one is killed or stopped, again and again. The seconds
are those of `Regrouped`: from the end of the last good update to the end of the next. The restart, for comparison, is
timed from the kill until the first update after it is on disk, where it is within a second. Needs /proc; takes about
six minutes on two cores.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import machine

STILL_S = 3.0  # between two deaths, in which the next programs are compiled ahead
PATIENCE_S = 400.0
SETTINGS = ["--set", "updates=1000000", "--set", "evaluate_every=0", "--mesh", "2x4"]


class Run:
    """A run of several processes, launched; ended when the context is left."""

    def __init__(self, folder: Path, processes: int, options: list[str], changes: list[str]) -> None:
        self.metrics, self.processes = folder / "run" / "metrics.jsonl", processes
        command = [sys.executable, "-m", "multipod", "launch", "--processes", str(processes), *options]
        self.launcher = subprocess.Popen(
            [*command, "--", "train", "digits", *SETTINGS, *changes, "--quiet", "--out", "run"],
            cwd=folder, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.launcher.send_signal(signal.SIGINT)
        try:
            self.launcher.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()

    def events(self, kind: str) -> list[dict]:
        """The events of this kind that are on disk."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        return [found for line in lines if line.endswith("\n") if (found := json.loads(line))["event"] == kind]

    def goes_on(self) -> bool:
        """Whether an update was done since the last start."""
        kinds = [json.loads(line)["event"] for line in self.metrics.read_text().splitlines(keepends=True)[:-1]]
        return "updated" in kinds[max(at for at, kind in enumerate(kinds) if kind == "started") :]

    def wait(self, what: Callable[[], bool]) -> None:
        """Until `what` is true."""
        until_s = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > until_s or self.launcher.poll() is not None:
                raise SystemExit("recovery: the run did not go on")
            time.sleep(0.05)

    def rank(self, number: int) -> int:
        """The process of this rank: the oldest that has its number."""
        name = f"MULTIPOD_PROCESS_ID={number}".encode()
        return next(pid for pid, words in self.children() if name in words)

    def children(self) -> list[tuple[int, list[bytes]]]:
        """The launcher's living ranks, the oldest first, each with its environment. Its helper has rank 0's."""
        pids = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
        ranks = [
            pid
            for pid in pids
            if b"multipod.elastic.launcher.coordinator" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        words = [(int(pid), Path(f"/proc/{pid}/environ").read_bytes()) for pid in ranks]
        return [(pid, said.split(b"\0")) for pid, said in words if said]

    def stands_by(self) -> bool:
        """Whether there are as many processes beside the ranks that have made all ready and do nothing more."""

        def ticks() -> list[str]:
            waiting = [pid for pid, _ in self.children()[self.processes :]]
            return [
                " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]) for pid in waiting
            ]

        before = ticks()
        time.sleep(1.0)
        return len(before) == self.processes and ticks() == before

    def trained(self, updates: int = 3) -> None:
        """Until so many updates more are on disk, and a little longer."""
        before = len(self.events("updated"))
        self.wait(lambda: len(self.events("updated")) >= before + updates)
        time.sleep(STILL_S)


@dataclass(frozen=True)
class Case:
    """What happens, how often, to a run of so many processes."""

    name: str
    processes: int
    times: int

    def measured(self, folder: Path) -> dict[str, list[float]]:
        """Seconds without an update, by what happened."""
        if self.name in RESTARTS:
            options = RESTARTS[self.name]
            said = " ".join(["--restarts", *options])
            return {f"all start again from a checkpoint ({said})": restarted(folder, self, options)}
        what, number, changes = LOSSES[self.name]
        without, whole = survived(folder, self, number, changes)
        return {f"a process is {what}": without, f"its replacement is taken in ({self.name})": whole}


LOSSES: dict[str, tuple[str, signal.Signals, list[str]]] = {
    "killed": ("killed", signal.SIGKILL, []),
    "shares": ("killed, with shares that die with it", signal.SIGKILL, ["--set", "layout.shard_update=true"]),
    "stopped": ("stopped (silent for 2 s)", signal.SIGSTOP, []),
}
RESTARTS: dict[str, list[str]] = {"restarts": [], "standby": ["--standby"]}


def survived(folder: Path, case: Case, number: signal.Signals, changes: list[str]) -> tuple[list[float], list[float]]:
    """Seconds without a rank that was sent the signal, and seconds to take its replacement in."""
    rng = random.Random(0)
    limit = "6" if number == signal.SIGSTOP else "60"
    with Run(folder, case.processes, ["--survive", "--timeout", limit], changes) as run:
        run.trained()
        for count in range(case.times):
            os.kill(run.rank(rng.randrange(case.processes)), number)
            run.wait(lambda seen=2 * count + 2: len(run.events("regrouped")) >= seen)
            run.trained()
        told = run.events("regrouped")
    return [one["seconds"] for one in told if not one["planned"]], [one["seconds"] for one in told if one["planned"]]


def restarted(folder: Path, case: Case, options: list[str]) -> list[float]:
    """Seconds from a kill to the first update of a run that starts again from its checkpoint."""
    found = []
    again = ["--restarts", str(case.times + 1), *options]
    with Run(folder, case.processes, again, ["--set", "checkpoint_every=20"]) as run:
        for count in range(case.times):
            saved = len(run.events("saved"))
            run.wait(lambda before=saved: len(run.events("saved")) >= before + 2)
            run.trained()
            if options:
                run.wait(run.stands_by)
            begun = len(run.events("started"))
            os.kill(run.rank((count + 1) % case.processes), signal.SIGKILL)
            start = time.monotonic()
            run.wait(lambda before=begun: len(run.events("started")) > before)
            run.wait(run.goes_on)
            found.append(time.monotonic() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="deaths of each kind")
    parser.add_argument("--processes", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--cases", nargs="+", default=[*LOSSES, *RESTARTS], choices=[*LOSSES, *RESTARTS])
    asked = parser.parse_args()
    command = " ".join(["python benchmarks/recovery.py", *sys.argv[1:]])
    print(f"# Recovery\n\n`{command}`\n\n{machine.headline(machine.facts())}\n")
    print(
        "| what happens | times | least | median | most seconds without an update | load |\n|---|---|---|---|---|---|"
    )
    for name in asked.cases:  # each is printed as it is done: on a busy machine they take long
        with tempfile.TemporaryDirectory() as folder:
            measured = Case(name, asked.processes, asked.times).measured(Path(folder))
        for what, seconds in measured.items():
            cells = (what, len(seconds), *(f"{pick(seconds):.1f}" for pick in (min, statistics.median, max)))
            print("| " + " | ".join(map(str, (*cells, f"{os.getloadavg()[0]:.0f}"))) + " |", flush=True)


if __name__ == "__main__":
    main()
