"""TT-Rec's claims (arXiv:2101.11714), tried at the size of two cores, and DLRM at MLPerf's table sizes.

The quality claims are tried on generated clicks of a known truth, where the best AUC is known; Criteo's own logs are
not needed. What is checked for equality (R1, R9, R12) is checked in the test suite too, where a failure stops a build.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multipod.data.clicks.synthetic import Synthetic
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.tt_rec_checks import (
    PAPER,
    Part,
    cache_semantics,
    compression,
    entries,
    equality,
    pieces,
    timing,
)
from multipod.experiments.tt_rec_runs import Result, small
from multipod.experiments.tt_rec_runs import run as train
from multipod.metrics.ranking import auc
from multipod.models.dlrm import Dlrm, mlperf
from multipod.models.dlrm_sparse import sparse_state, sparse_update
from multipod.nn.hot_rows import counted, empty, refreshed
from multipod.nn.tensor_train import tensor_train

Report = Callable[[str], None]
LARGE = 20_000
"""Fields with at least so many ids are tensor trains in the runs: three of eight, 97 % of the parameters."""

RATE = 0.02
DATA = Synthetic()


def run(report: Report) -> Outcome:
    """All of R1 to R13, and the tables of MLPerf's size."""
    claims: list[Claim] = []
    sections: list[Section] = []
    results: dict[str, Result] = {}
    parts: dict[str, Callable[[], Part]] = {
        "R1: values and gradients": equality,
        "R2: compression": compression,
        "R3: initial entries": entries,
        "R5, R6: quality by rank, and hashing": lambda: quality(report, results),
        "R4: initialisation under SGD": lambda: initialisation(report),
        "R7: hit rates": hit_rates,
        "R8, R9: quality with a cache": lambda: caching(report, results),
        "R10, R11: time": timing,
        "R12: pieces of DLRM": pieces,
        "R13: towards the best AUC": lambda: towards_best(report),
        "MLPerf's tables": lambda: mlperf_tables(report),
    }
    for name, part in parts.items():
        report(name)
        found, section = part()
        claims += found
        sections.append(section)
    figures = {"quality": _figure(results)}
    return Outcome("TT-Rec: tensor-train tables for DLRM", tuple(claims), tuple(sections), figures)


def quality(report: Report, results: dict[str, Result]) -> Part:
    """R5 and R6: AUC by rank, dense and hashed beside it."""
    rows, claims = [], []
    for truth in ("structured", "unstructured"):
        data = Synthetic(truth=truth)
        best = auc(*data.best())
        results[f"{truth} dense"] = dense = train(small(data), data, "adagrad", RATE)
        rows.append(_row(truth, "dense", dense, best, small(data)))
        aucs, gaps = [], []
        for rank in (2, 8, 32):
            model = small(data, tt_rows=LARGE, tt_rank=rank)
            hashed = hashed_to(data, model.table_parameters)
            results[f"{truth} {rank}"] = ours = train(model, data, "adagrad", RATE)
            results[f"{truth} hash {rank}"] = other = train(hashed, data, "adagrad", RATE)
            report(f"  {truth}, rank {rank}: {ours.auc:.4f}, hashed {other.auc:.4f}, dense {dense.auc:.4f}")
            rows += [
                _row(truth, f"rank {rank}", ours, best, model),
                _row(truth, f"hashed, as rank {rank}", other, best, hashed),
            ]
            aucs.append(ours.auc)
            gaps.append(ours.auc - other.auc)
        model = small(data, tt_rows=LARGE, tt_rank=8)
        loss = dense.auc - aucs[1]
        claims += [
            Claim(
                f"R5 {truth}: rank 8, {model.compression:.0f} times smaller, loses no more AUC than 0.003",
                PAPER,
                loss,
                0.003,
                loss <= 0.003,
                (0,),
            ),
            Claim(
                f"R6 {truth}: AUC rises with the rank (least step)",
                PAPER,
                min(np.diff(aucs)),
                0.0,
                bool(min(np.diff(aucs)) > 0),
                (0,),
            ),
            Claim(
                f"R6 {truth}: better than hashing to the same size (least gap)",
                PAPER,
                min(gaps),
                0.001,
                min(gaps) > 0.001,
                (0,),
            ),
        ]
    text = f"300,000 examples, one epoch, Adagrad at {RATE} for all; the best AUC is that of the true probabilities."
    head = ("truth", "tables", "times smaller", "AUC", "best AUC", "accuracy", "epoch, s")
    return claims, Section("R5, R6: quality by rank, and hashing", text, head, rows, "quality")


def hashed_to(data: Synthetic, parameters: int) -> Dlrm:
    """The model whose tables are hashed so that they have about as many parameters."""
    low, high = 1, max(data.rows)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if small(data, hash_rows=middle).table_parameters <= parameters else (low, middle - 1)
        )
    return small(data, hash_rows=low)


def _row(truth: str, what: str, result: Result, best: float, model: Dlrm) -> tuple[str, ...]:
    return (
        truth,
        what,
        f"{model.compression:.1f}",
        f"{result.auc:.4f}",
        f"{best:.4f}",
        f"{result.accuracy:.2%}",
        f"{result.seconds:.1f}",
    )


def initialisation(report: Report) -> Part:
    """R4: under SGD the scale of the cores decides whether they learn."""
    data = Synthetic(truth="structured")
    rank, rate, core_rate = 8, 0.1, 5.0
    arms = {
        "sampled, released scale": ({"tt_scale": "released"}, core_rate),
        "sampled, exact scale": ({}, core_rate),
        "Gaussian, exact scale": ({"tt_init": "gaussian"}, core_rate),
        "frozen cores": ({}, 0.0),
    }
    found = {}
    for name, (fields, cores) in arms.items():
        found[name] = train(small(data, tt_rows=LARGE, tt_rank=rank, **fields), data, "sgd", rate, cores).auc
        report(f"  {name}: {found[name]:.4f}")
    gap = found["sampled, released scale"] - found["sampled, exact scale"]
    claims = [
        Claim("R4 under SGD the released scale learns more than the exact one", PAPER, gap, 0.003, gap > 0.003, (0,)),
        Claim(
            "R4 learning cores beat frozen ones",
            PAPER,
            found["sampled, released scale"] - found["frozen cores"],
            0.003,
            found["sampled, released scale"] - found["frozen cores"] > 0.003,
            (0,),
        ),
    ]
    rows = [(name, f"{value:.4f}") for name, value in found.items()]
    text = f"Structured truth, rank {rank}, SGD at {rate}, the cores at {core_rate}."
    return claims, Section("R4: initialisation under SGD", text, ("cores", "AUC"), rows)


def hit_rates() -> Part:
    """R7: how many lookups a small cache serves, against what Zipf's law says."""
    ids = DATA.train().arrays["ids"][:, 0]
    tt = tensor_train(DATA.rows[0], 16, 8)
    weights = np.arange(1, tt.rows + 1) ** -DATA.zipf
    shares = np.cumsum(weights) / weights.sum()
    size = 3000
    blocks = ids[: len(ids) // size * size].reshape(-1, size)
    offsets = jnp.array([0, size], jnp.int32)
    count = jax.jit(counted)
    rows, off, largest = [], 0.0, 0.0
    for share in (0.0005, 0.002, 0.01):
        cached, hot = empty(tt, round(share * tt.rows))
        cores = tuple(jnp.zeros(shape) for shape in tt.shapes)
        for block in blocks[: len(blocks) // 10]:
            hot = count(hot, jnp.asarray(block), offsets)
        _, cached, hot, _ = jax.jit(lambda c, r, h: refreshed(tt, c, r, h))(cores, cached, hot)
        hot = hot._replace(seen=jnp.int32(0), hits=jnp.int32(0))
        for block in blocks[len(blocks) // 10 :]:
            hot = count(hot, jnp.asarray(block), offsets)
        measured, expected = float(hot.hit_rate), float(shares[len(hot.ids) - 1])
        off, largest = max(off, abs(measured - expected)), measured
        rows.append((f"{share:.2%}", f"{len(hot.ids):,}", f"{measured:.3f}", f"{expected:.3f}"))
    claims = [
        Claim("R7 hit rates are those of Zipf's law (largest difference)", PAPER, off, 0.02, off < 0.02),
        Claim("R7 a cache of 1 % of the rows serves 60 % of the lookups", PAPER, largest, 0.6, largest >= 0.6),
    ]
    text = "Exponent 1.05, 120,000 rows; counted over a tenth of 300,000 lookups by eight counters a row, then cached."
    return claims, Section("R7: hit rates", text, ("cache", "rows", "hit rate", "by Zipf's law"), rows)


def caching(report: Report, results: dict[str, Result]) -> Part:
    """R8, R9: the AUC with a cache, and that cached rows and cores are apart."""
    model = small(DATA, tt_rows=LARGE, tt_rank=8)
    without = results.get("unstructured 8") or train(model, DATA, "adagrad", RATE)
    rows, worst = [("none", f"{without.auc:.4f}")], 0.0
    for share in (0.001, 0.01):
        found = train(model, DATA, "adagrad", RATE, cache=share)
        report(f"  cache of {share:.1%}: {found.auc:.4f}, without {without.auc:.4f}")
        rows.append((f"{share:.1%}", f"{found.auc:.4f}"))
        worst = max(worst, without.auc - found.auc)
    apart, kept = cache_semantics()
    claims = [
        Claim(
            "R8 a cache under the same optimizer costs no more AUC than 0.002",
            PAPER,
            worst,
            0.002,
            worst <= 0.002,
            (0,),
        ),
        Claim("R9 cached lookups send the cores no gradient (largest entry)", PAPER, apart, 0.0, apart == 0),
        Claim("R9 rows that stay in the cache keep their values (largest change)", PAPER, kept, 0.0, kept == 0),
    ]
    text = "Unstructured truth, rank 8; the caches are filled once, after a tenth of the epoch."
    return claims, Section("R8, R9: quality with a cache", text, ("cached rows", "AUC"), rows)


def towards_best(report: Report) -> Part:
    """R13: AUC by the number of examples, against the best."""
    aucs, rows = [], []
    data = Synthetic(examples=1_000_000)
    best = auc(*data.best())
    error = float(np.sqrt(best * (1 - best) / (0.3 * data.tests)))
    for count in (100_000, 300_000, 1_000_000):
        part = _First(data, count)
        found = train(small(data), part, "adagrad", RATE)  # type: ignore[arg-type]
        report(f"  {count:,} examples: {found.auc:.4f}, best {best:.4f}")
        aucs.append(found.auc)
        rows.append((f"{count:,}", f"{found.auc:.4f}", f"{best:.4f}"))
    good = aucs == sorted(aucs) and aucs[-1] < best + 2 * error
    claims = [
        Claim(
            "R13 AUC of dense tables rises towards the best and stays below it (last)",
            "by construction",
            aucs[-1],
            best,
            good,
            (0,),
        )
    ]
    return claims, Section(
        "R13: towards the best AUC",
        f"Standard error of an AUC here: {error:.4f}.",
        ("examples", "AUC", "best AUC"),
        rows,
    )


class _First:
    """The first examples of a data set."""

    def __init__(self, data: Synthetic, count: int) -> None:
        self.data, self.count, self.test = data, count, data.test

    def train(self) -> Any:
        """These examples."""
        source = self.data.train()
        return type(source)({name: array[: self.count] for name, array in source.arrays.items()})


def mlperf_tables(report: Report, updates: int = 200, batch: int = 512) -> Part:
    """Tables of MLPerf's sizes as tensor trains, allocated and trained on."""
    model = mlperf(tt_rows=10_000, tt_rank=16)
    params = jax.jit(lambda: model.init(jax.random.key(0))[0])()
    state = sparse_state(params, "adagrad")
    step = jax.jit(lambda state, batch: sparse_update(model, state, batch, "adagrad", 0.01), donate_argnums=0)
    rng = np.random.default_rng(0)
    losses, taken = [], []
    for update in range(updates):
        given = _mlperf_batch(model, batch, rng)
        start = time.perf_counter()
        state, loss = step(state, given)
        losses.append(float(loss))
        taken.append(time.perf_counter() - start)
        if update % 50 == 49:
            report(f"  update {update + 1}: loss {np.mean(losses[-50:]):.4f}, {np.median(taken[1:]):.3f} s")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    dense_gib = 4 * sum(model.rows) * model.features / 2**30
    held_mib = 4 * model.table_parameters / 2**20
    first, last = float(np.mean(losses[:20])), float(np.mean(losses[-20:]))
    claims = [
        Claim("MLPerf's 187.8 M rows x 128 as tensor trains, MiB of tables", PAPER, held_mib, 100.0, held_mib < 100),
        Claim(
            f"they train: loss after {updates} updates, below that of the first twenty",
            PAPER,
            last,
            first,
            last < first - 0.01,
            (0,),
        ),
    ]
    rows = [
        ("tables, dense", f"{dense_gib:.1f} GiB"), ("tables as allocated", f"{held_mib:.1f} MiB"),
        ("process at its largest", f"{peak_mib:,.0f} MiB"),
        (f"update of {batch} examples, median", f"{np.median(taken[1:]):.3f} s"),
        ("loss, first and last 20 updates", f"{first:.4f}, {last:.4f}"),
    ]  # fmt: skip
    text = (
        f"13 of 26 tables at rank 16, the small ones dense: {model.compression:,.0f} times smaller. Zipf(1.2) ids "
        "scattered over the rows, clicks drawn from the dense features and the first field; Adagrad at 0.01."
    )
    return claims, Section("MLPerf's tables", text, ("what", "measured"), rows)


def _mlperf_batch(model: Dlrm, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    drawn = rng.zipf(1.2, (count, len(model.rows))).astype(np.uint64)
    ids = (drawn * np.uint64(2654435761) % np.array(model.rows, np.uint64)).astype(np.int32)
    dense = rng.exponential(1.0, (count, model.dense)).astype(np.float32)
    logits = dense[:, 0] - dense[:, 1] + np.where(drawn[:, 0] % np.uint64(2) == 0, 1.0, -1.0)
    return {"dense": dense, "ids": ids, "label": (rng.random(count) < 1 / (1 + np.exp(-logits))).astype(np.int32)}


def _figure(results: dict[str, Result]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, truth in zip(figure.subplots(1, 2), ("structured", "unstructured"), strict=True):
        for name, prefix in (("tensor train", ""), ("hashed", "hash ")):
            runs = [results[f"{truth} {prefix}{rank}"] for rank in (2, 8, 32)]
            axes.plot([run.parameters for run in runs], [run.auc for run in runs], "o-", label=name)
        dense = results[f"{truth} dense"]
        axes.plot(dense.parameters, dense.auc, "s", color="black", label="dense")
        axes.set(xscale="log", xlabel="parameters in tables", ylabel="AUC", title=f"{truth} truth")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
