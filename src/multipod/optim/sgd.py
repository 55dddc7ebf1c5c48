"""Stochastic gradient descent with momentum."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from multipod.optim.numbers import below_one
from multipod.optim.optimizer import SparseOptimizer


@dataclass(frozen=True)
class Sgd(SparseOptimizer):
    """v <- momentum * v + g, w <- w - rate * v, through Optax.

    Attributes:
      momentum: 0 keeps no state.
      nesterov: momentum looks ahead: w <- w - rate * (momentum * v + g).
    """

    flattens: ClassVar[bool] = True

    _: KW_ONLY
    momentum: float = 0.9
    nesterov: bool = True

    def _wrong(self) -> list[str]:
        return super()._wrong() + below_one(momentum=self.momentum)

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns Optax's SGD behind the weight decay."""
        return optax.chain(self.add_decay(), optax.sgd(rate, momentum=self.momentum or None, nesterov=self.nesterov))
