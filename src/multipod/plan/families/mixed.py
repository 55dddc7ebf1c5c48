"""A linear mixed model: effects that all rows share, that groups of rows share, and that one group has alone.

The value of row i is a sum of terms, plus noise. A term has a feature x and a grouping; rows of one group share its
coefficient, which is drawn from a normal distribution with mean 0. So values of rows are jointly normal with covariance

    K[i, j] = sum over terms of sd^2 x_i x_j [i and j are of one group] + sum over walks + noise^2 [i = j]

and what is not known is predicted by conditioning on what is (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, equations 2.25 and 2.26). A walk is a Brownian motion along a coordinate within each group: what two
rows of a group differ by for reasons of their own grows with their distance. Standard deviations are those of the
largest posterior, with log sd ~ N(guess, 1).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from multipod.extras import require

FLAT = 5.0
"""Standard deviation, in natural logarithms, of a constant that nothing is known of before."""

NOISE = 0.03
"""Guess of the noise, in natural logarithms."""


STEP = 1e-4
"""Of a shape, for derivatives."""

Shaped = Callable[[float], np.ndarray]
"""From a shape number, which is found with the rest, to a feature of all rows, [rows]."""


@dataclass(frozen=True)
class Term:
    """A feature whose coefficient the rows of a group share.

    Attributes:
      values: of the feature, [rows], or how they follow from a shape.
      group: label of each row; None: all rows are one group.
      sd: of the coefficient, a guess.
      fixed: keep `sd`.
    """

    values: np.ndarray | Shaped
    group: Sequence[str] | None = None
    sd: float = 0.15
    fixed: bool = False


@dataclass(frozen=True)
class RandomWalk:
    """A Brownian motion within each group.

    Attributes:
      places: coordinate of each row, [rows].
      group: label of each row.
      sd: after one unit of the coordinate, a guess.
    """

    places: np.ndarray
    group: Sequence[str]
    sd: float = 0.05


class MixedModel:
    """Terms and walks over rows, of which some values are known.

    Args:
      terms: at least one.
      walks: within groups.
      shapes: guesses of the shapes of `Term.values`, in the order of their first terms; N(guess, 1).
      noise: a guess of its standard deviation.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        walks: Sequence[RandomWalk] = (),
        shapes: Sequence[float] = (),
        noise: float = NOISE,
    ) -> None:
        self._terms = terms
        self._shaped = list(dict.fromkeys(term.values for term in terms if callable(term.values)))
        self._same = [None if term.group is None else _same(term.group) for term in terms]
        self._walks = [_walk(walk) for walk in walks]
        free = [term.sd for term in terms if not term.fixed] + [walk.sd for walk in walks] + [noise]
        self._sds = len(free)
        self.guess = np.concatenate([np.log(free), np.array(shapes, float)])

    def fit(self, values: np.ndarray, rows: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """The parameters of the largest posterior, given `values[rows]`; searched from `start`, else from the guess.

        Raises:
          MissingPackageError: SciPy is not installed.
        """
        require("plan calibrate --from", "scipy")
        from scipy.optimize import minimize

        def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
            parts = self._parts(parameters, rows, rows)
            away = parameters - self.guess
            try:
                factor = np.linalg.cholesky(parts.total())
            except np.linalg.LinAlgError:
                return 1e6, np.zeros_like(parameters)
            inverse = np.linalg.inv(factor)
            inverse = inverse.T @ inverse
            solved = inverse @ values[rows]
            value = 0.5 * values[rows] @ solved + np.log(np.diag(factor)).sum() + 0.5 * (away**2).sum()
            # d loss / d K = (K^-1 - K^-1 y y^T K^-1) / 2 (the same book, equation 5.9).
            return float(value), parts.slopes(0.5 * (inverse - np.outer(solved, solved))) + away

        start = self.guess if start is None else start
        return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B").x)

    def predict(
        self, parameters: np.ndarray, values: np.ndarray, known: np.ndarray, asked: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the values of rows `asked`, [asked] each, given `values[known]`."""
        inside = self._parts(parameters, known, known).total()
        across = self._parts(parameters, asked, known).total()
        own = np.diag(self._parts(parameters, asked, asked).total())
        mean = across @ np.linalg.solve(inside, values[known])
        explained = (across * np.linalg.solve(inside, across.T).T).sum(1)
        return mean, np.sqrt(np.maximum(own - explained, 1e-12))

    def _parts(self, parameters: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> "_Parts":
        """What each parameter adds to the covariance of `rows` and `columns`, [rows, columns]."""
        sds = iter(np.exp(parameters[: self._sds]))
        shape_of = dict(zip(self._shaped, parameters[self._sds :], strict=True))
        at = np.ix_(rows, columns)
        fixed, free = np.zeros((len(rows), len(columns))), []
        slopes = {name: np.zeros_like(fixed) for name in shape_of}
        for term, same in zip(self._terms, self._same, strict=True):
            feature = _values(term, shape_of)
            scale = (term.sd if term.fixed else next(sds)) ** 2 * (1.0 if same is None else same[at])
            part = scale * np.outer(feature[rows], feature[columns])
            if term.fixed:
                fixed += part
            else:
                free.append(part)
            if callable(term.values):
                bent = (_values(term, shape_of, STEP) - _values(term, shape_of, -STEP)) / (2 * STEP)
                both = np.outer(bent[rows], feature[columns]) + np.outer(feature[rows], bent[columns])
                slopes[term.values] += scale * both
        free += [next(sds) ** 2 * walk[at] for walk in self._walks]
        free.append(next(sds) ** 2 * (rows[:, None] == columns))
        return _Parts(fixed, free, list(slopes.values()))


@dataclass(frozen=True)
class _Parts:
    """A covariance, taken apart.

    Attributes:
      fixed: what no parameter changes.
      free: what each standard deviation adds.
      bends: derivative by each shape.
    """

    fixed: np.ndarray
    free: list[np.ndarray]
    bends: list[np.ndarray]

    def total(self) -> np.ndarray:
        """The covariance."""
        return np.asarray(sum(self.free, self.fixed))

    def slopes(self, by_covariance: np.ndarray) -> np.ndarray:
        """Derivatives by the parameters, from those by the elements of the covariance."""
        return np.array([
            *(2 * (by_covariance * part).sum() for part in self.free),
            *((by_covariance * bend).sum() for bend in self.bends),
        ])  # fmt: skip


def _values(term: Term, shape_of: Mapping[Shaped, float], off: float = 0.0) -> np.ndarray:
    """A term's feature; of a shaped one at its shape plus `off`."""
    return term.values(shape_of[term.values] + off) if callable(term.values) else term.values


def _same(group: Sequence[str]) -> np.ndarray:
    """[rows, rows]: 1 where two rows are of one group, else 0."""
    labels = np.unique(np.array(group), return_inverse=True)[1]
    return (labels[:, None] == labels).astype(float)


def _walk(walk: RandomWalk) -> np.ndarray:
    """[rows, rows]: how far from the group's first place two rows have gone together."""
    labels = np.unique(np.array(walk.group), return_inverse=True)[1]
    first = np.array([walk.places[labels == label].min() for label in range(labels.max() + 1)])
    gone = walk.places - first[labels]
    return np.minimum(gone[:, None], gone) * _same(walk.group)
