"""One rank of `all_reduce.py`: sums when asked to, and sleeps in between.

    python all_reduce_ranks.py torch|jax ADDRESS RANKS MEET RANK
    mpirun -n RANKS python all_reduce_ranks.py mpi ADDRESS RANKS MEET

It connects to the parent's ADDRESS and tells its rank. To (way, elements, updates, start) it answers with the times of
so many sums and the CPU time of one, all threads together; with 0 updates it answers how wrong one sum is.
"""

import sys
import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Client
from typing import Any

import numpy as np

from multipod.collectives.build import build
from multipod.collectives.schedule import Schedule
from multipod.topology.topology import Topology

Way = Callable[[], object]
Ways = dict[str, Callable[[np.ndarray], Way]]
"""For each way a function from this rank's vector to what sums it when called: in place, or it returns the sum."""

LIMIT, GLOO, MPI_ALLREDUCE = "memory copy (the limit)", "torch.distributed.all_reduce, gloo", "MPI_Allreduce"
PSUM = "jax.lax.psum over processes, gloo"
SHARED, IN_PLACE = "ours, shared memory", "ours, shared memory, vectors made there"

ALGORITHMS = {"ring": False, "halving-doubling": False, "tree-packing": True}
"""Those that are run, and whether they want to know the bytes."""


@cache
def schedule(algorithm: str, ranks: int, elements: int) -> Schedule:
    options = {"nbytes": 4 * elements} if ALGORITHMS[algorithm] else {}
    # About what a message costs over loopback, from which tree packing takes the size of its pieces.
    machine = Topology((ranks,), wrap=(True,), latency_s=1e-4, bytes_per_s=2e9)
    return build(algorithm, machine, **options)


def copy(vector: np.ndarray) -> Way:
    target = np.zeros_like(vector)
    return lambda: np.copyto(target, vector)


def torch_ways(rank: int, ranks: int, meet: str) -> Ways:
    import torch
    from torch import distributed

    from multipod.execute.engines import torch as engine

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=ranks)
    window = engine.open_shared_memory()

    def on_tensor(function: Callable[[torch.Tensor], object]) -> Callable[[np.ndarray], Way]:
        return lambda vector: partial(function, torch.from_numpy(vector))

    def on_gloo(algorithm: str) -> Callable[[np.ndarray], Way]:
        return on_tensor(lambda tensor: engine.all_reduce(tensor, schedule(algorithm, ranks, len(tensor))))

    ways = {LIMIT: copy, GLOO: on_tensor(distributed.all_reduce)}
    ways |= {f"ours on gloo, {algorithm}": on_gloo(algorithm) for algorithm in ALGORITHMS}
    return ways | {SHARED: on_tensor(window.all_reduce), IN_PLACE: in_place(window)}


def in_place(window: Any) -> Callable[[np.ndarray], Way]:
    """Vectors in shared memory, one for each length, kept for the next round."""
    import torch

    shared = cache(lambda length: window.empty(length))

    def way(vector: np.ndarray) -> Way:
        tensor = shared(vector.size)
        tensor.copy_(torch.from_numpy(vector))

        def run() -> np.ndarray:
            window.all_reduce(tensor)
            return tensor.numpy()

        return run

    return way


def mpi_ways(comm: Any) -> Ways:
    from mpi4py import MPI

    from multipod.execute.engines import mpi as engine

    def on_mpi(algorithm: str) -> Callable[[np.ndarray], Way]:
        def way(vector: np.ndarray) -> Way:
            return partial(engine.all_reduce, vector, schedule(algorithm, comm.size, vector.size), comm)

        return way

    ways: Ways = {MPI_ALLREDUCE: lambda vector: partial(comm.Allreduce, MPI.IN_PLACE, vector)}
    ways |= {f"ours on MPI, {algorithm}": on_mpi(algorithm) for algorithm in ALGORITHMS}
    return ways


def jax_ways(rank: int, ranks: int, meet: str) -> Ways:
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(meet, ranks, rank)
    mesh = Mesh(np.array(jax.devices()), ("rank",))
    sharding = NamedSharding(mesh, P("rank", None))
    psum = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "rank"), mesh=mesh, in_specs=P("rank", None), out_specs=P(None, None))
    )

    def way(vector: np.ndarray) -> Way:
        whole = jax.make_array_from_process_local_data(sharding, vector[None], (ranks, vector.size))
        return lambda: psum(whole).block_until_ready()

    return {PSUM: way}


def measure(way: Way, count: int, start: float) -> dict[str, float]:
    time.sleep(max(0.0, start - time.monotonic()))
    way()  # the ranks come together here
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(count):
        way()
    return {"began": began, "ended": time.monotonic(), "cpu": (time.process_time() - cpu) / count}


def error(name: str, make: Callable[[np.ndarray], Way], rank: int, ranks: int, elements: int) -> float:
    """How far a sum of whole numbers is from right, at most."""

    def vector(rank: int) -> np.ndarray:
        return np.random.default_rng(rank).integers(-1000, 1000, elements).astype(np.float32)

    mine = vector(rank)
    answer: Any = make(mine)()
    if name == PSUM:
        answer = np.asarray(answer.addressable_data(0))[0]
    found = answer if isinstance(answer, np.ndarray) else mine
    return 0.0 if name == LIMIT else float(np.abs(found - sum(map(vector, range(ranks)))).max())


def serve(connection: Any, ways: Ways, rank: int, ranks: int) -> None:
    connection.send(list(ways))
    while (asked := connection.recv()) is not None:
        name, elements, count, start = asked
        if count == 0:
            connection.send(error(name, ways[name], rank, ranks, elements))
        else:
            # Written to: memory that never was is read from one page of zeros, far faster than memory is.
            connection.send(measure(ways[name](np.full(elements, 0.0, np.float32)), count, start))


def main() -> None:
    kind, address, ranks, meet, *rest = sys.argv[1:]
    comm = None
    if kind == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    rank = comm.rank if comm is not None else int(rest[0])
    with Client(address, "AF_UNIX") as connection:
        connection.send(rank)
        if comm is not None:
            ways = mpi_ways(comm)
        else:
            ways = {"torch": torch_ways, "jax": jax_ways}[kind](rank, int(ranks), meet)
        serve(connection, ways, rank, int(ranks))


if __name__ == "__main__":
    main()
