"""LAMB: Adam with a rate for each layer."""

from dataclasses import KW_ONLY, dataclass

import optax

from multipod.optim.adamw import AdamW
from multipod.optim.trust import scale_by_trust_ratio


@dataclass(frozen=True)
class Lamb(AdamW):
    """Adam's step and decoupled weight decay, scaled in each adapted tensor to the norm of its weights.

    Source: You et al., 2019, arXiv:1904.00962; `multipod.optim.trust.scale_by_trust_ratio` says where it departs.
    """

    _: KW_ONLY
    eps: float = 1e-6

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns Adam of Optax with our layer-wise part behind it."""
        return optax.chain(
            optax.scale_by_adam(self.beta1, self.beta2, self.eps),
            self.add_decay(),
            scale_by_trust_ratio(self.rules),
            optax.scale_by_learning_rate(rate),
        )
