"""How fast the planner is: layouts a second with nothing known, with schedules and traces known, and again.

python benchmarks/plan.py > docs/results/plan.md
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import machine

from multipod.plan import network, price
from multipod.plan.machine import find
from multipod.plan.search import Found, remember_costs, search
from multipod.plan.tables import models
from multipod.plan.traced import program, remembered, splits
from multipod.recipes.find import load

POD, MULTIPOD = "tpu-v3-pod:16x16", "tpu-v3-multipod"
TABLES = (
    ("resnet50", POD, 32768), ("ssd", POD, 2048), ("transformer", POD, 2048), ("bert", POD, 4096),
    ("bert", MULTIPOD, 8192),
)  # fmt: skip
RECIPES = (("digits", "tpu-v3-pod:4x4", 4096), ("mlp-small", "tpu-v3-pod:4x4", 4096))


def forget() -> None:
    """Forgets what is shared between candidates, so that it is found anew as in a new process. Files stay."""
    for room in (models, network, price, program, remembered, splits):
        for value in vars(room).values():
            if hasattr(value, "cache_clear") and value is not remembered._code:
                value.cache_clear()


def of_table(name: str, place: str, batch: int) -> Found:
    """All layouts of a published model."""
    return search(models.MODELS[name], find(place), batch)


def of_recipe(name: str, place: str, batch: int) -> Found:
    """All layouts of a recipe, from loading it."""
    return search(program.workload_of(load(name)), find(place), batch)


def took(run: Callable[[], Found]) -> tuple[int, float]:
    """Layouts of a search, and its processor time in seconds."""
    began = time.process_time()
    found = run()
    return found.tried, time.process_time() - began


def measured(run: Callable[[], Found], folder: Path) -> tuple[str, ...]:
    """Layouts, seconds and layouts a second: cold; as a second command; again in one process."""
    remember_costs(folder)
    remembered.remember_traces(folder)
    forget()
    tried, cold = took(run)
    known, again = [], []
    for _ in range(5):
        forget()
        remember_costs(folder)
        known.append(took(run)[1])
        again.append(took(run)[1])
    cells = [str(tried)]
    for seconds in (cold, sorted(known)[2], sorted(again)[2]):
        cells += [f"{1e3 * seconds:,.0f}", f"{tried / seconds:,.0f}"]
    return tuple(cells)


HEAD = ("search", "layouts", "cold, ms", "a second", "second command, ms", "a second ", "again, ms", "a second  ")


def main() -> None:
    """Prints the page."""
    rows = []
    for of, cases in ((of_table, TABLES), (of_recipe, RECIPES)):
        for name, place, batch in cases:
            with tempfile.TemporaryDirectory() as folder:
                cells = measured(partial(of, name, place, batch), Path(folder))
            rows.append((f"{'recipe ' if of is of_recipe else ''}{name}, {batch:,}, {place}", *cells))
    on = f"commit {machine.commit()}, {machine.headline(machine.facts())}"
    print(f"# How fast the planner is\n\n`python benchmarks/plan.py`, {on}.\n")
    print(machine.table(HEAD, rows))
    print(ABOUT)


ABOUT = """
All layouts that `multipod plan` tries, stages of pipelines among them; CPU milliseconds of one core, imports left out.

- **Cold**: nothing is known. Every schedule is built and simulated on the machine's links, a recipe's step is traced.
  That happens once for a machine, and once for a recipe: `multipod plan` keeps both in files.
- **Second command**: those files are there, all else is priced anew: medians of five.
- **Again**: as before, in the same process.

What candidates share is found once: the work of a layer, whatever part it lies in; a part, however many stages have
such; the order of a pipeline's passes, whatever they cost; a schedule's cost, whatever it sums.

The goal is thousands a second. Where schedules and traces are known it is met, but for small recipes in a new process,
which take longer to read their files than to price a few layouts; cold it is missed: a cold search
simulates each schedule message by message (of the 4 s on 256 chips one packing of trees takes 2.7), and what is known
to be slow on thousands of chips is not tried there, which `left out` says."""


if __name__ == "__main__":
    main()
