"""Lion: steps by the sign of a momentum."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from multipod.optim.numbers import below_one
from multipod.optim.optimizer import RegularizedOptimizer


@dataclass(frozen=True)
class Lion(RegularizedOptimizer):
    """w <- w - rate * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w), through Optax.

    Source: Chen et al., 2023, arXiv:2302.06675.

    Attributes:
      beta1: the share of the momentum in the step.
      beta2: the decay of the momentum.
    """

    aliases: ClassVar[Mapping[str, str]] = {**RegularizedOptimizer.aliases, "momentum": "beta1"}

    flattens: ClassVar[bool] = True

    _: KW_ONLY
    beta1: float = 0.9
    beta2: float = 0.99

    def _wrong(self) -> list[str]:
        return super()._wrong() + below_one(momentum=self.beta1, beta2=self.beta2)

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns Optax's Lion."""
        return optax.lion(rate, self.beta1, self.beta2, weight_decay=self.own_decay, mask=self.rules.adapted)
