"""Initial cores of a tensor train, such that the table they stand for begins like an ordinary one.

A table of n rows begins, in DLRM, uniform in +-1 / sqrt(n): variance 1 / (3 n). The Gaussian nearest to that (in
Kullback-Leibler divergence) is N(0, 1 / (3 n)). A product of Gaussian cores is not Gaussian: it has too much mass at
zero and heavy tails. Cores without small values come much nearer.

Source: Yin et al., 2021, arXiv:2101.11714 (TT-Rec), section 4.2.
"""

import functools
import itertools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from multipod.nn.tables.tensor_train import Cores, TensorTrain

Distribution = Literal["sampled-gaussian", "gaussian"]
Scale = Literal["exact", "released", "reciprocal"]

CUT = 2.0
"""Sampled Gaussian: core entries with a smaller absolute value are drawn again."""

_TAIL = 0.5 * math.erfc(CUT / math.sqrt(2))
SECOND_MOMENT = 1 + CUT * math.exp(-(CUT**2) / 2) / math.sqrt(2 * math.pi) / _TAIL
"""E[x^2] of a standard Gaussian with |x| >= 2: 5.746."""


def initial_cores(
    tt: TensorTrain,
    key: jax.Array,
    distribution: Distribution = "sampled-gaussian",
    scale: Scale = "exact",
    variance: float | None = None,
) -> Cores:
    """Random float32 cores.

    Args:
      tt: the shape.
      key: of the random numbers.
      distribution: of core entries: Gaussian, or Gaussian with the entries within `CUT` of zero drawn again.
      scale: "exact": the entries of the table have `variance`. "released": every core is multiplied by
        variance^(1 / 2d), as in the authors' released code, which counts neither the ranks nor what the cut does: the
        entries' standard deviation is then sqrt(R_1 .. R_{d-1} m2^d) times as large (m2 = `SECOND_MOMENT`, or 1 for
        "gaussian"), 111 times at d = 3 and rank 8. Under plain SGD that makes the cores learn faster. "reciprocal":
        core entries have variance 1 / rows, as the released code's `normal`: the table is then almost zero.
      variance: of the table's entries; None is 1 / (3 rows).
    """
    count = len(tt.shapes)
    target = 1 / (3 * tt.rows) if variance is None else variance
    moment = SECOND_MOMENT if distribution == "sampled-gaussian" else 1.0
    grown = math.prod(tt.ranks) * moment**count if scale == "exact" else 1.0
    factor = (target / grown) ** (1 / (2 * count))
    if scale == "reciprocal":
        factor = (tt.rows * moment) ** -0.5
    # One draw for all cores: XLA takes seconds to compile each on a CPU.
    numbers = factor * _drawn(key, tt.parameters, distribution)
    ends = list(itertools.accumulate(map(math.prod, tt.shapes)))[:-1]
    parts = jnp.split(numbers, ends)
    return tuple(part.reshape(shape) for part, shape in zip(parts, tt.shapes, strict=True))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: jax.Array, count: int, distribution: Distribution) -> jax.Array:
    """Standard Gaussian numbers; for "sampled-gaussian" given |x| >= CUT, by the inverse of the distribution."""
    if distribution == "gaussian":
        return jax.random.normal(key, (count,), jnp.float32)
    side = jax.random.uniform(key, (count,), jnp.float32, minval=-1)
    return jnp.sign(side) * -jax.scipy.special.ndtri(_TAIL * jnp.maximum(jnp.abs(side), 2.0**-24))


class Spread(NamedTuple):
    """How the entries of a table are spread, beside a Gaussian of the same target variance.

    Attributes:
      mean: of the entries.
      variance: of the entries.
      kurtosis: fourth moment over squared variance; 3 for a Gaussian.
      near_zero: the share within 0.05 standard deviations of zero; 0.0399 for a Gaussian.
      distance: largest difference to the target's distribution function (Kolmogorov-Smirnov).
    """

    mean: float
    variance: float
    kurtosis: float
    near_zero: float
    distance: float


def spread(table: np.ndarray, variance: float) -> Spread:
    """The spread of a table's entries beside N(0, `variance`)."""
    entries = np.sort(np.asarray(table, np.float64).ravel())
    own = float(entries.var())
    centred = entries - entries.mean()
    below = np.asarray(ndtr(jnp.asarray(entries / math.sqrt(variance), jnp.float32)), np.float64)
    steps = np.arange(len(entries) + 1) / len(entries)
    distance = max(np.abs(below - steps[1:]).max(), np.abs(below - steps[:-1]).max())
    return Spread(
        float(entries.mean()),
        own,
        float(np.mean(centred**4) / own**2) if own else math.nan,
        float(np.mean(np.abs(entries) < 0.05 * math.sqrt(own))),
        float(distance),
    )
