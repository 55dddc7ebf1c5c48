"""Whether any JAX function makes with split arguments what it makes on one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from multipod.pytrees import Pytree, Shardings
from multipod.verify.rounding import EPS, LIMIT, relative_errors, shaken
from multipod.verify.widened import widened

SAMPLES = 3
"""Calls with arguments that are rounded once more, whose errors say what rounding does."""


@dataclass(frozen=True)
class SplitComparison:
    """What a function made in one way of splitting its arguments.

    Attributes:
      name: of the way.
      ratio: the largest error of a result over that on one device.
      of: the path of that result.
    """

    name: str
    ratio: float
    of: str

    @property
    def same(self) -> bool:
        """Whether the order of sums explains it."""
        return self.ratio <= LIMIT


def compare(
    step: Callable[..., Pytree],
    *arguments: Pytree,
    layouts: Mapping[str, Shardings],
    reference: Callable[..., Pytree] | None = None,
    seed: int = 0,
) -> list[SplitComparison]:
    """Holds what a function makes of split arguments against the same on one device in float64.

    Args:
      step: any function of arrays, jitted or not; with collectives if it takes its arguments split.
      arguments: on one device or the host.
      layouts: by a name, the shardings of the arguments, a tuple as for `jax.device_put(arguments, shardings)`.
      reference: the same for one device, where `step` has collectives; `step` itself if None.
      seed: of the rounding that is tried.

    Raises:
      LayoutError: `reference`, or `step` without one, has operations over several devices.
    """
    alone = reference or step
    shapes = jax.eval_shape(lambda *given: given, *arguments)
    exact = widened(alone, *shapes)(*arguments)
    rng, called = np.random.default_rng(seed), jax.jit(alone)
    tried = [arguments, *(shaken(arguments, rng) for _ in range(SAMPLES))]
    noise: dict[str, float] = {}
    for one in tried:
        for name, error in relative_errors("", called(*one), exact).items():
            noise[name] = max(noise.get(name, EPS), error)
    return [_compared(name, step, jax.device_put(arguments, way), exact, noise) for name, way in layouts.items()]


def _compared(
    name: str, step: Callable[..., Pytree], arguments: Pytree, exact: Pytree, noise: Mapping[str, float]
) -> SplitComparison:
    errors = relative_errors("", jax.jit(step)(*arguments), exact)
    ratios = {of: error / noise[of] if np.isfinite(error) else np.inf for of, error in errors.items()}
    worst = max(ratios, key=lambda of: ratios[of])
    return SplitComparison(name, float(ratios[worst]), worst)
