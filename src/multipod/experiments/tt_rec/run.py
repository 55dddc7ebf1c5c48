"""TT-Rec's claims (arXiv:2101.11714), tried at the size of two cores, and DLRM at MLPerf's table sizes.

The quality claims are tried on generated clicks of a known truth, where the best AUC is known; Criteo's own logs are
not needed. What is checked for equality (R1, R9, R12) is checked in the test suite too, where a failure stops a build.
"""

import itertools
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from multipod.data.clicks.synthetic import Synthetic
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.tt_rec.checks import (
    PAPER,
    Part,
    cache_semantics,
    compression,
    entries,
    equality,
    pieces,
    timing,
)
from multipod.experiments.tt_rec.places import places
from multipod.experiments.tt_rec.training import Result, small
from multipod.experiments.tt_rec.training import run as train
from multipod.metrics.ranking import auc
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_published import mlperf
from multipod.models.dlrm_sparse import sparse_state, sparse_update
from multipod.nn.tables.hot_rows import count_ids, empty_cache, refresh
from multipod.nn.tables.tensor_train import tensor_train

Report = Callable[[str], None]
LARGE = 20_000
"""Fields with at least so many ids are tensor trains in the runs: three of eight, 97 % of the parameters."""

RATE, CORE_RATE, HASH_RATE = 0.02, 0.05, 0.05
"""Of dense tables and layers, of cores, and of all where tables are hashed."""

RANKS = (2, 8, 22, 32)
LOSSLESS = (8, 22)
"""Ranks at which R5 is tried. Rank 22 was taken after rank 8 had lost more than 0.003; both are claims."""

SEEDS = (0, 1, 2)
SEEN = f"means over seeds {', '.join(map(str, SEEDS))}, of data and model"
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
        "R8, R9: quality with a cache": lambda: caching(report),
        "R10, R11: time": timing,
        "R12: pieces of DLRM": pieces,
        "R13: towards the best AUC": lambda: towards_best(report),
        "Places of tables": lambda: places(report),
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
    """R5 and R6: AUC by rank, dense and hashed beside it; means over the seeds, which are of the data too."""
    rows, claims = [], []
    for truth in ("structured", "unstructured"):
        found: dict[str, list[Result]] = {}
        best, models = [], {"dense": small(DATA)}
        for rank in RANKS:
            models[f"rank {rank}"] = small(DATA, tt_rows=LARGE, tt_rank=rank)
            models[f"hashed, as rank {rank}"] = hashed_to(DATA, models[f"rank {rank}"].embeddings.parameters)
        for seed in SEEDS:
            data = Synthetic(truth=truth, seed=seed)
            best.append(auc(*data.best()))
            for name, model in models.items():
                rate = RATE if not name.startswith("hashed") else HASH_RATE
                found.setdefault(name, []).append(train(model, data, "adagrad", rate, CORE_RATE, seed=seed))
            report(f"  {truth}, seed {seed}: " + ", ".join(f"{n} {r[-1].auc:.4f}" for n, r in found.items()))
        results |= {f"{truth} {name}": _mean(each) for name, each in found.items()}
        rows += [_row(truth, name, each, best, models[name]) for name, each in found.items()]
        times = {rank: models[f"rank {rank}"].embeddings.compression for rank in RANKS}
        claims += quality_claims(truth, {name: _aucs(each) for name, each in found.items()}, times)
    text = (
        f"300,000 examples, one epoch, Adagrad, {SEEN}. Rates are the best of 0.01, 0.02, 0.05 and 0.1 on data of "
        f"another seed (100): {RATE} for dense tables and layers, {CORE_RATE} for cores, {HASH_RATE} for models with "
        "hashed tables. (At one rate of 0.02 for all, the cores learn too slowly: rank 8 then loses 0.003 more, and "
        "hashing to the size of rank 32 is better than rank 32.) The best AUC is that of the true probabilities."
    ) + _why_not(
        claims,
        "R6",
        "Where AUC does not rise with the rank, the step is a fraction of the spread over seeds: the lower rank is as "
        "good as the dense tables already, and leaves a higher one nothing to gain.",
    )
    head = ("truth", "tables", "times smaller", "AUC", "largest - least", "best AUC", "accuracy", "epoch, s")
    return claims, Section("R5, R6: quality by rank, and hashing", text, head, rows, "quality")


def quality_claims(truth: str, aucs: dict[str, np.ndarray], times: Mapping[int, float]) -> list[Claim]:
    """R5 and R6, from AUCs by table and seed, and how many times smaller each rank is."""
    ours = [aucs[f"rank {rank}"] for rank in RANKS]
    steps = [b - a for a, b in itertools.pairwise(ours)]
    gaps = [ours[k] - aucs[f"hashed, as rank {rank}"] for k, rank in enumerate(RANKS)]
    least_step, least_gap = (min(several, key=np.mean) for several in (steps, gaps))
    lossless = [
        over_seeds(
            f"R5 {truth}: rank {rank}, {times[rank]:.0f} times smaller, loses no more AUC than 0.003",
            aucs["dense"] - aucs[f"rank {rank}"], 0.003, most=True,
            fails_if="tables of this rank cannot hold what dense ones learn in the same epoch",
        )
        for rank in LOSSLESS
    ]  # fmt: skip
    return [
        *lossless,
        over_seeds(f"R6 {truth}: AUC rises with the rank (least step)", least_step, 0.0,
                   fails_if="a higher rank learns no more than the one below it"),
        over_seeds(f"R6 {truth}: better than hashing to the same size (least gap)", least_gap, 0.001,
                   fails_if="rows that share a hashed row learn as much as rows that share cores"),
    ]  # fmt: skip


def over_seeds(text: str, values: np.ndarray, threshold: float, most: bool = False, *, fails_if: str) -> Claim:
    """A claim of the mean over seeds: that it is above the threshold, or with `most` not above it."""
    mean = float(np.mean(values))
    holds = mean <= threshold if most else mean > threshold
    return Claim(text, PAPER, mean, threshold, holds, SEEDS, float(np.ptp(values)), fails_if=fails_if)


def _why_not(claims: Sequence[Claim], part: str, why: str) -> str:
    """A sentence for the page, if a claim of this part does not hold."""
    return f" {why}" if any(one.claim.startswith(part) and not one.holds for one in claims) else ""


def _aucs(each: Sequence[Result]) -> np.ndarray:
    return np.array([one.auc for one in each])


def _mean(each: Sequence[Result]) -> Result:
    columns = ([getattr(one, name) for one in each] for name in ("auc", "accuracy", "parameters", "seconds"))
    auc_, accuracy, parameters, seconds = map(np.mean, columns)
    return Result(float(auc_), float(accuracy), int(parameters), float(seconds))


def hashed_to(data: Synthetic, parameters: int) -> Dlrm:
    """The model whose tables are hashed so that they have about as many parameters."""
    low, high = 1, max(data.rows)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if small(data, hash_rows=middle).embeddings.parameters <= parameters else (low, middle - 1)
        )
    return small(data, hash_rows=low)


def _row(truth: str, what: str, each: Sequence[Result], best: Sequence[float], model: Dlrm) -> tuple[str, ...]:
    mean = _mean(each)
    return (
        truth,
        what,
        f"{model.embeddings.compression:.1f}",
        f"{mean.auc:.4f}",
        f"{np.ptp(_aucs(each)):.4f}",
        f"{np.mean(best):.4f}",
        f"{mean.accuracy:.2%}",
        f"{mean.seconds:.1f}",
    )


ARMS: dict[str, dict[str, Any]] = {
    "sampled, released scale": {"tt_scale": "released"},
    "sampled, exact scale": {},
    "Gaussian, exact scale": {"tt_init": "gaussian"},
    "Gaussian, N(0, 1/n)": {"tt_init": "gaussian", "tt_scale": "reciprocal"},
}
"""What R4 compares: fields of the model."""

SGD_RANK, SGD_RATE, CORE_RATES = 8, 0.1, (0.1, 0.5, 2.0, 5.0)
AucsByArm = dict[tuple[str, float], np.ndarray]
"""(arm, rate of the cores) to [seeds]."""


def initialisation(report: Report) -> Part:
    """R4: under SGD the scale of the cores decides how fast they learn."""
    data = [Synthetic(truth="structured", seed=seed) for seed in SEEDS]

    def aucs_of(fields: dict[str, Any], core_rate: float) -> np.ndarray:
        model = small(DATA, tt_rows=LARGE, tt_rank=SGD_RANK, **fields)
        return _aucs([train(model, each, "sgd", SGD_RATE, core_rate, seed=each.seed) for each in data])

    aucs = {(name, rate): aucs_of(fields, rate) for rate in CORE_RATES for name, fields in ARMS.items()}
    frozen = aucs_of({}, 0.0)
    report("  " + ", ".join(f"{name} at {rate}: {np.mean(each):.4f}" for (name, rate), each in aucs.items()))
    claims = initialisation_claims(aucs, frozen)
    return claims, _initialisation_section(aucs, frozen, claims)


def initialisation_claims(aucs: AucsByArm, frozen: np.ndarray) -> list[Claim]:
    """R4, from AUCs by arm and rate of the cores, and with frozen cores."""
    released, exact, _, reciprocal = ARMS

    def least(better: str, worse: str) -> np.ndarray:
        return min((aucs[better, rate] - aucs[worse, rate] for rate in CORE_RATES[:-1]), key=np.mean)

    span = f"at core rates {CORE_RATES[0]} to {CORE_RATES[-2]} (least gap)"
    slowest = aucs[reciprocal, CORE_RATES[0]] - frozen
    return [
        over_seeds(
            f"R4 under SGD the released scale learns more than the exact one, {span}",
            least(released, exact),
            0.003,
            fails_if="a larger start does not make cores learn faster",
        ),
        over_seeds(
            f"R4 under SGD the exact scale learns more than N(0, 1/n), {span}",
            least(exact, reciprocal),
            0.003,
            fails_if="a smaller start does not make cores learn slower",
        ),
        over_seeds(
            "R4 cores from N(0, 1/n) at the dense rate learn no more than frozen ones",
            slowest,
            0.001,
            most=True,
            fails_if="cores that start too small learn at the dense rate all the same",
        ),
        over_seeds(
            "R4 learning cores beat frozen ones",
            aucs[released, CORE_RATES[-1]] - frozen,
            0.003,
            fails_if="training the cores gains nothing: the rest of the model learns it all",
        ),
    ]


def _initialisation_section(aucs: AucsByArm, frozen: np.ndarray, claims: Sequence[Claim]) -> Section:
    _, exact, _, reciprocal = ARMS
    gaps = {rate: (aucs[exact, rate] - aucs[reciprocal, rate]).mean() for rate in CORE_RATES}
    rows = [(name, *(f"{aucs[name, rate].mean():.4f}" for rate in CORE_RATES)) for name in ARMS]
    rows.append(("frozen cores", f"{frozen.mean():.4f}", *[""] * (len(CORE_RATES) - 1)))
    text = (
        f"AUC, {SEEN}; structured truth, rank {SGD_RANK}, SGD at {SGD_RATE}, the cores at a rate of their own. The "
        "faster that rate, the less the scale matters."
    ) + _why_not(
        claims,
        "R4 under SGD the exact scale",
        f"At a core rate of {CORE_RATES[0]} cores of the exact scale hardly leave where they began "
        f"({(aucs[exact, CORE_RATES[0]] - frozen).mean():+.4f} to frozen ones), so they have nothing ahead of "
        f"N(0, 1/n); at {CORE_RATES[1]} they are {gaps[CORE_RATES[1]]:.3f} ahead, at {CORE_RATES[2]} "
        f"{gaps[CORE_RATES[2]]:.3f}.",
    )
    head = ("cores", *(f"rate {rate}" for rate in CORE_RATES))
    return Section("R4: initialisation under SGD", text, head, rows)


def hit_rates() -> Part:
    """R7: how many lookups a small cache serves, against what Zipf's law says."""
    ids = DATA.train().arrays["ids"][:, 0]
    tt = tensor_train(DATA.rows[0], 16, 8)
    weights = np.arange(1, tt.rows + 1) ** -DATA.zipf
    shares = np.cumsum(weights) / weights.sum()
    size = 3000
    blocks = ids[: len(ids) // size * size].reshape(-1, size)
    offsets = jnp.array([0, size], jnp.int32)
    count = jax.jit(count_ids)
    rows, off, largest = [], 0.0, 0.0
    for share in (0.0005, 0.002, 0.01):
        cached, hot = empty_cache(tt, round(share * tt.rows))
        cores = tuple(jnp.zeros(shape) for shape in tt.shapes)
        for block in blocks[: len(blocks) // 10]:
            hot = count(hot, jnp.asarray(block), offsets)
        _, cached, hot, _ = jax.jit(lambda c, r, h: refresh(tt, c, r, h))(cores, cached, hot)
        hot = hot._replace(seen=jnp.int32(0), hits=jnp.int32(0))
        for block in blocks[len(blocks) // 10 :]:
            hot = count(hot, jnp.asarray(block), offsets)
        measured, expected = float(hot.hit_rate), float(shares[len(hot.ids) - 1])
        off, largest = max(off, abs(measured - expected)), measured
        rows.append((f"{share:.2%}", f"{len(hot.ids):,}", f"{measured:.3f}", f"{expected:.3f}"))
    claims = hit_claims(off, largest)
    text = "Exponent 1.05, 120,000 rows; counted over a tenth of 300,000 lookups by eight counters a row, then cached."
    return claims, Section("R7: hit rates", text, ("cache", "rows", "hit rate", "by Zipf's law"), rows)


def hit_claims(off: float, largest: float) -> list[Claim]:
    """R7, from the largest difference to Zipf's law, and the hit rate of the largest cache."""
    return [
        Claim("R7 hit rates are those of Zipf's law (largest difference)", PAPER, off, 0.02, off < 0.02,
              fails_if="eight counters a row mistake rare rows for frequent ones"),
        Claim("R7 a cache of 1 % of the rows serves 60 % of the lookups", PAPER, largest, 0.6, largest >= 0.6,
              fails_if="the cache holds other rows than the most frequent"),
    ]  # fmt: skip


def caching(report: Report) -> Part:
    """R8, R9: the AUC with a cache, and that cached rows and cores are apart."""
    model, shares = small(DATA, tt_rows=LARGE, tt_rank=8), (0.0, 0.001, 0.01)
    every = [Synthetic(seed=seed) for seed in SEEDS]
    found = {
        share: _aucs([train(model, data, "adagrad", RATE, cache=share, seed=data.seed) for data in every])
        for share in shares
    }
    report("  " + ", ".join(f"cache of {share:.1%}: {each.mean():.4f}" for share, each in found.items()))
    worst = max((found[0.0] - found[share] for share in shares[1:]), key=np.mean)
    claims = [
        cache_cost(worst),
        *cache_claims(*cache_semantics()),
    ]  # fmt: skip
    rows = [(f"{share:.1%}" if share else "none", f"{each.mean():.4f}") for share, each in found.items()]
    text = (
        f"Unstructured truth, rank 8, {SEEN}; Adagrad at {RATE} for cores and cached rows. The caches are filled once, "
        "after a tenth of the epoch."
    )
    return claims, Section("R8, R9: quality with a cache", text, ("cached rows", "AUC"), rows)


def cache_cost(lost: np.ndarray) -> Claim:
    """R8, from the AUC that a cache costs, by seed."""
    return over_seeds("R8 a cache under the same optimizer costs no more AUC than 0.002", lost, 0.002, most=True,
                      fails_if="cached rows learn less than the cores that they stand for")  # fmt: skip


def cache_claims(gradient: float, change: float) -> list[Claim]:
    """R9, from the cores' largest gradient by cached lookups, and the largest change of rows that stay cached."""
    return [
        Claim("R9 cached lookups send the cores no gradient (largest entry)", PAPER, gradient, 0.0, gradient == 0,
              fails_if="a cached row and its cores are both updated by one lookup"),
        Claim("R9 rows that stay in the cache keep their values (largest change)", PAPER, change, 0.0, change == 0,
              fails_if="a refresh writes the cores' rows over what cached ones have learnt"),
    ]  # fmt: skip


def towards_best(report: Report) -> Part:
    """R13: AUC by the number of examples, against the best."""
    counts = (100_000, 300_000, 1_000_000)
    aucs, best = np.zeros((len(SEEDS), len(counts))), np.zeros(len(SEEDS))
    for place, seed in enumerate(SEEDS):
        data = Synthetic(examples=counts[-1], seed=seed)
        best[place] = auc(*data.best())
        for k, count in enumerate(counts):
            part: Any = _First(data, count)
            aucs[place, k] = train(small(data), part, "adagrad", RATE, seed=seed).auc
        report(f"  seed {seed}: {aucs[place].round(4).tolist()}, best {best[place]:.4f}")
    error = float(np.sqrt(best[0] * (1 - best[0]) / (0.3 * DATA.tests)))
    rows = [
        (f"{count:,}", f"{aucs[:, k].mean():.4f}", f"{np.ptp(aucs[:, k]):.4f}", f"{best.mean():.4f}")
        for k, count in enumerate(counts)
    ]
    text = f"Here {SEEN}; the standard error of an AUC here is {error:.4f}."
    head = ("examples", "AUC", "largest - least", "best AUC")
    return [best_claim(aucs, best, error)], Section("R13: towards the best AUC", text, head, rows)


def best_claim(aucs: np.ndarray, best: np.ndarray, error: float) -> Claim:
    """R13, from AUCs [seeds, counts of examples], the best [seeds], and the standard error of one."""
    good = bool((np.diff(aucs) > 0).all() and (aucs[:, -1] < best + 2 * error).all())
    return Claim(
        "R13 AUC of dense tables rises towards the best and stays below it (last), with every seed",
        "by construction", float(aucs[:, -1].mean()), float(best.mean()), good, SEEDS, float(np.ptp(aucs[:, -1])),
        fails_if="more examples teach nothing, or the AUC passes what the true probabilities reach: the test leaks",
    )  # fmt: skip


class _First:
    """The first examples of a data set."""

    def __init__(self, data: Synthetic, count: int) -> None:
        self.data, self.count, self.test = data, count, data.test

    def train(self) -> Any:
        """These examples."""
        source = self.data.train()
        return type(source)({name: array[: self.count] for name, array in source.arrays.items()})


def mlperf_tables(report: Report, updates: int = 300, batch: int = 512) -> Part:
    """Tables of MLPerf's sizes as tensor trains, allocated, and trained on beside the same with frozen cores."""
    model = mlperf(tt_rows=10_000, tt_rank=16)
    report("  learning cores")
    learnt, update_s = _train_mlperf(model, report, updates, batch, core_rate=CORES_LEARN)
    report("  frozen cores")
    frozen, _ = _train_mlperf(model, report, updates, batch, core_rate=0.0)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    dense_gib = 4 * sum(model.rows) * model.features / 2**30
    held_mib = 4 * model.embeddings.parameters / 2**20
    rows = [
        ("tables, dense", f"{dense_gib:.1f} GiB"), ("tables as allocated", f"{held_mib:.1f} MiB"),
        ("process at its largest", f"{peak_mib:,.0f} MiB"),
        (f"update of {batch} examples, median", f"{update_s:.3f} s"),
        (f"loss, first and last {LAST} updates", f"{learnt[:LAST].mean():.4f}, {learnt[-LAST:].mean():.4f}"),
        ("the same with frozen cores", f"{frozen[:LAST].mean():.4f}, {frozen[-LAST:].mean():.4f}"),
    ]  # fmt: skip
    times = model.embeddings.compression
    text = (
        f"13 of 26 tables at rank 16, the small ones dense: {times:,.0f} times smaller. Zipf(1.2) ids "
        "scattered over the rows, clicks drawn from the dense features and the first field; Adagrad at 0.01. The dense "
        "layers alone lower the loss, so training is judged beside a run on the same batches whose cores stay as they "
        "began: each batch is new, so its loss before the update is one of held-out examples."
    )
    return mlperf_claims(held_mib, learnt, frozen), Section("MLPerf's tables", text, ("what", "measured"), rows)


CORES_LEARN, LAST = 0.01, 50


def mlperf_claims(held_mib: float, learnt: np.ndarray, frozen: np.ndarray) -> list[Claim]:
    """What the tables' size, and the loss of each update with learning and with frozen cores, say."""
    gained = frozen[-LAST:] - learnt[-LAST:]
    error = float(gained.std(ddof=1) / len(gained) ** 0.5)
    gain = float(gained.mean())
    return [
        Claim("MLPerf's 187.8 M rows x 128 as tensor trains, MiB of tables", PAPER, held_mib, 100.0, held_mib < 100,
              fails_if="a field that should be a train is dense, or the trains' ranks are larger than they say"),
        Claim(f"they train: loss with frozen cores minus with learning ones, last {LAST} of {len(learnt)} updates",
              PAPER, gain, f"above 0.01 and three standard errors ({3 * error:.4f})", gain > max(0.01, 3 * error), (0,),
              float(np.ptp(gained)),
              fails_if="training the cores gains nothing over leaving them as they began"),
    ]  # fmt: skip


def _train_mlperf(model: Dlrm, report: Report, updates: int, batch: int, core_rate: float) -> tuple[np.ndarray, float]:
    """The loss of each update, and the median of their seconds."""
    params = jax.jit(lambda: model.init(jax.random.key(0))[0])()
    state = sparse_state(params, "adagrad")
    step = jax.jit(
        lambda state, batch: sparse_update(model, state, batch, "adagrad", 0.01, core_rate), donate_argnums=0
    )
    rng = np.random.default_rng(0)
    losses, taken_s = [], []
    for update in range(updates):
        given = _mlperf_batch(model, batch, rng)
        start = time.perf_counter()
        state, loss = step(state, given)
        losses.append(float(loss))
        taken_s.append(time.perf_counter() - start)
        if update % 50 == 49:
            report(f"  update {update + 1}: loss {np.mean(losses[-50:]):.4f}, {np.median(taken_s[1:]):.3f} s")
    return np.array(losses), float(np.median(taken_s[1:]))


def _mlperf_batch(model: Dlrm, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    drawn = rng.zipf(1.2, (count, len(model.rows))).astype(np.uint64)
    ids = (drawn * np.uint64(2654435761) % np.array(model.rows, np.uint64)).astype(np.int32)
    dense = rng.exponential(1.0, (count, model.dense)).astype(np.float32)
    logits = dense[:, 0] - dense[:, 1] + np.where(drawn[:, 0] % np.uint64(2) == 0, 1.0, -1.0)
    return {"dense": dense, "ids": ids, "label": (rng.random(count) < 1 / (1 + np.exp(-logits))).astype(np.int32)}


def _figure(results: dict[str, Result]) -> Any:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, truth in zip(figure.subplots(1, 2), ("structured", "unstructured"), strict=True):
        for name, prefix in (("tensor train", "rank "), ("hashed", "hashed, as rank ")):
            runs = [results[f"{truth} {prefix}{rank}"] for rank in RANKS]
            axes.plot([run.parameters for run in runs], [run.auc for run in runs], "o-", label=name)
        dense = results[f"{truth} dense"]
        axes.plot(dense.parameters, dense.auc, "s", color="black", label="dense")
        axes.set(xscale="log", xlabel="parameters in tables", ylabel="AUC", title=f"{truth} truth")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
