"""How fast the planner is: layouts a second with costs known, and with nothing known.

python benchmarks/plan.py > docs/results/plan.md
"""

import time

import machine

from multipod.plan import network
from multipod.plan.machine import find
from multipod.plan.models import MODELS
from multipod.plan.price import work_of
from multipod.plan.search import search

CASES = (("resnet50", 32768), ("ssd", 2048), ("transformer", 2048), ("bert", 4096))
PLACE = "tpu-v3-pod:16x16"


def forget() -> None:
    """As in a new process: no cost of a schedule and no table of operators is known."""
    network._cost.cache_clear()
    work_of.cache_clear()


def main() -> None:
    """Prints the table."""
    rows = []
    for name, batch in CASES:
        forget()
        began = time.process_time()
        found = search(MODELS[name], find(PLACE), batch)
        cold = time.process_time() - began
        times = []
        for _ in range(5):
            began = time.process_time()
            search(MODELS[name], find(PLACE), batch)
            times.append(time.process_time() - began)
        warm = sorted(times)[2]
        cells = (f"{cold:.2f}", f"{1e3 * warm:.1f}", f"{found.tried / warm:,.0f}")
        rows.append((f"{name}, batch {batch:,}", str(found.tried), *cells))
    on = f"commit {machine.commit()}, {machine.headline(machine.facts())}"
    print(f"# How fast the planner is\n\n`python benchmarks/plan.py`, {on}.\n")
    print(f"All layouts of a published model on `{PLACE}`, CPU seconds of one core. Cold: every schedule is built and")
    print("simulated, which `multipod plan` does once and keeps. Warm: the median of five searches.\n")
    print(machine.table(("search", "layouts", "cold, s", "warm, ms", "layouts a second, warm"), rows))


if __name__ == "__main__":
    main()
