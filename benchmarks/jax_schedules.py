"""All-reduce between the devices of one process: every algorithm through `ppermute`, against XLA's `psum`.

    python benchmarks/jax_schedules.py [--mb 1 16 64] [--rounds 9] [--mesh 2x4]

Every round runs all ways in an order that turns; ratios are taken within a round. A way counts only if the
sums of whole numbers are right.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import machine
import numpy as np

from multipod import runtime

runtime.prepare(8)  # before JAX is imported

import jax  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from multipod.collectives.build import ALGORITHMS  # noqa: E402
from multipod.errors import MultipodError  # noqa: E402
from multipod.execute.sums import SUMS, VectorSum, build_scheduled_sum  # noqa: E402
from multipod.layout.axes import DATA_AXES  # noqa: E402
from multipod.layout.layout import Layout, parse_shape  # noqa: E402
from multipod.layout.mesh import make_mesh, topology_of  # noqa: E402

PSUM = "xla (psum)"


def ways(layout: Layout) -> dict[str, VectorSum]:
    """The sums to compare, by name; psum first."""
    topology = topology_of(layout, make_mesh(layout))
    others = {name: make(DATA_AXES) for name, make in SUMS.items() if name != "xla"}
    return {
        PSUM: SUMS["xla"](DATA_AXES),
        **others,
        **{n: build_scheduled_sum(n, topology, DATA_AXES) for n in ALGORITHMS},
    }


def compiled(total: VectorSum, mesh: jax.sharding.Mesh, vectors: jax.Array) -> Callable[[], float]:
    """A function that sums once and returns the seconds that took."""
    spec = PartitionSpec(DATA_AXES)
    over = jax.shard_map(total.all_reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(over).lower(vectors).compile()
    expected = np.asarray(vectors).reshape(mesh.size, -1).sum(0)
    if not all((row == expected).all() for row in np.asarray(program(vectors)).reshape(mesh.size, -1)):
        raise AssertionError("wrong sums")

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(vectors))
        return time.perf_counter() - start

    return once


def measure(layout: Layout, mb: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each way that fits the mesh; each is run until it has taken 0.1 s."""
    mesh = make_mesh(layout)
    values = np.random.default_rng(0).integers(0, 100, (mesh.size, mb << 18)).astype(np.float32)
    vectors = jax.device_put(values.ravel(), jax.NamedSharding(mesh, PartitionSpec(DATA_AXES)))
    runs = {}
    for name, total in ways(layout).items():
        try:
            runs[name] = compiled(total, mesh, vectors)
        except MultipodError as refusal:
            print(f"{name}: {refusal}")
    counts = {name: max(1, min(100, round(0.1 / run()))) for name, run in runs.items()}
    order, rng = list(runs), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            taken[name].append(statistics.median(runs[name]() for _ in range(counts[name])))
    return taken


def row(name: str, seconds: list[float], base: list[float]) -> list[str]:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, base, strict=True)], n=4)
    return [name, f"{1e3 * statistics.median(seconds):.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mesh", default="2x4")
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    for mb in options.mb:
        taken = measure(Layout(mesh=parse_shape(options.mesh)), mb, options.rounds)
        print(f"\n**{mb} MiB on each of {options.mesh} devices**\n")
        rows = [row(name, seconds, taken[PSUM]) for name, seconds in taken.items()]
        print(machine.table(["sum", "ms", "/ psum", "quartiles"], rows), flush=True)
    print(f"\nLoad average at the end: {machine.facts()['load']}")


if __name__ == "__main__":
    main()
