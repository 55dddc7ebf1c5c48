"""Adafactor, as ST-MoE and T5 were trained with it, through Optax."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from multipod.optim.numbers import not_negative, positive, refuse
from multipod.optim.optimizer import RATE_ALIASES, Optimizer


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Factored second moments, no first one, and steps relative to the size of each tensor.

    Its rate is relative to the root mean square of each tensor if `relative`. Published runs have
    `WarmUp(Rsqrt(0.01), updates=10_000)`.

    Source: Shazeer and Stern, 2018, arXiv:1804.04235; defaults of T5X.

    Attributes:
      clipping: largest root mean square of a tensor's step (d of the paper). 0.1 is the study of arXiv:2202.08906.
      decay_rate: exponent of the second moment's decay, 1 - update^-decay_rate.
      relative: steps are multiplied by the root mean square of their tensor, at least 1e-3.
      factored_from: tensors with two dims of that size have factored moments.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        name: path for name, path in RATE_ALIASES.items() if name != "decay_rate"
    }  # which is a field of its own here

    _: KW_ONLY
    clipping: float = 1.0
    decay_rate: float = 0.8
    relative: bool = True
    factored_from: int = 128

    def __post_init__(self) -> None:
        wrong = positive(clipping=self.clipping, decay_rate=self.decay_rate)
        refuse(wrong + not_negative(factored_from=self.factored_from))

    def build(self, updates: int) -> optax.GradientTransformation:
        """Returns the Optax transformation for a run of `updates`."""
        return optax.adafactor(
            self.schedule(updates),
            min_dim_size_to_factor=self.factored_from,
            decay_rate=self.decay_rate,
            multiply_by_parameter_scale=self.relative,
            clipping_threshold=self.clipping,
        )
