"""Summing on a mesh with a hole: build a schedule, prove it, price it, run it, and mend it when another chip dies.

python examples/around_a_hole.py
"""

import numpy as np

from multipod.collectives import build, repair, strength, verify
from multipod.execute.engines.numpy import run
from multipod.simulate import simulate
from multipod.topology.topology import Topology

NBYTES = 100_000_000


def main() -> None:
    """Says what it finds."""
    mesh = Topology((8, 8), failed_chips=[(2, 2), (2, 3), (3, 2), (3, 3)])
    bound = strength(mesh)
    print(f"{mesh}: strength {bound.value}, so {float(bound.seconds(NBYTES)) * 1e3:.2f} ms at least for 100 MB")
    for algorithm in ("detour-ring", "tree-packing"):
        schedule = build(algorithm, mesh)
        verify(schedule)  # raises ScheduleError if any contribution were missing, or counted twice
        seconds = simulate(schedule, mesh, NBYTES).seconds
        print(f"{algorithm}: {len(schedule.steps):,} steps, {float(seconds) * 1e3:.2f} ms, {schedule.pieces:,} pieces")

    rng = np.random.default_rng(0)
    vectors = {chip: rng.integers(0, 1000, 10_000) for chip in mesh.chips}
    sums = run(schedule, vectors)
    assert all((sums[chip] == sum(vectors.values())).all() for chip in mesh.chips)

    smaller = mesh.without([(6, 6)])
    mended = repair(schedule, smaller)
    verify(mended)
    seconds = simulate(mended, smaller, NBYTES).seconds
    print(f"without chip (6, 6) too, mended: {float(seconds) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
