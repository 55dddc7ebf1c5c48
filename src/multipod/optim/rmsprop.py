"""RMSProp in TensorFlow's form."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from multipod.optim.numbers import below_one, positive
from multipod.optim.optimizer import RegularizedOptimizer


@dataclass(frozen=True)
class RmsProp(RegularizedOptimizer):
    """g / sqrt(mean of g^2 + eps), then momentum, through Optax; the mean begins at 1.

    TensorFlow's form, which EfficientNet was trained with (Tan and Le, 2019, arXiv:1905.11946).

    Attributes:
      momentum: 0 keeps none.
      beta2: the decay of the mean square.
      eps: under the root.
    """

    flattens: ClassVar[bool] = True

    _: KW_ONLY
    momentum: float = 0.9
    beta2: float = 0.9
    eps: float = 1e-3

    def _wrong(self) -> list[str]:
        return super()._wrong() + below_one(momentum=self.momentum, beta2=self.beta2) + positive(eps=self.eps)

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns Optax's RMSProp behind the weight decay."""
        momentum = self.momentum or None
        return optax.chain(
            self.add_decay(), optax.rmsprop(rate, self.beta2, self.eps, initial_scale=1.0, momentum=momentum)
        )
