"""What is predicted of a job, and the effects that it is made of. All are logarithms of something positive.

Throughput of an accelerator falls as its samples of an update become fewer (what does not shrink with them weighs more,
within an accelerator and between boxes), and with the number of accelerators. With b samples an accelerator, m of them
in a pass, b0 the usual number of the benchmark, N accelerators in boxes:

    ln(throughput / N) = family + e1 ln(1 + s1 b0 / m) + e2 ln(1 + s2 b0 / b ln boxes) + e3 ln N + walks in ln b, ln N

e1 and e3 are sums of effects of all, of the benchmark, of the kind of accelerator and of the family; e2 of all but the
kind. Samples to the target follow the batch B, as ln B and ln(1 + B / B0) with B0 the benchmark's usual batch
(arXiv:1812.06162, equation 2.11, has E (1 + B / B0)); MLPerf's reference convergence points are families of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from multipod.plan.families.mixed import FLAT, MixedModel, RandomWalk, Term
from multipod.plan.families.rows import FamilyRow


@dataclass(frozen=True)
class Quantity:
    """Something that is predicted.

    Attributes:
      value: its logarithm; None: not known of this row.
      model: of rows, with what is typical of a benchmark taken from the rows that are marked as known.
    """

    value: Callable[[FamilyRow], float | None]
    model: Callable[[Sequence[FamilyRow], np.ndarray], MixedModel]


def _log(value: float | None) -> float | None:
    return None if value is None else math.log(value)


def _rate(row: FamilyRow) -> float | None:
    return None if row.throughput_per_s is None else math.log(row.throughput_per_s / row.accelerators)


def _throughput_model(rows: Sequence[FamilyRow], known: np.ndarray) -> MixedModel:
    local = np.log([row.batch / row.accelerators for row in rows])
    pass_ = local - np.log([row.accumulation for row in rows])
    usual = _typical(rows, local, known, smallest=True)
    count = np.log([row.accelerators for row in rows])
    boxes = np.log([row.boxes for row in rows])
    within = lambda shape: -np.log1p(np.exp(shape + usual - pass_))  # noqa: E731
    between = lambda shape: -np.log1p(np.exp(shape + usual - local) * boxes)  # noqa: E731
    size = count - math.log(8)
    family, benchmark, kind = _groups(rows)
    return MixedModel(
        [
            Term(np.ones(len(rows)), family, FLAT, fixed=True),
            Term(within, None, 0.22),
            Term(within, benchmark, 0.14),
            Term(within, kind, 0.14),
            Term(within, family, 0.08),
            Term(size, None, 0.22),
            Term(size, benchmark, 0.14),
            Term(size, kind, 0.14),
            Term(size, family, 0.08),
            Term(between, None, 0.22),
            Term(between, benchmark, 0.14),
            Term(between, family, 0.08),
        ],
        [RandomWalk(-local, family), RandomWalk(count, family)],
        shapes=(-1.5, -1.5),
    )


def _samples_model(rows: Sequence[FamilyRow], known: np.ndarray) -> MixedModel:
    batch = np.log([row.batch for row in rows])
    beyond = batch - _typical(rows, batch, known)
    bend = np.log1p(np.exp(beyond))
    family, benchmark, _ = _groups(rows)
    return MixedModel(
        [
            Term(np.ones(len(rows)), benchmark, FLAT * FLAT, fixed=True),
            Term(np.ones(len(rows)), family, 0.14),
            *(Term(x, group, sd) for x in (beyond, bend) for group, sd in ((None, 0.22), (benchmark, 0.14))),
            *(Term(x, family, 0.08) for x in (beyond, bend)),
        ]
    )


def _seconds_model(rows: Sequence[FamilyRow], known: np.ndarray) -> MixedModel:
    del known
    size = np.log([row.accelerators for row in rows]) - math.log(8)
    family, benchmark, kind = _groups(rows)
    every, each = np.ones(len(rows)), (benchmark, kind, family)
    return MixedModel(
        [
            Term(every, None, FLAT * FLAT, fixed=True),
            *(Term(every, group, 0.4) for group in each),
            Term(size, None, 0.22),
            *(Term(size, group, sd) for group, sd in zip(each, (0.14, 0.14, 0.08), strict=True)),
        ],
        noise=0.3,
    )


QUANTITIES = {
    "throughput": Quantity(_rate, _throughput_model),
    "samples": Quantity(lambda row: _log(row.samples), _samples_model),
    "around": Quantity(lambda row: _log(row.around_s), _seconds_model),
    "init": Quantity(lambda row: _log(row.init_s), _seconds_model),
}
"""By name: samples a second of one accelerator, samples to the target, seconds of the run outside of training, seconds
before the first update."""


def _groups(rows: Sequence[FamilyRow]) -> tuple[list[str], list[str], list[str]]:
    return [row.family for row in rows], [row.benchmark for row in rows], [row.kind for row in rows]


def _typical(rows: Sequence[FamilyRow], values: np.ndarray, known: np.ndarray, smallest: bool = False) -> np.ndarray:
    """The median of a benchmark's known values, [rows]; of each family's smallest system alone if `smallest`."""
    by_benchmark: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row, value, is_known in zip(rows, values, known, strict=True):
        if is_known:
            by_benchmark.setdefault(row.benchmark, {}).setdefault(row.family, []).append((row.accelerators, value))
    typical = {
        benchmark: float(np.median([
            value for points in families.values() for _, value in ([min(points)] if smallest else points)
        ]))
        for benchmark, families in by_benchmark.items()
    }  # fmt: skip
    return np.array([typical.get(row.benchmark, value) for row, value in zip(rows, values, strict=True)])
