"""Embedding bags: tensor-train tables of ours and of PyTorch users, and the dense bag, on one CPU core.

    python benchmarks/tensor_train.py [--rows 1M | 10M] [--cases 1M:64:16:10 ...] [--json FILE]
    python benchmarks/tensor_train.py --memory [--json FILE]
    python benchmarks/tensor_train.py --page docs/results/tensor_train.md FILE ...      # of such JSON files

A case is rows:features:rank:ids a bag; 2,048 bags, ids Zipf(1.2) scattered over the table, sum pooling, plain SGD. All
ways take turns of some ten milliseconds; CPU milliseconds of a call (of all threads) are medians over rounds, and
ratios are medians of those within a round. Forward is a lookup; training is lookup, gradient and update, with the bags
handed out. `unique + bmm` looks every distinct id
up once by batched products of PyTorch, the best way that we know there; `einsum` and `bmm` do it for every id,
`tltorch` is TensorLy's FactorizedEmbedding. Outputs and updated cores are compared before anything is timed.
"""

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import machine  # noqa: E402
import memory  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from multipod.nn.tables.tensor_train import TensorTrain, tensor_train  # noqa: E402
from multipod.nn.tables.tensor_train_bag import bag  # noqa: E402

FACTORS = {"1M": (100, 100, 100), "10M": (200, 200, 250)}
COLUMNS = {16: (2, 2, 4), 64: (4, 4, 4)}
CASES = [
    f"{rows}:{features}:{rank}:{ids}"
    for rows in FACTORS for features in COLUMNS for rank in (8, 16, 32) for ids in (1, 10, 32)
]  # fmt: skip
BATCH, RATE = 2048, 0.01
WAYS = ("ours", "ours_jax", "unique_bmm", "dense", "einsum", "bmm", "tltorch")
SLOW = ("ours_jax", "einsum", "bmm", "tltorch")
NOTES = "## Notes"
"""What stands below this heading of the page was written by hand, and stays."""


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
        # The bags are handed out: a loss needs them, and XLA leaves out what nobody does.
        bags, back = jax.vjp(lambda cores: forward(cores, ids, offsets), cores)
        return jax.tree.map(lambda core, slope: core - RATE * slope, cores, back(gradient)[0]), bags

    cores = tuple(map(jnp.asarray, case.cores))
    state = [jax.tree.map(jnp.array, cores)]
    look = jax.jit(forward).lower(cores, ids, offsets).compile()
    step = jax.jit(update, donate_argnums=0).lower(state[0], ids, offsets, gradient).compile()

    def train():
        state[0] = jax.block_until_ready(step(state[0], ids, offsets, gradient))[0]
        return state[0]

    return lambda: jax.block_until_ready(look(cores, ids, offsets)), train


def torchs(case: Case, way: str) -> tuple[Callable, Callable]:
    ids, gradient = torch.from_numpy(case.ids).long(), torch.from_numpy(case.gradient)
    if way == "dense":
        module = dense_bag(case.tt.rows, case.tt.features)
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


@functools.lru_cache(maxsize=1)
def dense_bag(rows: int, features: int) -> torch.nn.EmbeddingBag:
    """One for all cases of a table's size: to fill 2.4 GiB takes longer than all the rest."""
    table = torch.full((rows, features), 0.01)
    return torch.nn.EmbeddingBag(rows, features, mode="sum", sparse=True, _weight=table)


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


def per_call_ms(run: Callable, calls: int) -> float:
    """CPU milliseconds of one of so many calls.

    A thread's time is counted when it goes to sleep, or at a tick of the clock: hence several calls, and the pauses.
    """
    time.sleep(0.005)
    start = cpu_ms()
    for _ in range(calls):
        run()
    time.sleep(0.005)
    return (cpu_ms() - start) / calls


def calls_of(run: Callable) -> int:
    """How many calls take some ten milliseconds; the first one, which warms up, does not count."""
    run()
    return max(1, min(32, round(10 / per_call_ms(run, 2))))


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
        calls = {way: calls_of(programs[part]) for way, programs in case.programs.items()}
        for _ in range(rounds):
            for way, programs in case.programs.items():
                taken[way].append(per_call_ms(programs[part], calls[way]))
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


MEMORY_CASES = ("1M:64:16:10", "10M:64:16:10", "10M:64:32:32")
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives freed blocks of this size back to the system, in place of keeping them for each thread."""


def memory_of(name: str, way: str) -> dict:
    """MiB that two updates and a lookup take above what is there before, in a process of its own.

    The most of five times. They are done once before, when libraries' code and threads' stacks come into memory.
    """
    case = made(name)
    forward, train = program(case, way)

    def step():
        for call in (train, train, forward):
            call()
            time.sleep(0.1)  # XLA frees what a call held a little after it has ended

    step_mib = max(memory.step_peak_mb(step) for _ in range(5))
    held = case.tt.rows * case.tt.features if way == "dense" else case.tt.parameters
    facts = {"case": name, "way": way, "held_mib": 4 * held / 2**20, "step_mib": step_mib}
    return facts | ({"workspace_mib": workspace_mib(case)} if way == "ours" else {})


def workspace_mib(case: Case) -> float:
    """What an update needs beside the cores.

    Their gradient, the bags, the ids in order (8 bytes each), and the last core turned, with its gradient. The second
    array of the sort is given back before there are gradients.
    """
    tt = case.tt
    numbers = tt.parameters + BATCH * tt.features + 2 * len(case.ids) + 2 * np.prod(tt.shapes[-1])
    return 4 * float(numbers) / 2**20


def memories() -> list[dict]:
    """`memory_of` of every case and way."""
    found = []
    for name in MEMORY_CASES:
        for way in ("ours", "unique_bmm", "dense"):
            command = [sys.executable, __file__, "--memory-of", name, way]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | GIVEN_BACK)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], flush=True)
    return found


def memory_table(found: list[dict]) -> str:
    head = [
        "rows:features:rank:ids",
        "way",
        "parameters, MiB",
        "an update above that, MiB",
        "of which needed",
        "in all",
    ]
    rows = []
    for one in found:
        row = [one["case"], one["way"], f"{one['held_mib']:.2f}", f"{one['step_mib']:.2f}", "-", "-"]
        if "workspace_mib" in one:
            row[4:] = [f"{one['workspace_mib']:.2f}", f"{over(one):+.1%}"]
        rows.append(row)
    return machine.table(head, rows)


def over(one: dict) -> float:
    """How far the peak is above the cores and what a batch needs, as a share."""
    return (one["held_mib"] + one["step_mib"]) / (one["held_mib"] + one["workspace_mib"]) - 1


def goals(results: list[dict], found: list[dict]) -> str:
    """What became of the goals, from the figures."""
    lines = []
    for what, name in (("forward", "Forward"), ("train", "Training")):
        ratios = {r["case"]: r[f"{what}_ratio"]["unique_bmm"] for r in results}
        missed = [f"{case} ({ratio:.1f})" for case, ratio in ratios.items() if ratio < 2.5]
        lines.append(
            f"- {name}, at least 2.5 times less CPU than unique + bmm: {len(ratios) - len(missed)} of "
            f"{len(ratios)} cases, {min(ratios.values()):.1f} to {max(ratios.values()):.1f} times."
            + (f" Missed: {', '.join(missed)}." if missed else "")
        )
    dense = {r["case"]: 1 / r["train_ratio"]["dense"] for r in results if r["case"].split(":")[2] == "16"}
    missed = [f"{case} ({ratio:.1f})" for case, ratio in dense.items() if ratio > 2]
    lines.append(
        f"- Training at rank 16, at most twice the dense bag's sparse-gradient step: {len(dense) - len(missed)} of "
        f"{len(dense)} cases, {min(dense.values()):.1f} to {max(dense.values()):.1f} times."
        + (f" Missed: {', '.join(missed)}." if missed else "")
    )
    if found:
        shares = {one["case"]: over(one) for one in found if "workspace_mib" in one}
        missed = [case for case, share in shares.items() if share > 0.05]
        lines.append(
            f"- Peak memory within 5 % of the cores and what a batch needs: {len(shares) - len(missed)} of "
            f"{len(shares)} cases ({', '.join(f'{share:+.1%}' for share in shares.values())})."
        )
    return "\n".join(lines)


def page(files: list[Path], notes: str) -> str:
    """The results page of the JSON files of one sitting."""
    parts = [json.loads(file.read_text()) for file in files]
    results = [one for part in parts for one in part.get("results", [])]
    found = [one for part in parts for one in part.get("memory", [])]
    loads = ", ".join(str(part["load"]) for part in parts)
    head = f"{machine.headline(parts[0])}, commit {parts[0]['commit']}; load averages {loads}"
    return f"""# Tensor-train embedding bags

`python benchmarks/tensor_train.py --rows 1M`, `--rows 10M` and `--memory`, each with `--json FILE`, then `--page`.

{head}

CPU milliseconds of ours on one core, and the others' CPU time over ours within a round (medians): above 1 they take
longer. Training is lookup, gradient and update, with the bags handed out.

{goals(results, found)}

{report(results)}

## Memory

Resident memory at its highest over two updates and a lookup, above what the process held before, MiB: the most of five
times, once after they had been done, so that libraries' code and threads' stacks are not counted, with 0.1 s between
calls, and with glibc giving back blocks of 64 KiB that are freed. Needed are, beside the cores: their gradient, the
bags, the ids in the kernel's order (8 bytes each), and the last core turned, with its gradient. Back to back, XLA has
not yet freed what a call held when the next begins, and there is up to one update's memory more.

{memory_table(found)}

{notes}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--rows", choices=list(FACTORS), help="the cases of this table alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-of", nargs=2)
    parser.add_argument("--page", nargs="+", type=Path, metavar="FILE", help="write the page, of these JSON files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(json.dumps(memory_of(*options.memory_of)))
        return
    if options.page:
        target, *files = options.page
        old = target.read_text() if target.exists() else ""
        target.write_text(page(files, old[old.index(NOTES) :] if NOTES in old else ""))
        return
    facts = machine.facts() | {"commit": machine.commit()}
    print(f"{machine.headline(facts)}, commit {facts['commit']}\n", flush=True)
    if options.memory:
        facts["memory"] = memories()
        print(memory_table(facts["memory"]))
    else:
        cases = options.cases or [case for case in CASES if not options.rows or case.startswith(f"{options.rows}:")]
        facts["results"] = timed(cases, options.rounds)
        print(report(facts["results"]))
    print(f"\nLoad average at the end: {machine.facts()['load']}")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def timed(cases: list[str], rounds: int) -> list[dict]:
    """`measure` of each case; of those of rank 16 with ten ids a bag the slow ways too."""
    try:
        import tltorch  # noqa: F401

        slow = SLOW
    except ImportError:
        slow = SLOW[:-1]
    results = []
    for name in cases:
        rank, hot = name.split(":")[2:]
        few = ("ours", "unique_bmm", "dense")
        results.append(measure(name, [*few, *(slow if (rank, hot) == ("16", "10") else ())], rounds))
        print(name, {what: results[-1][f"{what}_ratio"] for what in ("forward", "train")}, flush=True)
    return results


if __name__ == "__main__":
    main()
