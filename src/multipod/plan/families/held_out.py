"""What predictions are worth: each family in turn is foretold from its smallest rows and all other families."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from multipod.plan.families.conditional import Parameters, fitted, predicted
from multipod.plan.families.rows import FamilyRow, by_family, reference_rows

LEVEL = 0.9
"""Share of what is measured later that an interval is to hold."""

TRUTH: dict[str, Callable[[FamilyRow], float | None]] = {
    "throughput_per_s": lambda row: row.throughput_per_s,
    "samples": lambda row: row.samples,
    "around_s": lambda row: row.around_s,
    "init_s": lambda row: row.init_s,
    "run_s": lambda row: row.run_s,
    "run_s_of_samples": lambda row: row.run_s,
}
"""What was measured, of what is predicted. Step time, updates and epochs have the errors of throughput and samples."""


@dataclass(frozen=True)
class HeldOut:
    """A row that was predicted without having been seen.

    Attributes:
      row: with what was measured.
      known: smaller rows of its family that were seen, 1 or 2.
      name: what was predicted.
      predicted: the value.
      sd: of its logarithm, as the model has it.
      error: ln(predicted / measured).
    """

    row: FamilyRow
    known: int
    name: str
    predicted: float
    sd: float
    error: float

    @property
    def measured(self) -> float:
        """What was measured."""
        return self.predicted / math.exp(self.error)


def held_out(rows: Sequence[FamilyRow], known: int, parameters: Parameters, refit: bool = False) -> Iterator[HeldOut]:
    """Predicts the rows of each family from its `known` smallest and all others' rows.

    Args:
      rows: of all families.
      known: rows of the family that are seen.
      parameters: of a fit to `rows`.
      refit: fit again without the family each time, from `parameters` on. Without it the 15 to 20 numbers of the models
        have seen the family.
    """
    for name, family in by_family(rows).items():
        seen, unseen = family[:known], family[known:]
        if not unseen:
            continue
        others = [*(row for row in rows if row.family != name), *reference_rows()]
        used = fitted(others, parameters) if refit else parameters
        for samples in (True, False):
            asked = [row.asked(row.samples if samples else None) for row in unseen]
            for row, found in zip(unseen, predicted([*others, *seen], asked, used), strict=True):
                for of in (name for name in TRUTH if name in found.logs):
                    truth, log = TRUTH[of](row), found.logs[of]
                    # What does not rest on samples is the same with and without them.
                    if truth and (of == "run_s_of_samples") == samples:
                        yield HeldOut(row, known, of, math.exp(log.mean), log.sd, log.mean - math.log(truth))


def median_of_families(found: Sequence[HeldOut]) -> float:
    """The median of each family's |error|, and the median of those."""
    return float(np.median(list(medians(found).values())))


def medians(found: Sequence[HeldOut]) -> dict[str, float]:
    """The median of |error| of each family."""
    families: dict[str, list[float]] = {}
    for one in found:
        families.setdefault(one.row.family, []).append(abs(one.error))
    return {name: float(np.median(errors)) for name, errors in families.items()}


def width(found: Sequence[HeldOut]) -> float:
    """The number of standard deviations that hold `LEVEL` of the errors."""
    return float(np.quantile([abs(one.error) / one.sd for one in found], LEVEL))


def coverage(found: Sequence[HeldOut]) -> float:
    """Share of the rows within an interval whose width the other families set."""
    inside = []
    for name in medians(found):
        wide = width([one for one in found if one.row.family != name])
        inside += [abs(one.error) <= wide * one.sd for one in found if one.row.family == name]
    return float(np.mean(inside))
