"""Clicks whose true probability is known, in Criteo's shape: 13 counts and fields with Zipf-distributed ids.

    logit = w . log(1 + counts) + sum_f e_f[id_f] + sum_{f < g large} u_f[id_f] . u_g[id_g] - c

with e_f a number and u_f a 2-vector for each id, and c such that a share `rate` of examples is clicked. Under the truth
"unstructured" the values of every id are independent; under "structured" they are sums over the digits of the id in a
mixed radix, which a tensor train can represent with small ranks. No model can have a higher AUC, on average, than that
of the true probabilities: `Synthetic.best`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from multipod.data.clicks.text import DENSE, FIELDS
from multipod.data.source import ArraySource, HostBatch
from multipod.errors import DataError
from multipod.pytrees import IdRange

Truth = Literal["structured", "unstructured"]

LARGE = 1000
"""Fields with at least so many ids interact with each other."""


@dataclass(frozen=True)
class Synthetic:
    """Generated clicks, as a recipe's data: `label`, `dense` [n, 13], `ids` [n, fields].

    Attributes:
      rows: ids of each field.
      examples: to learn from.
      tests: to be judged by.
      truth: see the module.
      zipf: the id at place k of a field's order is drawn in proportion to k^-zipf; the order is a fixed permutation.
      rate: the share of clicks.
      effect: standard deviation of e_f.
      bond: standard deviation of the entries of u_f, by its square's share in the logit.
      seed: of the truth and of the examples; not the seed of a run.
    """

    rows: tuple[int, ...] = (120_000, 50_000, 20_000, 1000, 200, 50, 20, 8)
    examples: int = 300_000
    tests: int = 50_000
    truth: Truth = "unstructured"
    zipf: float = 1.05
    rate: float = 0.3
    effect: float = 0.5
    bond: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if not self.rows or min(self.rows) < 1 or len(self.rows) > FIELDS:
            wrong.append(f"rows={self.rows} (1 to {FIELDS} positive numbers)")
        if min(self.examples, self.tests) < 1:
            wrong.append(f"examples={self.examples}, tests={self.tests} (at least 1)")
        if not 0 < self.rate < 1:
            wrong.append(f"rate={self.rate} (between 0 and 1)")
        if wrong:
            raise DataError(f"synthetic clicks: {'; '.join(wrong)}. Change it in the recipe or with --set.")

    def ids_given(self) -> dict[str, IdRange]:
        """The ids of each field."""
        return {"ids": IdRange(self.rows, "rows")}

    def train(self) -> ArraySource:
        """The examples to learn from."""
        return ArraySource(_without_truth(_drawn(self)[0]))

    def test(self) -> ArraySource:
        """The examples to be judged by."""
        return ArraySource(_without_truth(_drawn(self)[1]))

    def best(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels and true probabilities of the test examples: their AUC is the best that can be hoped for."""
        test = _drawn(self)[1]
        return test["label"], test["probability"]


@dataclass(frozen=True)
class _Truth:
    """The weights behind the clicks."""

    dense: np.ndarray
    effects: list[np.ndarray]
    bonds: dict[int, np.ndarray]
    orders: list[np.ndarray]
    shift: float


def _without_truth(arrays: HostBatch) -> HostBatch:
    return {name: array for name, array in arrays.items() if name != "probability"}


@lru_cache(maxsize=2)
def _drawn(spec: Synthetic) -> tuple[HostBatch, HostBatch]:
    truth = _truth(spec)
    rng = np.random.default_rng([spec.seed, 1])
    both = examples(spec, truth, spec.examples + spec.tests, rng)
    split = spec.examples
    return {n: a[:split] for n, a in both.items()}, {n: a[split:] for n, a in both.items()}


@lru_cache(maxsize=2)
def _truth(spec: Synthetic) -> _Truth:
    rng = np.random.default_rng([spec.seed, 0])
    dense = rng.normal(size=DENSE) * 0.15
    large = [f for f, n in enumerate(spec.rows) if n >= LARGE]
    effects = [spec.effect * _values(rng, n, 1, spec.truth)[:, 0] for n in spec.rows]
    bonds = {f: np.sqrt(spec.bond) * _values(rng, spec.rows[f], 2, spec.truth) for f in large}
    orders = [rng.permutation(n) for n in spec.rows]
    unshifted = _Truth(dense, effects, bonds, orders, 0.0)
    sample = _logits(unshifted, *_features(spec, unshifted, 20_000, rng))
    low, high = -20.0, 20.0
    for _ in range(50):  # the mean probability falls as the shift grows
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(sample - middle).mean() > spec.rate else (low, middle)
    return _Truth(dense, effects, bonds, orders, low)


def _values(rng: np.random.Generator, rows: int, width: int, truth: Truth) -> np.ndarray:
    """Independent standard normal values for each id, or sums over three digits of the id, of the same variance."""
    if truth == "unstructured":
        return rng.normal(size=(rows, width))
    radix = int(np.ceil(rows ** (1 / 3)))
    ids = np.arange(rows)
    digits = ids // radix**2, ids // radix % radix, ids % radix
    return sum(rng.normal(size=(radix, width))[digit] for digit in digits) / np.sqrt(3)


def examples(spec: Synthetic, truth: _Truth, count: int, rng: np.random.Generator) -> HostBatch:
    """`count` examples with their true `probability`."""
    counts, ids = _features(spec, truth, count, rng)
    probability = _sigmoid(_logits(truth, counts, ids))
    label = (rng.random(count) < probability).astype(np.int32)
    dense = np.log1p(counts).astype(np.float32)
    return {"label": label, "dense": dense, "ids": ids, "probability": probability}


def _features(spec: Synthetic, truth: _Truth, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    counts = np.floor(np.expm1(rng.exponential(1.0, (count, DENSE)))).clip(0, 1e6).astype(np.int32)
    ids = np.empty((count, len(spec.rows)), np.int32)
    for field, order in enumerate(truth.orders):
        weights = np.arange(1, len(order) + 1, dtype=np.float64) ** -spec.zipf
        ends = np.cumsum(weights)
        ids[:, field] = order[np.searchsorted(ends, rng.random(count) * ends[-1], side="right").clip(0, len(order) - 1)]
    return counts, ids


def _logits(truth: _Truth, counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    logits = np.log1p(counts) @ truth.dense - truth.shift
    for field, effects in enumerate(truth.effects):
        logits += effects[ids[:, field]]
    # The sum over pairs of u_f . u_g is half of |sum u_f|^2 - sum |u_f|^2.
    if truth.bonds:
        vectors = [bond[ids[:, field]] for field, bond in truth.bonds.items()]
        total = sum(vectors)
        logits += 0.5 * (np.square(total).sum(1) - sum(np.square(v).sum(1) for v in vectors))
    return logits


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def criteo_lines(spec: Synthetic, count: int, block: int = 10_000) -> Iterator[bytes]:
    """Lines of Criteo's text, a block at a time: fields that the model lacks are empty, and so are counts of 0.

    Every id has a hexadecimal name of its own, many above 2^31.
    """
    truth = _truth(spec)
    rng = np.random.default_rng([spec.seed, 2])
    for first in range(0, count, block):
        size = min(block, count - first)
        counts, ids = _features(spec, truth, size, rng)
        label = rng.random(size) < _sigmoid(_logits(truth, counts, ids))
        named = (ids.astype(np.uint64) * np.uint64(2654435761) + np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
        empty = [""] * (FIELDS - len(spec.rows))
        rows = zip(label.astype(int).tolist(), counts.tolist(), named.tolist(), strict=True)
        text = "".join(
            "\t".join([str(y), *(str(n) if n else "" for n in c), *(f"{v:08x}" for v in values), *empty]) + "\n"
            for y, c, values in rows
        )
        yield text.encode()
