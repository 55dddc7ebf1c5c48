"""AdamW, and the fields that optimizers with Adam's two moments share."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from multipod.optim.numbers import below_one, positive
from multipod.optim.optimizer import RegularizedOptimizer


@dataclass(frozen=True)
class AdamW(RegularizedOptimizer):
    """Adam with decoupled weight decay, through Optax: the decay is multiplied by the rate.

    Source: Loshchilov and Hutter, 2017, arXiv:1711.05101.

    Attributes:
      beta1: the decay of the first moment.
      beta2: the decay of the second moment.
      eps: beside the root of the second moment.
    """

    aliases: ClassVar[Mapping[str, str]] = {**RegularizedOptimizer.aliases, "momentum": "beta1"}

    flattens: ClassVar[bool] = True

    _: KW_ONLY
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def _wrong(self) -> list[str]:
        return super()._wrong() + below_one(momentum=self.beta1, beta2=self.beta2) + positive(eps=self.eps)

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns Optax's AdamW."""
        decay, mask = self.own_decay, self.rules.adapted
        return optax.adamw(rate, self.beta1, self.beta2, self.eps, weight_decay=decay, mask=mask)
