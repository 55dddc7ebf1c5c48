"""One of four ranks of `test_execute_processes.py`: runs every case, and writes down what went wrong.

    python ranks.py torch RANK FOLDER          four of these
    mpirun -n 4 python ranks.py mpi 0 FOLDER   the rank is MPI's

Writes FOLDER/ENGINE-RANK.json: what failed, by case; the cases; texts of refusals.
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import Schedule, even_bounds, make_step
from multipod.errors import MultipodError
from multipod.execute.engines import numpy as reference
from multipod.execute.engines import rank_program
from multipod.execute.engines.shared_memory import in_rank_order
from multipod.topology.topology import Topology

RANKS = 4
MACHINES = {
    "line": Topology((4,)),
    "ring": Topology((4,), wrap=(True,)),
    "mesh": Topology((2, 2)),
    "ring, one dead": Topology((5,), wrap=(True,), failed_chips=frozenset({2})),
    "mesh with a hole": Topology((2, 4), failed_chips=frozenset({(0, 2), (0, 3), (1, 2), (1, 3)})),
    "switch": Topology((4,), switched=(True,)),
}
# Elements and bytes of a segment: empty, shorter than the pieces, not divisible, in many segments and in one.
SIZES = ((0, 64), (1003, 100), (3, 64), (37, 16), (1000, 1 << 20), (1, 64), (256, 1 << 20))
DTYPES = ("int64", "float32", "float64")
SWAP = Schedule(
    "broadcast",
    "swaps",
    MACHINES["line"],
    2,
    even_bounds(2),
    # What a rank sends it overwrites in the same step, which is why the order inside a step matters.
    [
        make_step([0, 1, 2, 3], [1, 0, 3, 2], 0, 2, op=1),
        make_step([1, 2], [2, 1], [0, 1]),
        make_step([0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 1, 0], [0, 0, 1, 1, 0, 1], op=[0, 1, 0, 1, 0, 1]),
    ],
)


class Case(NamedTuple):
    name: str
    schedule: Schedule
    length: int
    dtype: str
    segment_bytes: int

    def vector(self, rank: int) -> np.ndarray:
        """What `rank` begins with."""
        rng = np.random.default_rng([rank, self.length])
        return (rng.standard_normal(self.length) * 1000).astype(self.dtype)

    def expected(self) -> list[np.ndarray]:
        """What the ranks must end with."""
        chips = self.schedule.topology.chips
        ended = reference.run(self.schedule, {chip: self.vector(rank) for rank, chip in enumerate(chips)})
        return [ended[chip] for chip in chips]


def schedules() -> Iterator[tuple[str, Schedule]]:
    """Every algorithm, for every collective that it can do, on every machine that it fits."""
    yield "swaps", SWAP
    yield "rank-order", in_rank_order(MACHINES["ring, one dead"])
    for algorithm, builder in ALGORITHMS.items():
        for collective in builder.collectives:
            for machine, topology in MACHINES.items():
                try:
                    yield f"{algorithm} {collective} on {machine}", build(algorithm, topology, collective)
                except MultipodError:
                    continue  # the test counts which algorithms had no machine at all


def cases() -> Iterator[Case]:
    """Two sizes and dtypes for each schedule, other ones for the next."""
    for number, (name, schedule) in enumerate(schedules()):
        for turn in (2 * number, 2 * number + 1):
            length, segment_bytes = SIZES[turn % len(SIZES)]
            yield Case(name, schedule, length, DTYPES[turn % len(DTYPES)], segment_bytes)


class Report:
    """What one rank found."""

    def __init__(self, engine: str, rank: int, folder: Path) -> None:
        self.rank = rank
        self._file = folder / f"{engine}-{rank}.json"
        self._cases: list[str] = []
        self._failed: dict[str, str] = {}
        self._refused: dict[str, str] = {}

    def same(self, name: str, found: np.ndarray, expected: np.ndarray) -> None:
        self._cases.append(name)
        if found.tobytes() != expected.tobytes():
            self._failed[name] = f"{found[:4].tolist()}, not {expected[:4].tolist()}"

    def close(self, name: str, difference: float, bound: float) -> None:
        self._cases.append(name)
        if not difference <= bound:
            self._failed[name] = f"{difference} is more than {bound}"

    def refused(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except MultipodError as error:
            self._refused[name] = f"{type(error).__name__}: {error}"

    def write(self) -> None:
        text = json.dumps({"cases": self._cases, "failed": self._failed, "refused": self._refused})
        self._file.write_text(text, encoding="utf-8")


def run_cases(report: Report, run: Callable[[np.ndarray, Schedule], object], label: str = "", every: int = 1) -> None:
    for case in itertools.islice(cases(), 0, None, every):
        rank_program.SEGMENT_BYTES = case.segment_bytes
        vector = case.vector(report.rank)
        run(vector, case.schedule)
        report.same(f"{case.name}{label}: {case.length} x {case.dtype}", vector, case.expected()[report.rank])


def window_cases(report: Report, window: Any, tensor: Callable[[np.ndarray], Any] = lambda array: array) -> None:
    for length in (0, 1, 5, 1000, 70_001):
        case = Case("shared-memory", in_rank_order(MACHINES["ring"]), length, "float32", 0)
        vector = case.vector(report.rank)
        window.all_reduce(tensor(vector))
        report.same(f"shared-memory: {length}", vector, case.expected()[report.rank])


def refusals(report: Report, run: Callable[..., object], all_reduce: Callable[..., object]) -> None:
    report.refused("too few chips", lambda: run(np.ones(4), in_rank_order(Topology((3,)))))
    report.refused("not flat", lambda: run(np.ones((2, 2)), in_rank_order(Topology((4,)))))
    report.refused("no all-reduce", lambda: all_reduce(np.ones(4), SWAP))
    adasum = Schedule("all-reduce", "by hand", MACHINES["line"], 1, even_bounds(1), [make_step(0, 1, 0, op=2)])
    if report.rank < 2:  # the others have no part in it
        report.refused("adasum", lambda: run(np.ones(4), adasum))
    ring = build("ring", MACHINES["ring"])
    report.refused("lengths", lambda: all_reduce(np.ones(8 + report.rank), ring))
    report.refused("dtypes", lambda: all_reduce(np.ones(8, "float64" if report.rank else "float32"), ring))
    report.refused(
        "schedules", lambda: all_reduce(np.ones(8), ring if report.rank else in_rank_order(MACHINES["ring"]))
    )


def specials(report: Report, all_reduce: Callable[..., object]) -> None:
    """What is no number passes through as in any sum, and the sums after a refusal are right."""
    vector = np.array([1, np.nan, np.inf, np.inf, 3e38], np.float32)
    if report.rank == 2:
        vector[:4] = 2, 1, 1, -np.inf
    all_reduce(vector, build("ring", MACHINES["ring"]))
    vector[np.isnan(vector)] = -1  # of NaN there are many
    report.same("not a number", vector, np.array([5, -1, np.inf, -1, np.inf], np.float32))


class Foreign:
    """A vector of some framework that NumPy knows nothing of but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def torch_rank(rank: int, folder: Path) -> None:
    import torch
    from torch import distributed

    from multipod.execute.engines import torch as engine
    from multipod.interop.torch import HookState

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder / 'meet'}", rank=rank, world_size=RANKS)
    report = Report("torch", rank, folder)
    tensor = torch.from_numpy
    run_cases(report, lambda array, schedule: engine.run(tensor(array), schedule))
    run_cases(report, lambda array, schedule: engine.run(tensor(array), schedule, grouped=True), " (grouped)", every=3)
    refusals(
        report,
        lambda array, schedule: engine.run(tensor(array), schedule),
        lambda array, schedule: engine.all_reduce(tensor(array), schedule),
    )
    specials(report, lambda array, schedule: engine.all_reduce(tensor(array), schedule))
    report.refused("slice", lambda: engine.run(torch.ones(8)[::2], in_rank_order(MACHINES["line"])))
    rank_program.SEGMENT_BYTES = 1 << 20
    window = engine.open_shared_memory(block_bytes=4096)
    window_cases(report, window, tensor)
    half_precision(report, engine, window)
    report.refused("slice in the window", lambda: window.all_reduce(torch.ones(8)[::2]))
    report.refused("lengths in the window", lambda: window.all_reduce(torch.ones(8 + rank)))
    window.close()
    group = distributed.new_group([1, 3])  # all ranks make it
    if rank in (1, 3):
        vector = np.full(10, rank, np.float32)
        engine.all_reduce(tensor(vector), in_rank_order(Topology((2,))), group)
        report.same("a group of two", vector, np.full(10, 4, np.float32))
    for algorithm in (*ALGORITHMS, "shared-memory"):
        try:
            state = HookState(algorithm, MACHINES["mesh"])
        except MultipodError:
            continue
        for name, difference in train(rank, state).items():
            report.close(f"DDP with {algorithm}: {name}", difference, 1e-6)
        state.close()
    report.refused("hook without machine", lambda: HookState("ring", Topology((3,))))
    report.refused("hook without algorithm", lambda: HookState("rnig"))
    window = engine.open_shared_memory()
    distributed.barrier()
    if rank == RANKS - 1:
        report.write()
        os.kill(os.getpid(), signal.SIGKILL)
    report.refused("a rank was killed", lambda: engine.all_reduce(torch.ones(8), build("ring", MACHINES["ring"])))
    report.refused("a rank was killed, window", lambda: window.all_reduce(torch.ones(8)))
    report.write()
    os._exit(0)  # the group cannot be left in good order any more


def half_precision(report: Report, engine: Any, window: Any) -> None:
    """PyTorch's bfloat16, which NumPy has not: against PyTorch's own sums in the same order."""
    import torch

    def of(rank: int) -> torch.Tensor:
        return torch.randn(1001, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)

    expected = of(0)
    for rank in range(1, RANKS):
        expected = expected + of(rank)
    ways = {
        "gloo": lambda vector: engine.all_reduce(vector, in_rank_order(MACHINES["line"])),
        "shared memory": window.all_reduce,
        "shared memory, in place": window.all_reduce,
    }
    for name, sum_up in ways.items():
        vector = of(report.rank)
        if "in place" in name:
            vector = window.empty(len(vector), vector.dtype).copy_(vector)
        sum_up(vector)
        report.same(f"bfloat16 by {name}", vector.view(torch.int16).numpy(), expected.view(torch.int16).numpy())


def train(rank: int, state: Any) -> dict[str, float]:
    """How far weights and gradients are from plain DDP's at most, after three updates on this rank's data."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from multipod.interop.torch import multipod_hook

    def model() -> DistributedDataParallel:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        return DistributedDataParallel(net, bucket_cap_mb=0.01)  # several buckets

    plain, ours = model(), model()
    ours.register_comm_hook(state, multipod_hook)
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
    for one in (plain, ours):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            optimizer.step()

    def furthest(pairs: Any) -> float:
        return max((a - b).abs().max().item() for a, b in pairs)

    both = list(zip(plain.parameters(), ours.parameters(), strict=True))
    return {
        "weights": furthest((a.detach(), b.detach()) for a, b in both),
        "gradients": furthest((a.grad, b.grad) for a, b in both),
    }


def mpi_rank(folder: Path) -> None:
    from mpi4py import MPI

    from multipod.execute.engines import mpi as engine

    comm = MPI.COMM_WORLD
    assert comm.size == RANKS, comm.size
    report = Report("mpi", comm.rank, folder)
    run_cases(report, lambda array, schedule: engine.run(array, schedule, comm))
    refusals(
        report,
        lambda array, schedule: engine.run(array, schedule, comm),
        lambda array, schedule: engine.all_reduce(array, schedule, comm),
    )
    specials(report, lambda array, schedule: engine.all_reduce(array, schedule, comm))
    window = engine.open_shared_memory(comm, block_bytes=4096)
    window_cases(report, window)
    window.close()
    ring = build("ring", MACHINES["ring"])
    for name, make in {"DLPack": Foreign, "buffer protocol": lambda array: memoryview(array)}.items():
        vector = np.full(10, comm.rank, np.float32)
        engine.all_reduce(make(vector), ring, comm)
        report.same(name, vector, np.full(10, 6, np.float32))
    report.refused("read-only", lambda: engine.run(b"12345678", ring, comm))
    report.refused("no memory", lambda: engine.run([1, 2], ring, comm))
    pair = comm.Split(comm.rank % 2, comm.rank)
    vector = np.full(10, comm.rank, np.float32)
    engine.all_reduce(vector, in_rank_order(Topology((2,))), pair)
    report.same("a group of two", vector, np.full(10, 2 + 2 * (comm.rank % 2), np.float32))
    pair.Free()
    if comm.rank < RANKS - 1:
        report.refused("a rank does not come", lambda: engine.all_reduce(np.ones(8), ring, comm, limit_s=0.5))
    report.write()


if __name__ == "__main__":
    engine, rank, folder = sys.argv[1:]
    if engine == "torch":
        torch_rank(int(rank), Path(folder))
    else:
        mpi_rank(Path(folder))
