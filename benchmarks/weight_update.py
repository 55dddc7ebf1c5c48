"""Weight-update sharding between processes: ours against PyTorch's DDP, ZeRO-1 and FSDP2; Adam, a Transformer of 48 M.

    python benchmarks/weight_update.py [--ranks 2] [--rounds 5] [--layers 14] [--markdown FILE]

Every rank is a process with one thread; all cases are started once and sleep between rounds. A round runs some updates
of each, in an order that turns. Memory is the resident set of rank 0 beyond what it was before the model was built.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import machine

CASES = {
    "PyTorch, one rank's work without communication": ("torch", "local"),
    "PyTorch DDP": ("torch", "ddp"),
    "PyTorch DDP + ZeroRedundancyOptimizer": ("torch", "zero1"),
    "PyTorch FSDP2": ("torch", "fsdp2"),
    "ours, whole update": ("jax", ""),
    "ours, split update": ("jax", "update"),
    "ours, split weights": ("jax", "weights"),
}
DDP = "PyTorch DDP"
RANK = Path(__file__).with_name("weight_update_ranks.py")


class Ranks:
    """The processes of one case."""

    def __init__(self, name: str, count: int, layers: int, folder: Path) -> None:
        engine, kind = CASES[name]
        meet = f"{folder}/{abs(hash(name))}" if engine == "torch" else f"127.0.0.1:{_free_port()}"
        with Listener(family="AF_UNIX") as door:
            command = [sys.executable, str(RANK), engine, kind or "whole", str(layers), str(count), meet, door.address]
            self.processes = [subprocess.Popen([*command, str(rank)]) for rank in range(count)]
            self.doors = [door.accept() for _ in range(count)]
        counts = [one.recv() for one in self.doors]
        self.parameters = counts[0]

    def run(self, updates: int) -> dict[str, Any]:
        """Seconds from the first start to the last end, CPU seconds of all ranks, bytes of rank 0; of one update."""
        for one in self.doors:
            one.send(updates)
        answers = sorted((one.recv() for one in self.doors), key=lambda answer: answer["rank"])
        span = max(one["end"] for one in answers) - min(one["begin"] for one in answers)
        cpu = sum(one["cpu_s"] for one in answers)
        return {**answers[0], "wall_s": span / updates, "cpu_s": cpu / updates}

    def close(self) -> None:
        """Ends the processes."""
        for one in self.doors:
            one.send(0)
        for process in self.processes:
            process.wait(timeout=60)


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ratio(rounds: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float:
    """The median over the rounds of one case's value over another's."""
    return statistics.median(a[key] / b[key] for a, b in zip(rounds, others, strict=True))


def rows(taken: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    lines = []
    for name, rounds in taken.items():
        last = rounds[-1]
        lines.append(
            [
                name,
                f"{statistics.median(one['wall_s'] for one in rounds):.2f}",
                f"{ratio(rounds, taken[DDP], 'wall_s'):.2f}",
                f"{ratio(rounds, taken[DDP], 'cpu_s'):.2f}",
                f"{last['resident_mb']:.0f}",
                f"{last['peak_mb']:.0f}",
                f"{last['state_mb']:.1f}",
            ]
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a figure to quote")
    parser.add_argument("--updates", type=int, default=2, help="of each case in a round")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    options = parser.parse_args()
    began = machine.facts()
    print(machine.headline(began), flush=True)
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = {}
        for name in CASES:
            groups[name] = Ranks(name, options.ranks, options.layers, folder)
            stack.callback(groups[name].close)
            groups[name].run(1)  # compiles, warms up, makes the optimizer's state
        names = list(CASES)
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                taken[name].append(groups[name].run(options.updates))
        parameters = {name: group.parameters for name, group in groups.items()}
    head = [f"{options.ranks} ranks", "s", "x DDP", "CPU x DDP", "resident MB", "peak MB", "optimizer MB"]
    table = machine.table(head, rows(taken))
    print(f"\n{table}\n\nParameters: {parameters}\nLoad average: {machine.facts()['load']}")
    if options.markdown:
        head = f"`python {' '.join(['benchmarks/weight_update.py', *sys.argv[1:]])}`, {machine.headline(began)}, "
        options.markdown.write_text(f"{head}commit {machine.commit()}.\n\n{table}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
