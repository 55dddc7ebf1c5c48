"""The parts of the TT-Rec experiment that train nothing: equality, counts, distributions, time."""

import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.metrics

from multipod.data.clicks.text import parse
from multipod.experiments.outcome import Claim, Section
from multipod.metrics.ranking import auc
from multipod.models.dlrm_interactions import interact
from multipod.models.dlrm_published import KAGGLE_ROWS, TERABYTE_10M_ROWS, kaggle, mlperf, terabyte
from multipod.nn.tables.bags import dense_bag
from multipod.nn.tables.hot_rows import bag_with_hot_rows, count_ids, empty_cache, refresh
from multipod.nn.tables.tensor_train import TensorTrain, materialize, tensor_train
from multipod.nn.tables.tensor_train_bag import bag
from multipod.nn.tables.tensor_train_init import initial_cores, spread

PAPER = "arXiv:2101.11714"
Part = tuple[list[Claim], Section]
PAPER_FACTORS = {
    10_131_227: (200, 220, 250), 8_351_593: (200, 200, 209), 7_046_547: (200, 200, 200), 5_461_306: (166, 175, 188),
    2_202_608: (125, 130, 136), 286_181: (53, 72, 75), 142_572: (50, 52, 55),
}  # fmt: skip


def equality() -> Part:
    """R1: bags and gradients against those of the table that the cores stand for."""
    rows = []
    worst = {"float32": 0.0, "float64": 0.0}
    for cores, sizes, columns, rank in (
        (2, (9, 11), (3, 4), 5),
        (3, (7, 9, 11), (2, 3, 4), 7),
        (4, (5, 4, 3, 7), (2, 2, 3, 2), 4),
    ):
        tt = tensor_train(
            int(np.prod(sizes)) - 3, int(np.prod(columns)), rank, row_factors=sizes, column_factors=columns
        )
        rng = np.random.default_rng(cores)
        ids = rng.integers(0, tt.rows, 40).astype(np.int32)
        ids[:20] = ids[0]
        offsets = np.array([0, 3, 3, 20, 40], np.int32)
        for dtype in worst:
            with jax.enable_x64(dtype == "float64"):
                given = tuple(jnp.asarray(rng.normal(size=shape) / shape[1] ** 0.5, dtype) for shape in tt.shapes)
                forward, back = _ours_and_tables(tt, given, jnp.asarray(ids), jnp.asarray(offsets))
            worst[dtype] = max(worst[dtype], forward, back)
            rows.append((str(cores), dtype, f"{forward:.1e}", f"{back:.1e}"))
    return equality_claims(worst), Section(
        "R1: values and gradients",
        "Duplicates, an empty bag, padding rows; relative to the largest value.",
        ("cores", "type", "forward", "gradient"),
        rows,
    )


def equality_claims(worst: Mapping[str, float]) -> list[Claim]:
    """R1, from the largest relative difference by type."""
    limits = {"float32": 1e-5, "float64": 1e-10}
    return [
        Claim(
            f"R1 lookups and gradients equal those of the table, {dtype}", PAPER, error, limits[dtype],
            error < limits[dtype], fails_if="a bag or its gradient is not that of the table which the cores stand for",
        )
        for dtype, error in worst.items()
    ]  # fmt: skip


def _ours_and_tables(tt: TensorTrain, cores: Any, ids: jax.Array, offsets: jax.Array) -> tuple[float, float]:
    """How far bags, and gradients of a function of them, are from those of the table."""

    def ours(cores: Any) -> jax.Array:
        return bag(tt, cores, ids, offsets)

    def theirs(cores: Any) -> jax.Array:
        return dense_bag(materialize(tt, cores), ids, offsets)

    def slopes(function: Callable[[Any], jax.Array]) -> Any:
        return jax.jit(jax.grad(lambda cores: (function(cores) ** 2).sum()))(cores)

    back = max(_apart(a, b) for a, b in zip(slopes(ours), slopes(theirs), strict=True))
    return _apart(jax.jit(ours)(cores), jax.jit(theirs)(cores)), back


def compression() -> Part:
    """R2: the published ratios, from parameter counts."""
    columns = {16: (2, 2, 4), 64: (4, 4, 4)}
    rows, claims = [], []
    for name, sizes, features, tables, rank, published in (
        ("Kaggle", KAGGLE_ROWS, 16, 3, 8, 4.1),
        ("Kaggle", KAGGLE_ROWS, 16, 7, 32, 117.0),
        ("Kaggle", KAGGLE_ROWS, 16, 7, 8, 222.0),
        ("Terabyte, 10 M", TERABYTE_10M_ROWS, 64, 7, 8, 112.0),
    ):
        least = sorted(sizes)[-tables]
        large = [n for n in sizes if n >= least]
        theirs = [
            tensor_train(n, features, rank, row_factors=PAPER_FACTORS.get(n, ()), column_factors=columns[features])
            for n in large
        ]
        rest = features * (sum(sizes) - sum(large))
        ratio = features * sum(sizes) / (rest + sum(tt.parameters for tt in theirs))
        model = (kaggle if features == 16 else terabyte)(tt_rows=least, tt_rank=rank)
        rows.append(
            (name, str(tables), str(rank), f"{published:g}", f"{ratio:.1f}", f"{model.embeddings.compression:.1f}")
        )
        claims.append(compression_claim(name, tables, rank, published, ratio))
    text = "Tables alone, the MLPs not counted. Kaggle with the paper's factors; beside it our own, which pad less."
    return claims, Section(
        "R2: compression", text, ("set", "tables", "rank", "published", "counted", "our factors"), rows
    )


def compression_claim(name: str, tables: int, rank: int, published: float, ratio: float) -> Claim:
    """R2, from the ratio that was counted."""
    return Claim(
        f"R2 {name}: {tables} tables at rank {rank} are {published:g} times smaller", PAPER, ratio,
        f"{published:g} within 1 %", abs(ratio / published - 1) < 0.01,
        fails_if="tables of these sizes and ranks have another number of parameters than published",
    )  # fmt: skip


def entries() -> Part:
    """R3: the distribution of the entries, against the Gaussian that they should have."""
    rows, better, at8 = [], True, 0.0
    for rank in (1, 2, 4, 8, 16):
        tt = tensor_train(8000, 64, rank)
        found = {}
        for kind in ("sampled-gaussian", "gaussian"):
            several = [
                spread(np.asarray(materialize(tt, initial_cores(tt, jax.random.key(seed), kind))), 1 / (3 * tt.rows))
                for seed in range(3)
            ]
            found[kind] = [
                float(np.mean([getattr(one, name) for one in several]))
                for name in ("kurtosis", "near_zero", "distance", "variance")
            ]
        sampled, plain = found["sampled-gaussian"], found["gaussian"]
        better &= abs(sampled[0] - 3) < abs(plain[0] - 3)
        at8 = sampled[2] if rank == 8 else at8
        rows.append((str(rank), *(f"{v:.3g}" for pair in zip(sampled[:3], plain[:3], strict=True) for v in pair)))
    head = (
        "rank",
        "kurtosis, sampled",
        "Gaussian",
        "within 0.05 sd, sampled",
        "Gaussian",
        "distance, sampled",
        "Gaussian",
    )
    text = "Entries of tables of 8,000 x 64, three seeds. A Gaussian has kurtosis 3 and 0.0399 within 0.05 deviations."
    return entries_claims(better, at8), Section("R3: initial entries", text, head, rows)


def entries_claims(better: bool, distance: float) -> list[Claim]:
    """R3, from whether the kurtosis is nearer to 3 at every rank, and the distance of the entries at rank 8."""
    return [
        Claim("R3 kurtosis of the sampled Gaussian is nearer to 3 at every rank", PAPER, "yes" if better else "no",
              "yes", better, fails_if="products of plain Gaussian cores are as near to a Gaussian at some rank"),
        Claim("R3 Kolmogorov-Smirnov distance to N(0, 1/3n) at rank 8", PAPER, distance, 0.01, distance < 0.01,
              fails_if="entries have another variance or shape than the Gaussian that they should have"),
    ]  # fmt: skip


def cache_semantics() -> tuple[float, float]:
    """R9: the largest gradient of the cores from cached lookups, the largest change of rows that stay cached."""
    tt = tensor_train(500, 16, 4)
    cores = initial_cores(tt, jax.random.key(0), variance=1.0)
    rows, hot = empty_cache(tt, 3)
    ids, offsets = jnp.array([7, 7, 9, 9, 9, 4, 4], jnp.int32), jnp.array([0, 7], jnp.int32)
    cores, rows, hot, _ = refresh(tt, cores, rows, count_ids(hot, ids, offsets))
    slopes = jax.grad(lambda c: bag_with_hot_rows(tt, c, rows, hot, ids, offsets).sum())(cores)
    trained = rows + 1
    _, again, _, _ = refresh(tt, cores, trained, hot)
    return max(float(jnp.abs(s).max()) for s in slopes), float(jnp.abs(again - trained).max())


def timing() -> Part:
    """R10, R11: CPU time of a training step on 512 ids, against rebuilding the table; and by rank."""
    rows, ratios = [], []
    for count in (100_000, 300_000, 1_000_000):
        tt = tensor_train(count, 16, 8)
        ours, rebuilt = (_step_ms(tt, way) for way in (True, False))
        ratios.append(rebuilt / ours)
        rows.append((f"{count:,}", "8", f"{ours:.2f}", f"{rebuilt:.1f}", f"{ratios[-1]:.0f}"))
    by_rank = {}
    for rank in (8, 16, 32, 64):
        by_rank[rank] = _step_ms(tensor_train(1_000_000, 16, rank), True)
        rows.append(("1,000,000", str(rank), f"{by_rank[rank]:.2f}", "", ""))
    text = "Lookup of 512 Zipf(1.2) ids, gradient and SGD; CPU milliseconds of the process, median of five."
    head = ("rows", "rank", "ours, ms", "rebuilding, ms", "ratio")
    return timing_claims(ratios, by_rank), Section("R10, R11: time", text, head, rows)


def timing_claims(ratios: Sequence[float], by_rank: Mapping[int, float]) -> list[Claim]:
    """R10 and R11, from rebuilding over ours by growing numbers of rows, and milliseconds by rank."""
    power = float(np.polyfit(np.log(list(by_rank)), np.log(list(by_rank.values())), 1)[0])
    return [
        Claim("R10 a step on the rows of a batch, over one that rebuilds the table, from 100,000 rows on (least ratio)",
              PAPER, min(ratios), 3.0, min(ratios) >= 3 and list(ratios) == sorted(ratios),
              fails_if="the work of a step goes by the rows of the table and not by those of the batch"),
        Claim("R11 time grows with the rank, at most with its square (exponent)", PAPER, power, 2.0, 0 < power <= 2,
              fails_if="a higher rank costs nothing, so that its work is not what is timed, or more than its square"),
    ]  # fmt: skip


def _step_ms(tt: Any, ours: bool) -> float:
    rng = np.random.default_rng(0)
    ids = jnp.asarray(
        (rng.zipf(1.2, 512).astype(np.uint64) * np.uint64(2654435761) % np.uint64(tt.rows)).astype(np.int32)
    )
    offsets = jnp.arange(513, dtype=jnp.int32)

    def loss(cores: Any) -> jax.Array:
        return ((bag(tt, cores, ids, offsets) if ours else materialize(tt, cores)[ids]) ** 2).sum()

    @jax.jit
    def step(cores: Any) -> Any:
        return jax.tree.map(lambda core, slope: core - 0.01 * slope, cores, jax.grad(loss)(cores))

    cores = jax.block_until_ready(step(initial_cores(tt, jax.random.key(0))))
    taken = []
    for _ in range(5):
        start = _cpu_s()
        cores = jax.block_until_ready(step(cores))
        taken.append(_cpu_s() - start)
    return 1000 * float(np.median(taken))


def pieces() -> Part:
    """R12: counts, AUC with ties, hand-made lines, evaluation points."""

    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 5000), np.round(rng.random(5000), 2)
    apart = abs(auc(labels, scores) - sklearn.metrics.roc_auc_score(labels, scores))
    lines = parse(
        b"1" + b"\t" + b"\t".join([b"-2", *[b""] * 12]) + b"\t" + b"\t".join([b"ffffffff", *[b""] * 25]) + b"\n"
    )
    parsed = (lines.labels[0], lines.counts[0, 0], int(lines.fields[0, 0]), int(lines.fields[0, 1])) == (
        1,
        -2,
        2**32 - 1,
        0,
    )
    tops = [model.layers["top/0"][0] for model in (kaggle(), terabyte(), mlperf())]
    pairs = interact(jnp.ones((1, 27, 2)), "gather").shape[1]
    points = 4_195_197_692 // 2048 // 20
    layers = mlperf().layer_parameters
    checks = [
        ("pairs of 27 vectors", pairs, 351), ("inputs of the top MLPs", tops, [367, 415, 479]),
        ("MLPerf's bottom and top parameters", [layers["bottom"], layers["top"]], [171_392, 2_197_505]),
        ("MLPerf's table parameters", mlperf().embeddings.parameters, 24_034_227_072),
        ("updates between evaluations at batch 2,048", points, 102_421), ("hand-made line read right", parsed, True),
        ("difference of AUC to scikit-learn below 1e-12, 100 tied scores", apart < 1e-12, True),
    ]  # fmt: skip
    right = sum(found == wanted for _, found, wanted in checks)
    rows = [(name, str(found), str(wanted)) for name, found, wanted in checks]
    return [pieces_claim(right, len(checks))], Section(
        "R12: pieces of DLRM", "MLPerf rounds the points to every 102,400 updates.", ("what", "here", "published"), rows
    )


def pieces_claim(right: int, checks: int) -> Claim:
    """R12, from how many of the checks came out as published."""
    return Claim("R12 pieces of DLRM as published", "arXiv:1906.00091", f"{right} of {checks}", f"{checks}",
                 right == checks,
                 fails_if="a layer, a table, a parsed line, an evaluation point or a tied AUC differs")  # fmt: skip


def _apart(a: Any, b: Any) -> float:
    return float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
