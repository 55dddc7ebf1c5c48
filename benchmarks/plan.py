"""How fast the planner is: layouts a second with costs known, and with nothing known.

python benchmarks/plan.py > docs/results/plan.md
"""

import time

import machine

from multipod.plan import network, price
from multipod.plan.machine import find
from multipod.plan.models import MODELS
from multipod.plan.search import search

CASES = (("resnet50", 32768), ("ssd", 2048), ("transformer", 2048), ("bert", 4096))
PLACE = "tpu-v3-pod:16x16"


def forget(costs: bool) -> None:
    """As in a new process: no table of operators and no pipeline is priced, and with `costs` no schedule simulated."""
    for known in (price.work_of, price.in_stages, price.parts_of, price.schedule_of, price.deepest):
        known.cache_clear()
    if costs:
        network._cost.cache_clear()


def seconds(name: str, batch: int) -> tuple[int, float]:
    """Layouts of a search, and its processor time."""
    began = time.process_time()
    found = search(MODELS[name], find(PLACE), batch)
    return found.tried, time.process_time() - began


def main() -> None:
    """Prints the table."""
    rows = []
    for name, batch in CASES:
        forget(costs=True)
        tried, cold = seconds(name, batch)
        known, again = [], []
        for _ in range(5):
            forget(costs=False)
            known.append(seconds(name, batch)[1])
            again.append(seconds(name, batch)[1])
        middle, warm = sorted(known)[2], sorted(again)[2]
        cells = (
            f"{cold:.2f}",
            f"{1e3 * middle:.0f}",
            f"{tried / middle:,.0f}",
            f"{1e3 * warm:.0f}",
            f"{tried / warm:,.0f}",
        )
        rows.append((f"{name}, batch {batch:,}", str(tried), *cells))
    on = f"commit {machine.commit()}, {machine.headline(machine.facts())}"
    print(f"# How fast the planner is\n\n`python benchmarks/plan.py`, {on}.\n")
    print(f"All layouts of a published model on `{PLACE}`, stages of pipelines among them; CPU seconds of one core.")
    print(
        "Cold: every schedule is built and simulated, which `multipod plan` does once and keeps in a file. Costs known:"
    )
    print(
        "that file is there, all else is priced anew, as a second command does. Again: as before, in the same process."
    )
    print("Medians of five.\n")
    head = ("search", "layouts", "cold, s", "costs known, ms", "layouts a second", "again, ms", "layouts a second ")
    print(machine.table(head, rows))


if __name__ == "__main__":
    main()
