"""Predictions of rows from other rows, as logarithms with standard deviations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multipod.plan.families.mixed import MixedModel
from multipod.plan.families.quantities import QUANTITIES
from multipod.plan.families.rows import FamilyRow, by_family


class LogNormal(NamedTuple):
    """The logarithm of a prediction, and its standard deviation."""

    mean: float
    sd: float

    def __neg__(self) -> "LogNormal":
        return LogNormal(-self.mean, self.sd)

    def plus(self, number: float) -> "LogNormal":
        """The prediction times a known number, of which this is the logarithm."""
        return LogNormal(self.mean + number, self.sd)


@dataclass(frozen=True)
class Predicted:
    """A row, predicted.

    Attributes:
      row: the question.
      known: measured rows of its family that were used.
      logs: by name: `throughput_per_s`, `step_s`, `around_s` and, where something is known of them, `samples`,
        `updates`, `epochs`, `init_s`, `run_s`; `run_s_of_samples` in place of `run_s` where the row gives its samples.
    """

    row: FamilyRow
    known: int
    logs: Mapping[str, LogNormal]


@dataclass(frozen=True)
class Design:
    """A quantity's model over known and asked rows.

    Attributes:
      model: of all rows.
      values: [rows], natural logarithms; 0 where not known.
      known: places of the rows whose value is used.
      asked: places of the rows to predict.
    """

    model: MixedModel
    values: np.ndarray
    known: np.ndarray
    asked: np.ndarray

    @staticmethod
    def of(name: str, rows: Sequence[FamilyRow], known: int) -> "Design":
        """The model of a quantity over `rows`, of which the first `known` may be used."""
        quantity = QUANTITIES[name]
        values = [quantity.value(row) for row in rows]
        usable = np.array([place < known and value is not None for place, value in enumerate(values)])
        return Design(
            quantity.model(rows, usable),
            np.array([0.0 if value is None else value for value in values]),
            np.flatnonzero(usable),
            np.arange(known, len(rows)),
        )

    def predict(self, parameters: np.ndarray) -> list[LogNormal]:
        """The asked rows."""
        mean, sd = self.model.predict(parameters, self.values, self.known, self.asked)
        return [LogNormal(float(a), float(b)) for a, b in zip(mean, sd, strict=True)]


Parameters = Mapping[str, np.ndarray]
"""Of the model of each quantity, by its name."""


def fitted(known: Sequence[FamilyRow], start: Parameters | None = None) -> Parameters:
    """The parameters that suit the known rows best, searched from `start`.

    Raises:
      MissingPackageError: SciPy is not installed.
    """
    designs = {name: Design.of(name, known, len(known)) for name in QUANTITIES}
    return {
        name: design.model.fit(design.values, design.known, None if start is None else start[name])
        for name, design in designs.items()
    }


def predicted(known: Sequence[FamilyRow], asked: Sequence[FamilyRow], parameters: Parameters) -> list[Predicted]:
    """Predicts `asked` from `known`. Of every family asked at least one row is known."""
    rows = [*known, *asked]
    logs = {name: Design.of(name, rows, len(known)).predict(parameters[name]) for name in QUANTITIES}
    families = by_family(known)
    return [
        _assembled(row, families.get(row.family, []), known, {name: found[place] for name, found in logs.items()})
        for place, row in enumerate(asked)
    ]


def _assembled(
    row: FamilyRow, family: Sequence[FamilyRow], known: Sequence[FamilyRow], logs: Mapping[str, LogNormal]
) -> Predicted:
    """What follows from the four quantities."""
    throughput = logs["throughput"].plus(math.log(row.accelerators))
    found = {"throughput_per_s": throughput, "step_s": (-throughput).plus(math.log(row.batch))}
    found["around_s"] = logs["around"]
    if any(one.init_s is not None for one in family):
        found["init_s"] = logs["init"]
    samples = _samples(row, known, logs["samples"])
    if samples is not None:
        if row.samples is None:
            found |= {"samples": samples, "updates": samples.plus(-math.log(row.batch))}
            in_epoch = [one.samples / one.epochs for one in family if one.samples and one.epochs]
            if in_epoch:
                found["epochs"] = samples.plus(-math.log(in_epoch[-1]))
        found["run_s" if row.samples is None else "run_s_of_samples"] = _run(throughput, samples, logs["around"])
    return Predicted(row, len(family), found)


def _samples(row: FamilyRow, known: Sequence[FamilyRow], log: LogNormal) -> LogNormal | None:
    """Samples to the target, as given or predicted; None if nothing is known of the benchmark."""
    if row.samples is not None:
        return LogNormal(math.log(row.samples), 0.0)
    return log if any(one.samples for one in known if one.benchmark == row.benchmark) else None


def _run(throughput: LogNormal, samples: LogNormal, around: LogNormal) -> LogNormal:
    """Training and the rest, whose errors are taken as independent and small."""
    training, rest = math.exp(samples.mean - throughput.mean), math.exp(around.mean)
    total = training + rest
    sd = math.hypot(training * throughput.sd, training * samples.sd, rest * around.sd) / total
    return LogNormal(math.log(total), sd)
