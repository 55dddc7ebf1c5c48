"""Embedding bags: tensor-train tables of ours and of PyTorch users, and the dense bag, on one CPU core.

    python benchmarks/tensor_train.py [--cases 1M:64:16:10 ...] [--json FILE]
    python benchmarks/tensor_train.py --memory

A case is rows:features:rank:ids a bag; 2,048 bags, ids Zipf(1.2) scattered over the table, sum pooling, plain SGD. All
ways take turns; CPU milliseconds (of all threads) are medians, and ratios are medians of those within a round. Forward
is a lookup; training is lookup, gradient and update. `unique + bmm` looks every distinct id up once by batched
products of PyTorch, the best way that we know there; `einsum` and `bmm` do it for every id, `tltorch` is TensorLy's
FactorizedEmbedding. Outputs and updated cores are compared before anything is timed.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import machine  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from multipod.nn.tensor_train import TensorTrain, tensor_train  # noqa: E402
from multipod.nn.tensor_train_bag import bag  # noqa: E402

FACTORS = {"1M": (100, 100, 100), "10M": (200, 200, 250)}
COLUMNS = {16: (2, 2, 4), 64: (4, 4, 4)}
CASES = [
    f"{rows}:{features}:{rank}:{ids}"
    for rows in FACTORS for features in COLUMNS for rank in (8, 16, 32) for ids in (1, 10, 32)
]  # fmt: skip
BATCH, RATE = 2048, 0.01
WAYS = ("ours", "ours_jax", "unique_bmm", "dense", "einsum", "bmm", "tltorch")
SLOW = ("ours_jax", "einsum", "bmm", "tltorch")


@dataclass
class Case:
    """The numbers that all ways share."""

    name: str
    tt: TensorTrain
    ids: np.ndarray
    gradient: np.ndarray
    cores: list[np.ndarray]
    hot: int
    programs: dict[str, tuple[Callable, Callable]] = field(default_factory=dict)


def made(name: str) -> Case:
    rows, features, rank, hot = name.split(":")
    factors, columns = FACTORS[rows], COLUMNS[int(features)]
    tt = tensor_train(int(np.prod(factors)), int(features), int(rank), row_factors=factors, column_factors=columns)
    rng = np.random.default_rng(0)
    drawn = rng.zipf(1.2, BATCH * int(hot)).astype(np.uint64)
    ids = (drawn * np.uint64(2654435761) % np.uint64(tt.rows)).astype(np.int32)
    gradient = rng.standard_normal((BATCH, tt.features)).astype(np.float32)
    scale = (1 / (3 * tt.rows * np.prod(tt.ranks))) ** (1 / 6)
    cores = [(scale * rng.standard_normal(shape)).astype(np.float32) for shape in tt.shapes]
    return Case(name, tt, ids, gradient, cores, int(hot))


def ours(case: Case, way: str) -> tuple[Callable, Callable]:
    ids, gradient = jnp.asarray(case.ids), jnp.asarray(case.gradient)
    offsets = jnp.arange(0, len(case.ids) + 1, case.hot, dtype=jnp.int32)

    def forward(cores, ids, offsets):
        return bag(case.tt, cores, ids, offsets, way=way)

    def update(cores, ids, offsets, gradient):
        slopes = jax.vjp(lambda cores: forward(cores, ids, offsets), cores)[1](gradient)[0]
        return jax.tree.map(lambda core, slope: core - RATE * slope, cores, slopes)

    look, step = jax.jit(forward), jax.jit(update, donate_argnums=0)
    cores = tuple(map(jnp.asarray, case.cores))
    state = [jax.tree.map(jnp.array, cores)]

    def train():
        state[0] = jax.block_until_ready(step(state[0], ids, offsets, gradient))
        return state[0]

    return lambda: jax.block_until_ready(look(cores, ids, offsets)), train


def torchs(case: Case, way: str) -> tuple[Callable, Callable]:
    ids, gradient = torch.from_numpy(case.ids).long(), torch.from_numpy(case.gradient)
    if way == "dense":
        table = torch.full((case.tt.rows, case.tt.features), 0.01)  # to draw 2.4 GiB takes longer than all the rest
        module = torch.nn.EmbeddingBag(*table.shape, mode="sum", sparse=True, _weight=table)
        params, look = [module.weight], lambda: module(ids.view(BATCH, case.hot))
    elif way == "tltorch":
        import tltorch

        module = tltorch.FactorizedEmbedding(
            case.tt.rows, case.tt.features, auto_tensorize=False, tensorized_num_embeddings=case.tt.row_factors,
            tensorized_embedding_dim=case.tt.column_factors, factorization="blocktt", rank=case.tt.ranks[0],
        )  # fmt: skip
        params, look = list(module.parameters()), lambda: module(ids.view(BATCH, case.hot)).sum(1)
    else:
        params = [torch.nn.Parameter(torch.from_numpy(core.copy())) for core in case.cores]
        rows = by_einsum if way == "einsum" else by_bmm

        def look():
            if way == "unique_bmm":
                distinct, place = torch.unique(ids, return_inverse=True)
                found = rows(params, distinct, case.tt)
                return torch.nn.functional.embedding_bag(place.view(BATCH, case.hot), found, mode="sum")
            return rows(params, ids, case.tt).view(BATCH, case.hot, -1).sum(1)

    def forward():
        with torch.no_grad():
            return look()

    def train():
        look().backward(gradient)
        with torch.no_grad():
            for param in params:
                param.add_(param.grad, alpha=-RATE)
                param.grad = None
        return params

    return forward, train


def digits(ids: torch.Tensor, tt: TensorTrain) -> list[torch.Tensor]:
    _, m2, m3 = tt.row_factors
    return [ids // (m2 * m3), ids // m3 % m2, ids % m3]


def by_einsum(cores, ids, tt):
    i, j, k = digits(ids, tt)
    x = torch.einsum("xar,xrbs->xabs", cores[0][i, 0], cores[1][j])
    return torch.einsum("xabs,xsc->xabc", x, cores[2][k, :, :, 0]).reshape(len(ids), -1)


def by_bmm(cores, ids, tt):
    a, b, c = (core.index_select(0, digit) for core, digit in zip(cores, digits(ids, tt), strict=True))
    n, rank = len(ids), tt.ranks[0]
    x = torch.bmm(a.view(n, -1, rank), b.view(n, rank, -1)).view(n, -1, rank)
    return torch.bmm(x, c.view(n, rank, -1)).view(n, -1)


def program(case: Case, way: str) -> tuple[Callable, Callable]:
    return ours(case, {"ours": "native", "ours_jax": "jax"}[way]) if way.startswith("ours") else torchs(case, way)


def cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (used.ru_utime + used.ru_stime)


def check(case: Case) -> None:
    """Outputs, and cores after one update, of the ways that begin with the same cores."""
    want = case.programs["unique_bmm"][0]().numpy()
    updated = [core.detach().numpy() for core in case.programs["unique_bmm"][1]()]
    for way in set(case.programs) & {"ours", "ours_jax", "einsum", "bmm"}:
        forward, train = case.programs[way]
        np.testing.assert_allclose(np.asarray(forward()), want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
        for core, other in zip(train(), updated, strict=True):
            core = core.detach().numpy() if isinstance(core, torch.Tensor) else np.asarray(core)
            np.testing.assert_allclose(core, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


def measure(name: str, ways: list[str], rounds: int) -> dict:
    case = made(name)
    case.programs = {way: program(case, way) for way in ways}
    check(case)
    found = {
        "case": name,
        "distinct": len(np.unique(case.ids)),
        "ids": len(case.ids),
        "cores_mib": 4 * case.tt.parameters / 2**20,
    }
    for part, what in enumerate(("forward", "train")):
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, programs in case.programs.items():
                start = cpu_ms()
                programs[part]()
                if turn:  # the first is to warm up
                    taken[way].append(cpu_ms() - start)
        found[what] = {way: float(np.median(times)) for way, times in taken.items()}
        found[f"{what}_ratio"] = {
            way: float(np.median(np.array(times) / np.array(taken["ours"]))) for way, times in taken.items()
        }
    return found


def report(results: list[dict]) -> str:
    head = ["rows:features:rank:ids", "distinct", "cores, MiB"]
    head += [f"{what}: {way}" for what in ("forward", "train") for way in ("ours, ms", "unique+bmm", "dense")]
    rows = []
    for r in results:
        row = [r["case"], f"{r['distinct']:,}/{r['ids']:,}", f"{r['cores_mib']:.2f}"]
        for what in ("forward", "train"):
            row += [f"{r[what]['ours']:.2f}", f"{r[f'{what}_ratio']['unique_bmm']:.1f}x"]
            row += [f"{r[f'{what}_ratio']['dense']:.2f}x"]
        rows.append(row)
    parts = [machine.table(head, rows)]
    slow = [r for r in results if "einsum" in r["forward"]]
    if slow:
        head = ["rows:features:rank:ids", *(f"{what}: {way}" for what in ("forward", "train") for way in SLOW)]
        cell = lambda r, what, way: f"{r[f'{what}_ratio'][way]:.1f}x" if way in r[what] else "-"  # noqa: E731
        rows = [[r["case"], *(cell(r, what, way) for what in ("forward", "train") for way in SLOW)] for r in slow]
        parts.append(machine.table(head, rows))
    return "\n\n".join(parts)


def status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key)))


def memory_of(name: str, way: str) -> dict:
    """MiB that two updates take above what is there before the first lookup, in a process of its own."""
    case = made(name)
    forward, train = program(case, way)
    if way == "ours":  # XLA's compiler takes memory of its own, once
        train(), forward()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    train(), train()
    return {"way": way, "step_mib": (status_kib("VmHWM") - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-of", nargs=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(json.dumps(memory_of(*options.memory_of)))
        return
    facts = machine.facts()
    print(f"{machine.headline(facts)}, commit {machine.commit()}\n", flush=True)
    if options.memory:
        rows = []
        for name in ("1M:64:16:10", "10M:64:16:10"):
            for way in ("ours", "unique_bmm", "dense"):
                command = [sys.executable, __file__, "--memory-of", name, way]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found, tt = json.loads(done.stdout.splitlines()[-1]), made(name).tt
                held = 4 * (tt.rows * tt.features if way == "dense" else tt.parameters) / 2**20
                rows.append([name, way, f"{held:.2f}", f"{found['step_mib']:.1f}"])
        print(machine.table(["rows:features:rank:ids", "way", "parameters, MiB", "two updates above that, MiB"], rows))
        return
    try:
        import tltorch  # noqa: F401

        slow = SLOW
    except ImportError:
        slow = SLOW[:-1]
    results = []
    for name in options.cases:
        rank, hot = name.split(":")[2:]
        few = ("ours", "unique_bmm", "dense")
        results.append(measure(name, [*few, *(slow if (rank, hot) == ("16", "10") else ())], options.rounds))
        print(name, {what: results[-1][f"{what}_ratio"] for what in ("forward", "train")}, flush=True)
    print(report(results))
    print(f"\nLoad average at the end: {machine.facts()['load']}")
    if options.json:
        options.json.write_text(json.dumps(facts | {"commit": machine.commit(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
