"""The `Optimizer` of a recipe: a name, its numbers, and a rate schedule, built into an Optax transformation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import optax

from multipod.errors import RecipeError, nearest
from multipod.optim import schedules
from multipod.optim.lars import lars
from multipod.optim.sm3 import scale_by_sm3
from multipod.optim.sparse import scale_by_rowwise_adagrad
from multipod.optim.tensors import TensorRules
from multipod.optim.trust import scale_by_trust_ratio


@dataclass(frozen=True)
class Optimizer:
    """One of `OPTIMIZERS` with warm-up and decay. Shares are of all updates of the run.

    Attributes:
      name: a name in `OPTIMIZERS`.
      rate: the peak learning rate.
      momentum: of `sgd`, `lars`, `lars_scaled`, `rmsprop`, `sm3` and `lion`'s first moment; b1 of `adamw` and `lamb`.
      weight_decay: applied to adapted tensors (`multipod.optim.tensors.TensorRules`), so not to biases and
        batch norm; see `weight_decay_in`.
      warmup: the share in which the rate rises linearly.
      decay: how the rate falls afterwards: `cosine`, `linear` and `polynomial` to `end_rate` at the last update,
        `exponential` in stairs of `decay_every`, `drops` at the places that the field `drops` names, `rsqrt`
        as one over the root of the update.
      clip: largest global norm of the gradient; 0 is no limit.
      clip_before_sum: each device clips the gradient of its own mean loss, before they are averaged.
      nesterov: momentum looks ahead; of `sgd` alone.
      beta2: the decay of `adamw`'s, `lamb`'s and `rmsprop`'s second moment and of `lion`'s momentum;
        0 takes the optimizer's own (`BETA2`).
      eps: under or beside the root, in `lars` beside the norms; 0 takes the optimizer's own (`EPS`).
      trust_coefficient: eta of `lars` and `lars_scaled`.
      weight_decay_in: `optimizer`, as the optimizer's own paper has it: decoupled in `adamw`, `lamb` and
        `lion`, beside the gradient elsewhere. `loss`: weight_decay / 2 * |w|^2 in the loss, biases
        included and batch norm not. `both`: as EfficientNet was trained with LARS.
      skip: words; tensors with one of them in their name get no weight decay and no layer-wise rate.
      stacked: words; tensors with one of them in their name hold a layer in each slice of their first dim.
      warmup_updates: the warm-up in updates, in place of its share; 0 takes the share.
      warmup_start: the rate at update 0, as a part of `rate`.
      decay_from_start: the decay counts from update 0, hidden by the warm-up.
      end_rate: where `cosine`, `linear` and `polynomial` end, and below which `exponential` does not fall.
      power: of `polynomial`.
      decay_rate: the factor of `exponential` and of `drops`.
      decay_every: the share between two stairs of `exponential`, counted from where the decay begins.
      drops: shares at which `drops` multiplies the rate by `decay_rate`, counted from update 0.
      sparse: of tables of vectors (`multipod.nn.model.ReadsRows`) only the rows that a batch reads have gradients and
        are updated: the same values, at no cost for the others. Of those in `SPARSE`, without momentum, decay and clip.
    """

    name: Literal[
        "sgd", "adagrad", "adamw", "lamb", "lars", "lars_scaled", "lion", "rmsprop", "rowwise_adagrad", "sm3"
    ] = "adamw"
    rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup: float = 0.1
    decay: Literal["cosine", "linear", "constant", "polynomial", "exponential", "drops", "rsqrt"] = "cosine"
    clip: float = 0.0
    clip_before_sum: bool = False
    nesterov: bool = True
    beta2: float = 0.0
    eps: float = 0.0
    trust_coefficient: float = 0.001
    weight_decay_in: Literal["optimizer", "loss", "both"] = "optimizer"
    skip: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    warmup_updates: int = 0
    warmup_start: float = 0.0
    decay_from_start: bool = False
    end_rate: float = 0.0
    power: float = 2.0
    decay_rate: float = 0.1
    decay_every: float = 0.25
    drops: tuple[float, ...] = ()
    sparse: bool = False

    def __post_init__(self) -> None:
        wrong = _wrong_numbers(self)
        if wrong:
            raise RecipeError(f"{'; '.join(wrong)}. Change it in the recipe or with --set.")
        if self.name not in OPTIMIZERS:
            raise RecipeError(f"optimizer.name: none is called {self.name!r}. {nearest(self.name, OPTIMIZERS)}")

    @property
    def rules(self) -> TensorRules:
        """Which tensors are adapted, decayed, and stacks of layers."""
        return TensorRules(self.skip, self.stacked)

    def schedule(self, updates: int) -> optax.Schedule:
        """The learning rate as a function of the update's number, over a run of `updates`."""
        warmup = self.warmup_updates or round(self.warmup * updates)
        absolute = self.decay_from_start or self.decay in ("drops", "rsqrt")
        begin = 0 if absolute else warmup
        rest = max(updates - begin, 1)
        rate, end = self.rate, self.end_rate
        falls = {
            "cosine": lambda: optax.cosine_decay_schedule(rate, rest, end / rate),
            "linear": lambda: optax.linear_schedule(rate, end, rest),
            "constant": lambda: optax.constant_schedule(rate),
            "polynomial": lambda: optax.polynomial_schedule(rate, end, self.power, rest),
            "exponential": lambda: schedules.staircase(rate, self.decay_rate, self.decay_every * updates, end),
            "drops": lambda: schedules.drops(rate, self.decay_rate, [share * updates for share in self.drops]),
            "rsqrt": lambda: schedules.rsqrt(rate, warmup),
        }
        return schedules.warm_up(rate, warmup, self.warmup_start * rate, falls[self.decay](), begin)

    def build(self, updates: int) -> optax.GradientTransformation:
        """The Optax transformation for a run of `updates`, for gradients that have been summed."""
        parts = [OPTIMIZERS[self.name](self, self.schedule(updates))]
        if self.clip and not self.clip_before_sum:
            parts.insert(0, optax.clip_by_global_norm(self.clip))
        if self.weight_decay and self.weight_decay_in != "optimizer":
            # First: it is part of the loss, so that a limit on the gradient counts it too.
            parts.insert(0, optax.add_decayed_weights(self.weight_decay, mask=self.rules.decayed_in_loss))
        return parts[0] if len(parts) == 1 else optax.chain(*parts)

    def before_sum(self, gradients: Any, devices: int) -> Any:
        """What a device sends into the sum over `devices`: its gradients, clipped if `clip_before_sum` is set.

        They are the device's share of the gradient of the mean loss, 1 / devices of that of its own
        mean loss; it is the latter that `clip` limits. The sum is then the mean of the clipped gradients. BERT's
        published runs take their sum instead, which LAMB cannot tell but for its eps.
        """
        if not (self.clip and self.clip_before_sum):
            return gradients
        return optax.clip_by_global_norm(self.clip / devices).update(gradients, optax.EmptyState())[0]


def _wrong_numbers(o: Optimizer) -> list[str]:
    """What is wrong with the numbers of an optimizer; NaN always is."""
    positive = {name: getattr(o, name) for name in ("rate", "power", "decay_rate", "decay_every", "trust_coefficient")}
    least = {name: getattr(o, name) for name in ("weight_decay", "clip", "eps", "end_rate", "warmup_updates")}
    moments = {name: getattr(o, name) for name in ("momentum", "beta2")}
    return [
        *(f"optimizer.{name}={n} must be positive" for name, n in positive.items() if not n > 0),
        *(f"optimizer.{name}={n} must be at least 0" for name, n in least.items() if not n >= 0),
        *(f"optimizer.{name}={n} must be at least 0 and below 1" for name, n in moments.items() if not 0 <= n < 1),
        *([] if 0 <= o.warmup <= 1 else [f"optimizer.warmup={o.warmup} is a share of all updates: give 0 to 1"]),
        *([] if 0 <= o.warmup_start <= 1 else [f"optimizer.warmup_start={o.warmup_start} is a part of rate: 0 to 1"]),
        *(f"optimizer.drops has {n}, which is no share of all updates, 0 to 1" for n in o.drops if not 0 <= n <= 1),
        *(_not_sparse(o) if o.sparse else ()),
    ]


SPARSE = ("sgd", "adagrad", "rowwise_adagrad")
"""Under these a row without gradient stays as it is, and so does its state."""


def _not_sparse(o: Optimizer) -> list[str]:
    """What keeps an optimizer from updating touched rows alone."""
    others = {"weight_decay": o.weight_decay, "clip": o.clip} | ({"momentum": o.momentum} if o.name == "sgd" else {})
    known = [] if o.name in SPARSE else [f"optimizer.name={o.name} (one of {', '.join(SPARSE)})"]
    wrong = known + [f"optimizer.{name}={n} (0)" for name, n in others.items() if n]
    return [f"optimizer.sparse=true leaves rows without gradient as they are, with {', '.join(wrong)}"] if wrong else []


BETA2 = {"adamw": 0.999, "lamb": 0.999, "lion": 0.99, "rmsprop": 0.9}
"""`beta2` where an optimizer names none."""

EPS = {"adagrad": 1e-8, "rowwise_adagrad": 1e-8, "adamw": 1e-8, "lamb": 1e-6, "rmsprop": 1e-3}
"""`eps` where an optimizer names none; 0 elsewhere."""


def _sgd(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(_decayed(o), optax.sgd(rate, momentum=o.momentum or None, nesterov=o.nesterov))


def _adagrad(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    # The sum of squares begins at 0, as in MLPerf's DLRM; Optax's own default is 0.1.
    return optax.chain(_decayed(o), optax.adagrad(rate, initial_accumulator_value=0.0, eps=_eps(o)))


def _rowwise_adagrad(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(_decayed(o), scale_by_rowwise_adagrad(_eps(o)), optax.scale_by_learning_rate(rate))


def _adamw(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, o.momentum, _beta2(o), _eps(o), weight_decay=_own_decay(o), mask=o.rules.adapted)


def _lamb(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(o.momentum, _beta2(o), _eps(o)),
        _decayed(o),
        scale_by_trust_ratio(o.rules),
        optax.scale_by_learning_rate(rate),
    )


def _lars(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return lars(
        rate,
        momentum=o.momentum,
        weight_decay=o.weight_decay,
        trust_coefficient=o.trust_coefficient,
        eps=_eps(o),
        scaled=o.name == "lars_scaled",
        add_decay=o.weight_decay_in != "loss",
        rules=o.rules,
    )


def _lion(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.lion(rate, o.momentum, _beta2(o), weight_decay=_own_decay(o), mask=o.rules.adapted)


def _rmsprop(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    # TensorFlow's form, which EfficientNet was trained with: the mean square begins at 1, eps under the root.
    return optax.chain(
        _decayed(o),
        optax.rmsprop(rate, _beta2(o), _eps(o), initial_scale=1.0, momentum=o.momentum or None),
    )


def _sm3(o: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
    momentum = [optax.ema(o.momentum, debias=False)] if o.momentum else []
    return optax.chain(_decayed(o), scale_by_sm3(o.rules), *momentum, optax.scale_by_learning_rate(rate))


def _decayed(o: Optimizer) -> optax.GradientTransformation:
    return optax.add_decayed_weights(_own_decay(o), mask=o.rules.adapted)


def _own_decay(o: Optimizer) -> float:
    """The weight decay that is left to the optimizer."""
    return 0.0 if o.weight_decay_in == "loss" else o.weight_decay


def _beta2(o: Optimizer) -> float:
    return o.beta2 or BETA2[o.name]


def _eps(o: Optimizer) -> float:
    return o.eps or EPS.get(o.name, 0.0)


OPTIMIZERS: dict[str, Callable[[Optimizer, optax.Schedule], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adamw": _adamw,
    "lamb": _lamb,
    "lars": _lars,
    "lars_scaled": _lars,
    "lion": _lion,
    "rmsprop": _rmsprop,
    "rowwise_adagrad": _rowwise_adagrad,
    "sm3": _sm3,
}
