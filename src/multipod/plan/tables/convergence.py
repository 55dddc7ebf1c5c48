"""Epochs to the target by batch: Google's logs, and the reference convergence points of MLPerf's rounds.

A point is the mean, without the best and the worst, of the runs with which MLCommons judges whether a submission of
that batch converges too soon to be true. Time to the target is a step times the updates that follow from them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from multipod.errors import PlanError


@dataclass(frozen=True)
class EpochTarget:
    """Epochs that a model took to its target at a batch.

    Attributes:
      batch: examples in an update.
      epochs: mean of the runs.
      source: of the numbers.
    """

    batch: int
    epochs: float
    source: str


LOG6 = "MLPerf v0.6 result logs, Google's entries"
P2 = "arXiv:1909.09756, table of LARS variants (noted second-hand)"

EPOCHS: dict[str, tuple[EpochTarget, ...]] = {
    "resnet50": (
        EpochTarget(4096, 60.8, LOG6),
        EpochTarget(16384, 64.8, LOG6),
        EpochTarget(32768, 64.0, P2 + "; 72 to 76 with the scaled form of LARS (logs)"),
        EpochTarget(65536, 88.0, "arXiv:2011.03641"),
    ),
    "ssd": (
        EpochTarget(256, 53.3, "arXiv:1909.09756: 22 % fewer than at 1,024"),
        EpochTarget(1024, 65.0, LOG6),
        EpochTarget(2048, 81.0, LOG6),
    ),
    "transformer": (
        EpochTarget(512, 3.3, "scores over steps of the v0.6 runs"),
        EpochTarget(2048, 5.5, "scores over steps of the v0.6 runs"),
    ),
}
"""To MLPerf's targets of v0.6 and v0.7: 75.9 % top-1, 0.23 AP, BLEU 25."""


def _points(ruleset: str, *rows: tuple[int, float]) -> tuple[EpochTarget, ...]:
    source = f"reference convergence points of MLPerf Training {ruleset} (mlperf-logging 4.1.68)"
    return tuple(EpochTarget(batch, epochs, source) for batch, epochs in rows)


REFERENCE: dict[str, tuple[EpochTarget, ...]] = {
    "resnet50": _points(
        "4.0.0",
        (1_632, 35),
        (3_264, 35.15385),
        (4_096, 39.875),
        (8_192, 41.875),
        (13_056, 45.5),
        (32_768, 56),
        (49_152, 68),
        (58_880, 80),
        (65_536, 84.5),
        (67_840, 85.84615),
    ),
    "ssd": _points("1.1.0", (1_024, 50), (1_536, 55), (2_048, 65.08621), (4_096, 87)),
    "maskrcnn": _points("3.1.0", (8, 12.75), (48, 14), (64, 14), (96, 14.05556), (128, 14), (256, 17), (272, 17.125)),
    "bert": _points(
        "5.0.0",
        (256, 2549220),
        (448, 2414421),
        (1_536, 2776278),
        (3_072, 2764499),
        (4_096, 2843989),
        (4_608, 2798080),
        (6_144, 3319125),
        (6_912, 3601920),
        (8_192, 4186112),
        (8_704, 4273707),
        (12_288, 4465067),
        (13_056, 4645333),
        (16_384, 5505422),
    ),
    "dlrm": _points("2.1.0", (32_768, 0.75625), (55_296, 0.9018519), (71_680, 1)),
}
"""Of the last round with each benchmark: 75.9 % top-1, 0.23 AP, 0.377 and 0.339 AP, 72 % of masked words, AUC 0.8025.

BERT's are training examples, not epochs, as it begins within one. DLRM's logs call the beginning of their one epoch 1,
and here it is 0: 0.756 at batch 32,768 are 96,800 updates, of 100,000 planned.
"""

COUNTED = {"resnet50": 1_281_167, "ssd": 117_266, "maskrcnn": 117_266, "bert": 1, "dlrm": 4_195_197_692}
"""Examples in what `REFERENCE` counts."""


def updates_at(model: str, batch: int) -> tuple[float, str]:
    """Updates to the target by the reference convergence points at `batch`, and their source; see `epochs_to_target`.

    Raises:
      PlanError: the model has none.
    """
    epochs, source = _at(model, batch, REFERENCE)
    return epochs * COUNTED[model] / batch, source


def epochs_to_target(model: str, batch: int) -> tuple[float, str]:
    """Epochs at `batch` by `EPOCHS`, between its batches by their logarithms, and a remark.

    Outside the table the nearest trend goes on upwards (larger batches need more), and stays level downwards.

    Raises:
      PlanError: nothing is known of this model.
    """
    return _at(model, batch, EPOCHS)


def _at(model: str, batch: int, table: Mapping[str, tuple[EpochTarget, ...]]) -> tuple[float, str]:
    rows = table.get(model)
    if not rows:
        raise PlanError(
            f"nobody has noted how many epochs {model} takes to its target. Give --updates. Known: {', '.join(table)}."
        )
    for row in rows:
        if row.batch == batch:
            return row.epochs, row.source
    if batch <= rows[0].batch:
        return rows[0].epochs, f"as at batch {rows[0].batch:,}, the smallest known: {rows[0].source}"
    below = max((row for row in rows[:-1] if row.batch < batch), key=lambda row: row.batch)
    above = rows[rows.index(below) + 1]
    slope = math.log(above.epochs / below.epochs) / math.log(above.batch / below.batch)
    epochs = above.epochs * (batch / above.batch) ** slope
    inside = batch < above.batch
    return epochs, f"{'between' if inside else 'beyond'} batches {below.batch:,} and {above.batch:,}: {above.source}"
