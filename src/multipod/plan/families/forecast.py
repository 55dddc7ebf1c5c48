"""Predictions of larger systems from measured smaller ones, with intervals as wide as held-out families ask for."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from multipod.errors import PlanError
from multipod.plan.families.conditional import LogNormal, Predicted, fitted, predicted
from multipod.plan.families.rows import HOW, FamilyRow, by_family, public_rows, reference_rows

WIDTHS: dict[int, dict[str, float]] = {
    1: {"throughput_per_s": 1.81, "samples": 1.62, "around_s": 1.37, "init_s": 1.57, "run_s": 1.38,
        "run_s_of_samples": 1.45},
    2: {"throughput_per_s": 1.74, "samples": 1.39, "around_s": 1.07, "init_s": 1.43, "run_s": 1.29,
        "run_s_of_samples": 1.22},
}  # fmt: skip
"""Half an interval in standard deviations, by the number of measured rows: 90 % of the errors of held-out public
families are within (`held_out.width`, which a test computes anew). A normal distribution would have 1.64."""

SAME_AS = {"step_s": "throughput_per_s", "updates": "samples", "epochs": "samples"}
"""What has the errors of something else."""


class Interval(NamedTuple):
    """A prediction and the ends of its 90 % interval."""

    value: float
    low: float
    high: float


def forecasts(rows: Sequence[FamilyRow], past: Sequence[FamilyRow] | None = None) -> list[Predicted]:
    """Predicts the rows without a throughput from those with one.

    Args:
      rows: of one or more families, of which at least one row each is measured; what is measured teaches all of them.
      past: other families; None: the public ones, without those of which `rows` has a measured point.

    Raises:
      PlanError: nothing is asked, or nothing of a family is measured.
      MissingPackageError: SciPy is not installed.
    """
    measured = [row for row in rows if row.measured]
    asked = [row for row in rows if not row.measured]
    if not asked:
        raise PlanError(
            "all rows are measured, so nothing is to be predicted. Give --predict 64,256, or rows without "
            "throughput_per_s."
        )
    alone = sorted({row.family for row in asked} - set(by_family(measured)))
    if alone:
        raise PlanError(f"no row of {', '.join(alone)} is measured. Give at least one with throughput_per_s. {HOW}")
    others = _apart_from(measured) if past is None else past
    known = [*others, *reference_rows(), *measured]
    return predicted(known, asked, fitted(known))


def intervals(found: Predicted) -> dict[str, Interval]:
    """The predictions of a row with their 90 % intervals, by name; see `Predicted.logs`."""
    widths = WIDTHS[min(found.known, max(WIDTHS))]
    return {name: _interval(log, widths[SAME_AS.get(name, name)]) for name, log in found.logs.items()}


def as_data(found: Predicted) -> dict[str, Any]:
    """A row and its predictions, as TOML and JSON have them."""
    row = found.row
    said = {"family": row.family, "benchmark": row.benchmark, "accelerator": row.accelerator,
            "accelerators": row.accelerators, "batch": row.batch, "measured_rows": found.known}  # fmt: skip
    named = {"run_s" if name == "run_s_of_samples" else name: one for name, one in intervals(found).items()}
    return said | {name: {"predicted": one.value, "low": one.low, "high": one.high} for name, one in named.items()}


def _interval(log: LogNormal, width: float) -> Interval:
    low, value, high = (math.exp(log.mean + side * width * log.sd) for side in (-1, 0, 1))
    return Interval(value, low, high)


def _apart_from(rows: Sequence[FamilyRow]) -> list[FamilyRow]:
    """The public rows, without the families of which `rows` holds a point: nobody is to be predicted from himself."""
    points = {_point(row) for row in rows}
    public = by_family(public_rows())
    own = {name for name, family in public.items() if points & {_point(row) for row in family}}
    names = {row.family for row in rows} | own
    return [row for name, family in public.items() if name not in names for row in family]


def _point(row: FamilyRow) -> tuple[str, int, float]:
    """What two rows of one measurement have in common, whatever they are called."""
    return row.benchmark, row.accelerators, round(row.throughput_per_s or 0.0, 1)
