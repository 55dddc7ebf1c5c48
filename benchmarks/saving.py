"""What a save makes the loop wait for, and what looking at every update costs: `python benchmarks/saving.py`.

    python benchmarks/saving.py [--saves 3] [--rounds 9] [--json FILE] [--states NAME ...] [--steps NAME ...]

Saves: fresh states on 8 virtual CPU devices, through what the loop calls (`RetryingSaver.save`, the check for numbers
that are not finite included), each begun when the one before is on disk. The share is that of a save a minute. Updates:
the compiled step with `bad_updates.action` `stop` and `ignore` on one batch, turn about, in seconds of
CPU, which other work on the machine changes little; the ratio is the median of those within a round.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from multipod import runtime

runtime.prepare(cpu_devices=8, cache=runtime.default_cache())  # before JAX is imported

import jax  # noqa: E402
import machine  # noqa: E402

from multipod.data.reading import InputOptions  # noqa: E402
from multipod.layout.layout import Layout  # noqa: E402
from multipod.layout.mesh import make_mesh  # noqa: E402
from multipod.layout.sync import Sync  # noqa: E402
from multipod.recipe.bad_updates import Action, BadUpdateRules  # noqa: E402
from multipod.recipe.recipe import Recipe  # noqa: E402
from multipod.recipes.digits import digits  # noqa: E402
from multipod.recipes.dlrm_criteo import dlrm_kaggle  # noqa: E402
from multipod.recipes.imagenet import resnet50  # noqa: E402
from multipod.recipes.stdlib_docs import stdlib_docs  # noqa: E402
from multipod.step.program import program_of  # noqa: E402
from multipod.train.checkpoints.checkpoint import Checkpoints  # noqa: E402
from multipod.train.checkpoints.fitness import FiniteCheck  # noqa: E402
from multipod.train.checkpoints.saving import RetryingSaver  # noqa: E402
from multipod.train.input import TrainInput  # noqa: E402

ACTIONS: tuple[Action, ...] = ("ignore", "stop")
MINUTE_S = 60.0
MESH = Layout((2, 4))
STATES: dict[str, Callable[[], Recipe]] = {"digits": digits, "dlrm-kaggle": dlrm_kaggle, "resnet50": resnet50}
CASES: dict[str, Callable[[], Recipe]] = {
    "digits, 8 devices": lambda: replace(digits(), layout=MESH),
    "digits, 8 devices, split update": lambda: replace(digits(), layout=replace(MESH, sync=Sync(sharding="zero1"))),
    "digits, one device": lambda: replace(digits(), layout=Layout((1, 1))),
    "stdlib-docs, one device": lambda: replace(stdlib_docs(), layout=Layout((1, 1)), batch=8),
}


def save_waits(name: str, recipe: Recipe, saves: int) -> dict[str, Any]:
    """Seconds that the loop waits for each of some saves of a fresh state, and that the writing behind it takes."""
    program = program_of(replace(recipe, layout=MESH), make_mesh(MESH))
    state, check = program.init(), FiniteCheck(program)
    check.compile()
    waits, writes = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = Checkpoints(Path(folder) / "checkpoints", 1)
        saving = RetryingSaver(store, lambda event: None, unfit=check)
        for update in range(1, saves + 1):
            state = jax.block_until_ready(state._replace(update=state.update + 1))
            start = time.perf_counter()
            saving.save(state, update)
            waits.append(time.perf_counter() - start)
            store.wait()
            writes.append(time.perf_counter() - start)
        store.close()
    leaves = jax.tree.leaves(state)
    return {
        "case": name,
        "arrays": len(leaves),
        "megabytes": sum(leaf.nbytes for leaf in leaves) / 1e6,
        "first_s": waits[0],
        "wait_s": statistics.median(waits[1:] or waits),
        "written_s": statistics.median(writes[1:] or writes),
        "share": statistics.median(waits[1:] or waits) / MINUTE_S,
    }


class Step:
    """A compiled update on one batch, one after the other."""

    def __init__(self, recipe: Recipe, action: Action) -> None:
        program = program_of(replace(recipe, bad_updates=BadUpdateRules(action)), make_mesh(recipe.layout))
        entry = TrainInput(program, InputOptions(), time.monotonic)
        with closing(entry.start(0)) as incoming:
            self._batch, _ = entry.next_batch(incoming)
        self._update, self._state, self._controls = program.compile_update(), program.init(), program.controls()

    def run(self, updates: int) -> float:
        """Does so many updates; returns the seconds of CPU of one."""
        start = time.process_time()
        for _ in range(updates):
            self._state, sums = self._update(self._state, self._batch, self._controls)
            jax.block_until_ready((self._state, sums))
        return (time.process_time() - start) / updates


def looking_costs(name: str, recipe: Recipe, rounds: int, updates: int) -> dict[str, Any]:
    """Seconds of CPU of an update without looking at it, and how much more one takes that is looked at."""
    steps = {action: Step(recipe, action) for action in ACTIONS}
    ratios, plain = [], []
    for number in range(rounds + 1):
        turn = ACTIONS if number % 2 else ACTIONS[::-1]
        seconds = {action: steps[action].run(updates) for action in turn}
        if number:  # the first round warms up
            plain.append(seconds["ignore"])
            ratios.append(seconds["stop"] / seconds["ignore"])
    low, high = statistics.quantiles(ratios, n=4)[::2]
    return {
        "case": name,
        "ignore_s": statistics.median(plain),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
    }


def main() -> None:
    """Measures, and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=20, help="of each case in a round")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--states", nargs="*", default=list(STATES), choices=STATES, help="saved (resnet50 needs 3 GB)")
    parser.add_argument("--steps", nargs="*", default=list(CASES), choices=CASES, help="looked at")
    options = parser.parse_args()
    saved = [save_waits(name, STATES[name](), options.saves) for name in options.states]
    print("| state | arrays | MB | first save, s | later saves, s | on disk after, s | share of a minute |")
    print("|---|---|---|---|---|---|---|")
    for row in saved:
        print(
            f"| {row['case']} | {row['arrays']} | {row['megabytes']:.1f} | {row['first_s']:.2f} | {row['wait_s']:.2f} "
            f"| {row['written_s']:.2f} | {row['share']:.2%} |"
        )
    looked = [looking_costs(name, CASES[name](), options.rounds, options.updates) for name in options.steps]
    print("\n| update | not looked at, ms of CPU | looked at / not | quartiles |")
    print("|---|---|---|---|")
    for row in looked:
        low, high = row["quartiles"]
        print(f"| {row['case']} | {1e3 * row['ignore_s']:.2f} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} |")
    if options.json:
        options.json.write_text(json.dumps({"facts": machine.facts(), "saves": saved, "updates": looked}, indent=1))


if __name__ == "__main__":
    main()
