"""Training's throughput with evaluations every N updates: none, at once, and beside training, interleaved in one run.

    python benchmarks/evaluation.py [--every 20] [--rounds 5] [--json FILE]

The digits' network on 8 virtual devices. Reading a test batch takes `--read-ms` besides, as decoding images would:
that is what an evaluation at once lets the devices wait for. Rates count all time from the first update to the end of
the last evaluation.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multipod import runtime

runtime.prepare(8, cache=runtime.default_cache())  # one way's program is the next one's

import machine  # noqa: E402
import numpy as np  # noqa: E402

from multipod.data.digits import Digits  # noqa: E402
from multipod.data.source import HostBatch, Source  # noqa: E402
from multipod.layout.mesh import make_mesh  # noqa: E402
from multipod.recipes.digits import digits  # noqa: E402
from multipod.step.program import Program, program_of  # noqa: E402
from multipod.train.context import RunContext  # noqa: E402
from multipod.train.events import Evaluated, Updated  # noqa: E402
from multipod.train.loop import train  # noqa: E402

UPDATES = 120
WAYS = ("none", "at once", "beside")


@dataclass(frozen=True)
class Slow:
    """A test set that takes time to read without using a core, as a disk or a network does."""

    source: Source
    read_s: float

    def __len__(self) -> int:
        return len(self.source)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers, late."""
        if len(numbers) > 1:  # not the example that tells the shapes
            time.sleep(self.read_s)
        return self.source.read(numbers)


@dataclass(frozen=True)
class Data:
    """The digits with a test set that is slow to read."""

    read_s: float

    def train(self) -> Source:
        """The examples to learn from."""
        return Digits().train()

    def test(self) -> Any:
        """The examples to be judged by."""
        return Slow(Digits().test(), self.read_s)


def rate(program: Program, way: str) -> tuple[float, list[float]]:
    """Examples a second from the first update to the end of the last evaluation, and the evaluations' losses."""
    times: list[float] = []
    losses: list[float] = []

    def watch(event: Any) -> None:
        if isinstance(event, Updated | Evaluated):
            times.append(time.perf_counter())
        if isinstance(event, Evaluated):
            losses.append(event.values["loss"])

    every = 0 if way == "none" else program.recipe.evaluate_every
    program = program_of(replace(program.recipe, evaluate_every=every), program.mesh)
    train(program, RunContext(observers=[watch], evaluate_beside=way == "beside"))
    # All three end with one evaluation that is waited for.
    return (UPDATES - 1) * program.recipe.batch / (times[-1] - times[0]), losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--read-ms", type=float, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    began = machine.facts()
    print(machine.headline(began), flush=True)
    recipe = replace(digits(), data=Data(options.read_ms / 1000), updates=UPDATES, checkpoint_every=0)
    recipe = replace(recipe, evaluate_every=options.every, evaluation_batch=40)
    program = program_of(recipe, make_mesh(recipe.layout))
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds + 1):
        told = {}
        for way in WAYS:
            found, told[way] = rate(program, way)
            if turn:
                rates[way].append(found)
        assert told["beside"] == told["at once"], "the evaluations differ"
    rows = []
    for way, several in rates.items():
        shares = [a / b for a, b in zip(several, rates["none"], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        rows.append([way, f"{statistics.median(several):,.0f}", f"{100 * middle:.1f} %", f"{low:.3f} to {high:.3f}"])
    head = [f"evaluation, every {options.every} updates", "examples/s", "of none", "quartiles"]
    print(f"\n{machine.table(head, rows)}\nLoad average at the end: {machine.facts()['load']}")
    if options.json:
        options.json.write_text(json.dumps({"machine": began, "rates": rates}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
