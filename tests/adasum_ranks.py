"""One of four ranks of `test_adasum.py`: combines over gloo or MPI, and writes down what went wrong.

python adasum_ranks.py torch RANK FOLDER          four of these
mpirun -n 4 python adasum_ranks.py mpi 0 FOLDER   the rank is MPI's
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
from ranks import RANKS, Report

from multipod.collectives.adasum import halving
from multipod.errors import PoisonedError
from multipod.execute.adasum.operator import Layers, tree
from multipod.execute.engines import numpy as reference
from multipod.topology.topology import Topology

LAYERS = Layers((300, 1, 0, 37, 1700), ("embed", "scale", "none", "head", "body"))
MACHINES = {
    "line": (Topology((4,)), 1),
    "two nodes": (Topology((4,)), 2),
    "one dead": (Topology((5,), wrap=(True,), failed_chips=frozenset({2})), 1),
    "two dead": (Topology((2, 3), failed_chips=frozenset({(0, 1), (0, 2)})), 1),
}


def vector(rank: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng([7, rank])
    return (rng.standard_normal(2038) + np.sin(np.arange(2038))).astype(dtype)


def combine_all(report: Report, combine: Callable[..., object], *, same_bits: bool) -> None:
    for name, (topology, node) in MACHINES.items():
        schedule = halving(topology, node)
        for dtype in ("float32", "float64", "float16"):
            held = {chip: vector(rank, dtype) for rank, chip in enumerate(topology.chips)}
            expected = reference.run(schedule, held, LAYERS)[topology.chips[report.rank]]
            mine = vector(report.rank, dtype)
            combine(mine, schedule, LAYERS, form="tree")
            case = f"adasum on {name}: {dtype}"
            if same_bits:
                report.same(case, mine, expected)
            else:
                eps = float(np.finfo(dtype).eps)
                report.close(case, float(np.abs(mine.astype("float64") - expected).max()), 8 * eps)
            if node == 1:
                again = vector(report.rank, dtype)
                combine(again, schedule, LAYERS, form="gram")
                away = float(np.abs(again.astype("float64") - expected).max())
                report.close(f"{case}, Gram form", away, max(8 * float(np.finfo(dtype).eps), 1e-13))
    schedule = halving(MACHINES["line"][0])
    pieces, chosen = np.tile(vector(report.rank, "float32"), 400), vector(report.rank, "float32")
    names = Layers((2038,) * 400)
    combine(pieces, schedule, names)
    combine(chosen, schedule, Layers((2038,)), form="gram")
    report.close("in pieces", float(np.abs(pieces.reshape(400, -1) - chosen).max()), 1e-5)


def refusals(report: Report, combine: Callable[..., object]) -> None:
    schedule = halving(MACHINES["line"][0])
    layers = LAYERS
    bad = vector(report.rank, "float32")
    if report.rank == 1:
        bad[310] = np.inf
    if report.rank > 1:
        bad[3] = np.nan
    report.refused("poisoned", lambda: combine(bad, schedule, layers))
    report.refused("layers", lambda: combine(vector(0, "float32"), schedule, Layers((5,))))
    other = Layers((4, 6) if report.rank == 2 else (5, 5))
    report.refused("other layers", lambda: combine(np.ones(10, "float32"), schedule, other))
    report.refused(
        "no Gram form",
        lambda: combine(np.ones(2038, "float32"), halving(MACHINES["two nodes"][0], 2), layers, form="gram"),
    )
    form = ("tree", "gram")[report.rank % 2]
    report.refused("other form", lambda: combine(np.ones(40, "float32"), schedule, Layers((40,)), form=form))
    report.refused("integers", lambda: combine(np.ones(2038, "int32"), schedule, layers))


def torch_rank(rank: int, folder: Path) -> None:
    import torch
    from torch import distributed

    from multipod.execute.engines import torch as engine

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder / 'meet'}", rank=rank, world_size=RANKS)
    report = Report("torch", rank, folder)

    def combine(array: np.ndarray, *args: object, **options: object) -> None:
        engine.adasum(torch.from_numpy(array), *args, **options)

    combine_all(report, combine, same_bits=False)
    refusals(report, combine)
    half = torch.from_numpy(vector(rank, "float32")).to(torch.bfloat16)
    together = {r: torch.from_numpy(vector(r, "float32")).to(torch.bfloat16).double().numpy() for r in range(RANKS)}
    engine.adasum(half, halving(Topology((4,))), Layers((2038,)))
    report.close("bfloat16", float(np.abs(half.double().numpy() - tree(together)).max()), 0.05)
    for name in ("SGD", "Adam"):
        for node in (1, 2):
            report.close(f"{name} on changes, nodes of {node}", wrapped(rank, name, node, folder), 2e-6)
    report.close("hook", hooked(rank), 1e-6)
    poisoned_step(report)
    mismatched(report)
    late = distributed.new_group(timeout=timedelta(seconds=1))
    if rank < RANKS - 1:
        report.refused("late", lambda: engine.adasum(torch.ones(40), halving(Topology((4,))), Layers((40,)), late))
    report.write()
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)


def net(width: int = 5):
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def data(rank: int, turn: int):
    import torch

    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * turn + rank))


def make(name: str, model):
    import torch

    options = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.01}}[name]
    return getattr(torch.optim, name)(model.parameters(), **options)


def wrapped(rank: int, name: str, node: int, folder: Path) -> float:
    """How far four steps, saved and restored half way, are from the same done by hand in one process."""
    import torch

    from multipod.interop.torch import Adasum

    model = net()
    optimizer = Adasum(make(name, model), model.named_parameters(), node=node, report=True)
    for turn in range(4):
        if turn == 2:
            file = folder / f"{name}-{node}-{rank}.pt"
            torch.save(optimizer.state_dict(), file)
            optimizer.close()
            optimizer = Adasum(make(name, model), model.named_parameters(), node=node, report=True)
            optimizer.load_state_dict(torch.load(file))
        optimizer.zero_grad()
        model(data(rank, turn)).square().mean().backward()
        optimizer.step()
    plain = [net() for _ in range(RANKS)]
    optimizers = [make(name, one) for one in plain]
    for turn in range(4):
        begun = [tensor.detach().clone() for tensor in plain[0].parameters()]
        for r, (one, own) in enumerate(zip(plain, optimizers, strict=True)):
            own.zero_grad()
            one(data(r, turn)).square().mean().backward()
            own.step()
        shares = []
        for k, start in enumerate(begun):
            changes = [(list(one.parameters())[k].detach() - start).double().numpy() for one in plain]
            nodes = [np.mean(changes[i : i + node], axis=0) for i in range(0, RANKS, node)]
            change = tree(dict(enumerate(nodes)))
            shares.append((change**2).sum() / sum((one**2).sum() for one in changes))
            for one in plain:
                list(one.parameters())[k].data = start + torch.from_numpy(change).float()
    told = list(optimizer.orthogonality.values())
    assert list(optimizer.orthogonality) == [name for name, _ in model.named_parameters()]
    optimizer.close()
    away = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain[0].parameters(), strict=True))
    return max(away, 0.1 * float(np.abs(np.array(told) - shares).max()))


def hooked(rank: int) -> float:
    """How far a DDP hook's gradients are from the float64 tree's."""
    from torch.nn.parallel import DistributedDataParallel

    from multipod.interop.torch import AdasumState, adasum_hook

    model = DistributedDataParallel(net())
    state = AdasumState(model.module.named_parameters())
    model.register_comm_hook(state, adasum_hook)
    model(data(rank, 0)).square().mean().backward()
    state.close()
    plain = [net() for _ in range(RANKS)]
    for r, one in enumerate(plain):
        one(data(r, 0)).square().mean().backward()
    gradients = zip(*([tensor.grad for tensor in one.parameters()] for one in plain), strict=True)
    expected = [tree(dict(enumerate(one.double().numpy() for one in each))) for each in gradients]
    return max(
        float(np.abs(tensor.grad.numpy() - one).max()) for tensor, one in zip(model.parameters(), expected, strict=True)
    )


def poisoned_step(report: Report) -> None:
    """A gradient that is not finite is refused everywhere, changes nothing, and the next step works."""
    from multipod.interop.torch import Adasum

    model = net()
    optimizer = Adasum(make("Adam", model), model.named_parameters())
    for turn in range(2):
        optimizer.zero_grad()
        model(data(report.rank, turn)).square().mean().backward()
        before = [tensor.detach().clone() for tensor in model.parameters()]
        if turn == 0 and report.rank == 3:
            model[2].bias.grad[1] = float("nan")

        def step() -> None:
            optimizer.step()

        if turn == 0:
            report.refused("poisoned gradient", step)
            assert not optimizer.optimizer.state
            assert all((a == b).all() for a, b in zip(before, model.parameters(), strict=True))
        else:
            try:
                step()
            except PoisonedError as error:
                report.refused("second step", lambda error=error: (_ for _ in ()).throw(error))
    report.close("after poison", float(not all(t.isfinite().all() for t in model.parameters())), 0)
    optimizer.close()


def mismatched(report: Report) -> None:
    from multipod.interop.torch import Adasum

    model = net(6 if report.rank == 2 else 5)
    report.refused("other model", lambda: Adasum(make("SGD", model), model.named_parameters()))


def mpi_rank(folder: Path) -> None:
    from mpi4py import MPI

    from multipod.execute.engines import mpi as engine

    comm = MPI.COMM_WORLD
    report = Report("mpi", comm.rank, folder)

    def combine(array: np.ndarray, *args: object, **options: object) -> None:
        engine.adasum(array, *args, comm, **options)

    combine_all(report, combine, same_bits=True)
    refusals(report, combine)
    if comm.rank < RANKS - 1:
        schedule = halving(Topology((4,)))
        report.refused("late", lambda: engine.adasum(np.ones(40), schedule, Layers((40,)), comm, limit_s=0.5))
    report.write()


if __name__ == "__main__":
    engine, rank, folder = sys.argv[1:]
    if engine == "torch":
        torch_rank(int(rank), Path(folder))
    else:
        mpi_rank(Path(folder))
