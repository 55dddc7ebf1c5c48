"""A training step of a toy Transformer in a pipeline of processes: ours, torch.distributed.pipelining, one process.

bound = serial micro-batched / stages * (M + P - 1) / M: a pipeline with free messages. Every engine against its own.
"""

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
LIMIT_S = 600
"""The longest that anything is waited for: compiling takes 15 s of each core, more where others use it too."""


class Group:
    """The processes of one case, asleep between rounds."""

    def __init__(self, engine: str, kind: str, stages: int, shape: list[int]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = 1 if kind.startswith("serial") else stages
        self.name, began = f"{engine}/{kind}", time.monotonic()
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        script = str(HERE / "pipeline_ranks.py")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, script, engine, kind, str(rank), str(ranks), str(port), *map(str, shape)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.hear("made")
        self.tell("begin")
        self.hear("ready")
        print(f"{self.name} is ready after {time.monotonic() - began:.0f} s", file=sys.stderr)

    def line(self, rank: subprocess.Popen[str]) -> str:
        """The next line of a process, which must come in time."""
        assert rank.stdout is not None
        ready, _, _ = select.select([rank.stdout], [], [], LIMIT_S)
        found = rank.stdout.readline().strip() if ready else ""
        if not found:
            self.close()
            self.said.seek(0)
            raise RuntimeError(f"{self.name}: {'a process ended' if ready else 'silence'}: {self.said.read()[-2000:]}")
        return found

    def hear(self, words: str) -> None:
        """Waits for this line of every process."""
        for rank in self.ranks:
            assert self.line(rank) == words

    def tell(self, words: str) -> None:
        """A line to every process."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{words}\n")
            rank.stdin.flush()

    def steps(self, count: int) -> dict[str, Any]:
        """Runs `count` steps: wall seconds of one, CPU seconds over all processes, peak memory, loss."""
        self.tell(f"go {count}")
        found = [json.loads(self.line(rank)) for rank in self.ranks]
        wall = (max(f["end"] for f in found) - min(f["start"] for f in found)) / count
        losses = [f["loss"] for f in found if f["loss"] is not None]
        return {
            "wall_s": wall, "cpu_s": sum(f["cpu"] for f in found), "loss": losses[-1],
            "system": sum(f["system"] for f in found) / sum(f["cpu"] for f in found),
            "peak_mb": [round(f["peak_mb"]) for f in found], "process_mb": [round(f["process_mb"]) for f in found],
        }  # fmt: skip

    def close(self) -> None:
        """Ends the processes."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--stages", type=int, default=2)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--features", type=int, default=192)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--length", type=int, default=64)
    arguments.add_argument("--micro-batches", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--cases", nargs="+", default=[
        "ours/serial_mb", "ours/gpipe", "ours/1f1b", "ours/eager-1f1b", "ours/pipemare",
        "torch/serial_mb", "torch/gpipe", "torch/1f1b",
    ])  # fmt: skip
    arguments.add_argument("--markdown", type=Path)
    a = arguments.parse_args()
    facts = machine.facts()
    shape = [a.layers, a.features, a.batch, a.length, a.micro_batches]
    groups = {case: Group(*case.split("/"), a.stages, shape) for case in a.cases}
    rounds: dict[str, list[dict[str, Any]]] = {case: [] for case in groups}
    try:
        for n in range(a.rounds):
            print(f"round {n + 1} of {a.rounds}", file=sys.stderr)
            order = list(groups)
            for case in order[n % len(order) :] + order[: n % len(order)]:
                rounds[case].append(groups[case].steps(a.steps))
    finally:
        for group in groups.values():
            group.close()
    text = report(a, facts, rounds)
    print(text)
    if a.markdown:
        a.markdown.write_text(text + "\n", encoding="utf-8")


def report(a: argparse.Namespace, facts: dict[str, Any], rounds: dict[str, list[dict[str, Any]]]) -> str:
    """The page: medians, and ratios taken within a round."""
    fill = (a.micro_batches + a.stages - 1) / a.micro_batches
    rows = []
    for case, found in rounds.items():
        engine, kind = case.split("/")
        serial = rounds.get(f"{engine}/serial_mb", [])
        each = zip(found, serial, strict=False)
        bubble = 1 if kind in ("pipemare", "pipedream") else fill
        ratios = [(s["wall_s"] / a.stages * bubble / f["wall_s"], f["cpu_s"] / s["cpu_s"]) for f, s in each]
        bound, cpu = (
            (f"{statistics.median(column):.2f}" for column in zip(*ratios, strict=True)) if ratios else ("", "")
        )
        wall, spent = (statistics.median(f[name] for f in found) for name in ("wall_s", "cpu_s"))
        alone = kind.startswith("serial")
        rows.append([
            case, f"{1e3 * wall:.1f}", f"{1e3 * spent:.1f}", cpu, "" if alone else bound,
            f"{statistics.median(f['system'] for f in found):.0%}", " ".join(map(str, found[-1]["peak_mb"])),
            " ".join(map(str, found[-1]["process_mb"])), f"{found[-1]['loss']:.6f}",
        ])  # fmt: skip
    head = [
        "case",
        "step ms",
        "CPU ms",
        "CPU / serial",
        "of the bound",
        "in the kernel",
        "peak MB",
        "process MB",
        "loss",
    ]
    return "\n\n".join([
        f"# A pipeline of {a.stages} processes",
        f"{a.layers} layers of {a.features} features, batch {a.batch} x {a.length}, {a.micro_batches} micro-batches, "
        f"one core a process, {a.rounds} rounds of {a.steps} steps. {machine.headline(facts)}, "
        f"commit {machine.commit()}.",
        machine.table(head, rows),
        "`of the bound`: serial / stages * (M + P - 1) / M, for pipemare without the last factor, over the step's "
        "time. `in the kernel`: share of the processor time (page faults, messages). `peak MB`: most that was resident "
        "in the steps, what compiling left behind given back before; `process MB`: ever, compiling included. The "
        "weights of ours and of torch's are drawn differently, so their losses differ.",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
