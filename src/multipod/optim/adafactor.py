"""Adafactor, as ST-MoE and T5 were trained with it, through Optax."""

from dataclasses import dataclass
from typing import Literal

import optax

from multipod.errors import RecipeError
from multipod.optim import schedules


@dataclass(frozen=True)
class Adafactor:
    """Factored second moments, no first one, and steps relative to the size of each tensor.

    Source: Shazeer and Stern, 2018, arXiv:1804.04235; defaults of T5X.

    Attributes:
      rate: the rate at the end of the warm-up, relative to the root mean square of each tensor if `relative`.
      warmup_updates: the rate rises linearly, then falls as one over the root of the update.
      decay: `rsqrt`, or `constant`.
      clipping: largest root mean square of a tensor's step (d of the paper). 0.1 is the study of arXiv:2202.08906.
      decay_rate: exponent of the second moment's decay, 1 - update^-decay_rate.
      relative: steps are multiplied by the root mean square of their tensor, at least 1e-3.
      factored_from: tensors with two dims of that size have factored moments.
    """

    rate: float = 1e-2
    warmup_updates: int = 10_000
    decay: Literal["rsqrt", "constant"] = "rsqrt"
    clipping: float = 1.0
    decay_rate: float = 0.8
    relative: bool = True
    factored_from: int = 128

    def __post_init__(self) -> None:
        wrong = [f"{n}={getattr(self, n)}" for n in ("rate", "clipping", "decay_rate") if not getattr(self, n) > 0]
        wrong += [f"{n}={getattr(self, n)}" for n in ("warmup_updates", "factored_from") if getattr(self, n) < 0]
        if wrong:
            raise RecipeError(f"Adafactor: {', '.join(wrong)}: give positive numbers.")

    def schedule(self, updates: int) -> optax.Schedule:
        """The rate as a function of the update's number."""
        warmup = max(self.warmup_updates, 1)
        after = schedules.rsqrt(self.rate, warmup) if self.decay == "rsqrt" else optax.constant_schedule(self.rate)
        return schedules.warm_up(self.rate, self.warmup_updates, 0.0, after, 0)

    def build(self, updates: int) -> optax.GradientTransformation:
        """The Optax transformation for a run of `updates`."""
        return optax.adafactor(
            self.schedule(updates),
            min_dim_size_to_factor=self.factored_from,
            decay_rate=self.decay_rate,
            multiply_by_parameter_scale=self.relative,
            clipping_threshold=self.clipping,
        )
