"""Fits a machine's few constants to measured steps: one set for all, with its error and what the data cannot tell
apart."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from multipod.errors import PlanError
from multipod.extras import require
from multipod.plan.machine import Machine

Priced = Callable[[Machine], float]
"""Seconds of something on a machine with these constants."""

LIMITS = {
    "convolution": (0.05, 1.0),
    "matmul": (0.05, 1.0),
    "vector": (1e-4, 1.0),
    "memory": (0.05, 1.5),
    "op_s": (1e-8, 3e-4),
    "link": (0.05, 1.0),
    "hop_s": (1e-8, 1e-4),
    "message_s": (1e-8, 3e-3),
    "start_s": (0.0, 600.0),
    "alone": (0.05, 1.0),
}
"""Where each constant is looked for. Memory may seem faster than it is, where fusion saves more traffic than is
counted."""


@dataclass(frozen=True)
class Measurement:
    """Something that was measured.

    Attributes:
      name: for tables.
      seconds: measured.
      priced: the same, predicted.
      weight: of its relative error in the fit.
    """

    name: str
    seconds: float
    priced: Priced
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """What came of a fit.

    Attributes:
      machine: with the constants found.
      constants: those that were fitted, with the relative uncertainty of each (one standard deviation).
      errors: of each measurement by name: predicted over measured, minus 1.
      twins: pairs of constants that the data cannot tell apart, with their correlation.
      loose: constants at a limit of where they were looked for, or more uncertain than by a factor of two.
    """

    machine: Machine
    constants: dict[str, tuple[float, float]]
    errors: dict[str, float]
    twins: tuple[tuple[str, str, float], ...]
    loose: tuple[str, ...]

    @property
    def median_error(self) -> float:
        """The median of the absolute relative errors."""
        return float(np.median(np.abs(list(self.errors.values()))))

    @property
    def worst(self) -> tuple[str, float]:
        """The measurement with the largest error, and the error."""
        return max(self.errors.items(), key=lambda item: abs(item[1]))


def fit(
    machine: Machine,
    measurements: Sequence[Measurement],
    names: Sequence[str],
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> Fit:
    """The constants `names` of `machine` that fit the measurements best, by their relative errors; others stay.

    Least squares in the logarithms, with a soft loss, so that one odd row does not bend all others. Some hundred
    evaluations of all measurements.

    Args:
      machine: with the constants to begin with.
      measurements: of anything on this machine or on others of its kind.
      names: of the constants.
      limits: where some of them are looked for; others within `LIMITS`.

    Raises:
      PlanError: fewer measurements than constants, a time that is none, or data that contradict themselves.
      MissingPackageError: SciPy is not installed.
    """
    require("plan calibrate", "scipy")
    from scipy.optimize import least_squares

    _check(measurements, names)
    within = {**LIMITS, **(limits or {})}
    low, high = (np.log([within[name][side] or 1e-9 for name in names]) for side in (0, 1))
    start = np.clip(np.log([max(getattr(machine.calibration, name), 1e-9) for name in names]), low + 1e-6, high - 1e-6)
    weights = np.array([one.weight for one in measurements])

    def residuals(x: np.ndarray) -> np.ndarray:
        tried = _with(machine, names, x)
        return weights * np.array([math.log(one.priced(tried) / one.seconds) for one in measurements])

    found = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale=0.3, diff_step=1e-3
    )
    best = _with(machine, names, found.x)
    spread, twins = _uncertainty(found.jac, found.fun, names)
    edge = [abs(x - a) < 1e-3 or abs(x - b) < 1e-3 for x, a, b in zip(found.x, low, high, strict=True)]
    values = {name: float(getattr(best.calibration, name)) for name in names}
    return Fit(
        best,
        {name: (values[name], spread[name]) for name in names},
        {one.name: one.priced(best) / one.seconds - 1 for one in measurements},
        twins,
        tuple(name for name, at in zip(names, edge, strict=True) if at or spread[name] > 1),
    )


def _check(measurements: Sequence[Measurement], names: Sequence[str]) -> None:
    if len(measurements) < len(names):
        raise PlanError(
            f"calibration: {len(measurements)} measurements cannot fix {len(names)} constants ({', '.join(names)}). "
            f"Measure "
            "more sizes and layouts, or fit fewer constants."
        )
    wrong = [one.name for one in measurements if not (math.isfinite(one.seconds) and one.seconds > 0)]
    if wrong:
        raise PlanError(f"calibration: {', '.join(wrong)} took no positive time. Leave them out or measure again.")
    seen: dict[str, float] = {}
    for one in measurements:
        before = seen.setdefault(one.name, one.seconds)
        if abs(math.log(before / one.seconds)) > math.log(1.5):
            raise PlanError(
                f"calibration: {one.name} is measured as {before:.4g} s and as {one.seconds:.4g} s. Data that "
                f"contradict "
                "themselves by half fit nothing: measure it again on a quiet machine."
            )


def _with(machine: Machine, names: Sequence[str], x: np.ndarray) -> Machine:
    return machine.calibrated(**{name: float(value) for name, value in zip(names, np.exp(x), strict=True)})


def _uncertainty(
    jacobian: np.ndarray, residuals: np.ndarray, names: Sequence[str]
) -> tuple[dict[str, float], tuple[tuple[str, str, float], ...]]:
    """Relative standard deviations, and pairs whose errors go together by more than 0.95."""
    free = max(1, len(residuals) - len(names))
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * float(residuals @ residuals) / free
    # A constant that nothing depends on has no row in the Jacobian: the pseudo-inverse would call it certain.
    blind = np.abs(jacobian).max(axis=0) < 1e-9
    deviation = np.where(blind, np.inf, np.sqrt(np.maximum(np.diag(covariance), 1e-30)))
    correlation = covariance / np.outer(np.where(blind, 1, deviation), np.where(blind, 1, deviation))
    twins = tuple(
        (names[i], names[j], float(correlation[i, j]))
        for i in range(len(names))
        for j in range(i)
        if not (blind[i] or blind[j]) and abs(correlation[i, j]) > 0.95
    )
    return {name: float(one) for name, one in zip(names, deviation, strict=True)}, twins
