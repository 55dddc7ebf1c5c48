"""MLPerf's recipes compiled for one chip of TPU v3 and for the multipod, neither of which is here.

    python benchmarks/mlperf_compiled.py [NAME ...] [--machine chip|multipod] [--limit SECONDS]

Each row is `multipod show RECIPE --compile-for TOPOLOGY --json`: the recipe's whole update by TPU's own compiler.
Nothing is run or allocated. Figures are of one device (v3's chips have two) and one update; FLOPs count loops through.
A row is minutes of one core, and gigabytes of memory.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import machine


@dataclass(frozen=True)
class Case:
    """A recipe, its batch and layout on a machine."""

    recipe: str
    machine: str
    batch: int
    layout: str
    changes: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """What compiles it."""
        changes = [f"--set={change}" for change in (f"batch={self.batch}", *self.changes)]
        where = ["--layout", self.layout, "--compile-for", TOPOLOGY[self.machine], "--json"]
        return [sys.executable, "-m", "multipod", "show", self.recipe, *changes, *where]


TOPOLOGY = {"chip": "v3:1x1", "multipod": "v3:128x32"}

CASES = [
    Case("resnet50", "chip", 256, "data=1x2"),
    Case("ssd", "chip", 64, "data=1x2"),
    Case("mask-rcnn", "chip", 4, "data=1x2"),
    Case("bert-large", "chip", 16, "data=1x2"),
    Case("transformer-big", "chip", 32, "data=1x2"),
    Case("gnmt", "chip", 256, "data=1x2"),
    Case("dlrm-mlperf", "chip", 4096, "data=1x2"),
    Case("resnet50", "multipod", 65536, "data=64x128,update"),
    Case("ssd", "multipod", 4096, "data=32x32,spatial=8"),
    Case("mask-rcnn", "multipod", 256, "data=16x16,spatial=16x2"),
    Case("bert-large", "multipod", 8192, "data=64x128,update"),
    Case("transformer-big", "multipod", 2048, "data=32x64,model=4,update"),
    Case("gnmt", "multipod", 8192, "data=64x128,update"),
    Case("dlrm-mlperf", "multipod", 65536, "data=64x128"),
]
"""The multipod's batches are the paper's (arXiv:2011.03641); GNMT's is the recipe's."""


def row_of(case: Case, limit: float) -> list[str]:
    """The cells of a case, or why it has none."""
    named = [case.recipe, TOPOLOGY[case.machine], f"{case.batch:,}", f"`{case.layout}`"]
    start = time.perf_counter()
    try:
        run = subprocess.run(case.command(), capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [*named, f"not compiled in {limit:.0f} s", *[""] * 5]
    seconds = time.perf_counter() - start
    if run.returncode:
        reason = next((line for line in run.stderr.splitlines() if line.startswith("multipod:")), run.stderr[-200:])
        return [*named, reason.removeprefix("multipod: ").replace("|", "/"), *[""] * 5]
    compiled = json.loads(run.stdout)["compiled"]
    return [
        *named,
        f"{compiled['flops'] / 1e9:,.1f}",
        f"{compiled['bytes'] / 1e9:,.2f}",
        f"{compiled['memory']['arguments'] / 1e6:,.0f}",
        f"{compiled['peak_bytes'] / 1e6:,.0f}",
        messages_of(compiled["messages"]),
        f"{seconds:.0f}",
    ]


def messages_of(messages: list[dict[str, Any]]) -> str:
    """How many there are of each kind, and their bytes."""
    times: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for message in messages:
        times[message["kind"]] += message["times"]
        nbytes[message["kind"]] += message["nbytes"]
    return "; ".join(f"{times[kind]:,} {kind} {nbytes[kind] / 1e6:,.1f} MB" for kind in sorted(times)) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="recipes; all if none is named")
    parser.add_argument("--machine", choices=list(TOPOLOGY), help="one of the two alone")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a row may take")
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    rows = []
    for case in CASES:
        if (options.names and case.recipe not in options.names) or options.machine not in (None, case.machine):
            continue
        rows.append(row_of(case, options.limit))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["recipe", "machine", "batch", "layout", "GFLOP", "read and written, GB", "arguments, MB", "peak, MB"]
    print(machine.table([*head, "messages", "s"], rows))


if __name__ == "__main__":
    main()
