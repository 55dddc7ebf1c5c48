"""The `Optimizer` of a recipe: a name, its numbers, and a rate schedule, built into an Optax transformation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from multipod.errors import RecipeError


@dataclass(frozen=True)
class Optimizer:
    """One of `OPTIMIZERS` with linear warm-up and decay.

    Attributes:
      name: a name in `OPTIMIZERS`.
      rate: the peak learning rate.
      momentum: of `sgd`, `lars` and `lion`'s first moment; b1 of `adamw` and `lamb`.
      weight_decay: applied to tensors of two or more dims, so not to biases and batch norm.
      warmup: the share of all updates in which the rate rises linearly from 0.
      decay: how the rate falls afterwards, to 0 at the last update.
      clip: largest global norm of the gradient; 0 is no limit.
    """

    name: Literal["sgd", "adamw", "lamb", "lars", "lion"] = "adamw"
    rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup: float = 0.1
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise RecipeError(f"optimizer.rate={self.rate} must be positive.")
        if not 0 <= self.warmup <= 1:
            raise RecipeError(f"optimizer.warmup={self.warmup} is a share of all updates: give 0 to 1.")

    def schedule(self, updates: int) -> optax.Schedule:
        """The learning rate as a function of the update's number, over a run of `updates`."""
        warmup = round(self.warmup * updates)
        rest = max(updates - warmup, 1)
        falls = {
            "cosine": lambda: optax.cosine_decay_schedule(self.rate, rest),
            "linear": lambda: optax.linear_schedule(self.rate, 0.0, rest),
            "constant": lambda: optax.constant_schedule(self.rate),
        }
        return optax.join_schedules(
            [optax.linear_schedule(0.0, self.rate, max(warmup, 1)), falls[self.decay]()], [warmup]
        )

    def build(self, updates: int) -> optax.GradientTransformation:
        """The Optax transformation for a run of `updates`."""
        transformation = OPTIMIZERS[self.name](self, self.schedule(updates))
        if self.clip:
            transformation = optax.chain(optax.clip_by_global_norm(self.clip), transformation)
        return transformation


def is_matrix(params: Any) -> Any:
    """True for the tensors that weight decay and layer-wise rates apply to: those of two or more dims."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


OPTIMIZERS: dict[str, Callable[[Optimizer, optax.Schedule], optax.GradientTransformation]] = {
    "sgd": lambda o, rate: optax.chain(
        optax.add_decayed_weights(o.weight_decay, mask=is_matrix),
        optax.sgd(rate, momentum=o.momentum, nesterov=True),
    ),
    "adamw": lambda o, rate: optax.adamw(rate, b1=o.momentum, weight_decay=o.weight_decay, mask=is_matrix),
    "lamb": lambda o, rate: optax.lamb(rate, b1=o.momentum, weight_decay=o.weight_decay, mask=is_matrix),
    "lars": lambda o, rate: optax.lars(
        rate, o.weight_decay, weight_decay_mask=is_matrix, trust_ratio_mask=is_matrix, momentum=o.momentum
    ),
    "lion": lambda o, rate: optax.lion(rate, b1=o.momentum, weight_decay=o.weight_decay, mask=is_matrix),
}
