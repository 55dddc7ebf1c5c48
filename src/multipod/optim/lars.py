"""LARS in its two published forms of momentum."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.optim.numbers import below_one, not_negative, positive
from multipod.optim.optimizer import RegularizedOptimizer
from multipod.optim.tensors import TensorRules, name_of
from multipod.optim.trust import trust_ratio


class LarsState(NamedTuple):
    """Updates done, and the momentum v of each tensor."""

    updates: jax.Array
    velocity: Any


def lars(
    rate: optax.Schedule,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    scaled: bool = False,
    add_decay: bool = True,
    rules: TensorRules | None = None,
) -> optax.GradientTransformation:
    """Layer-wise adaptive rate scaling, for tensors w with gradients g at rate gamma:

        lambda = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        unscaled:  v <- momentum * v + gamma * lambda * (g + weight_decay * w),  w <- w - v
        scaled:    v <- momentum * v + (g + weight_decay * w),  w <- w - gamma * lambda * v

    Unscaled, the history keeps the rates at which it was made; scaled, today's rate multiplies all of
    it, so that a falling rate shrinks old momentum too. The two agree while gamma * lambda is constant.
    lambda is 1 where |w| or |g| is 0. Tensors that `rules` do not adapt have lambda = 1 and no decay: plain
    momentum at the full rate.

    Args:
      rate: gamma as a function of the updates done.
      momentum: of both forms.
      weight_decay: in lambda, and in the gradient as above.
      trust_coefficient: eta of the paper.
      eps: in lambda's denominator.
      scaled: the second form.
      add_decay: False leaves `weight_decay * w` to the loss, whose gradient then holds it already; lambda
        still has its term, so that the decay counts twice there, as it did in MLPerf v0.6.
      rules: which tensors are adapted, and which are stacks of layers.

    `optax.lars` is the unscaled form with another lambda, eta * |w| / |g + weight_decay * w|, that is in none of
    the papers; without weight decay they are equal.

    Source: unscaled, You et al., 2017, arXiv:1708.03888, algorithm 1; scaled, the MLPerf v0.6 submission
    of arXiv:1909.09756, section on LARS.
    """
    rules = rules or TensorRules()

    def init(params: Any) -> LarsState:
        return LarsState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: LarsState, params: Any = None) -> tuple[Any, LarsState]:
        gamma = rate(state.updates)

        def velocity_and_change(path: Any, g: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            name, step = name_of(path), gamma
            if rules.is_adapted(name, w.ndim):
                step = gamma * trust_ratio(
                    w,
                    g,
                    coefficient=trust_coefficient,
                    weight_decay=weight_decay,
                    eps=eps,
                    stacked=rules.is_stacked(name),
                )
                g = g + weight_decay * w if add_decay else g
            new = momentum * v + (g if scaled else step * g)
            return new.astype(v.dtype), -(step * new if scaled else new)

        paths, structure = jax.tree.flatten_with_path(params)
        tree: Any = structure
        leaves = (tree.flatten_up_to(each) for each in (gradients, params, state.velocity))
        pairs = [velocity_and_change(path, *of) for (path, _), *of in zip(paths, *leaves, strict=True)]
        velocity, change = (tree.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        return change, LarsState(state.updates + 1, velocity)

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class Lars(RegularizedOptimizer):
    """LARS in its unscaled form, as `lars` writes it.

    Attributes:
      momentum: of velocities that hold the rates at which they were made.
      trust_coefficient: eta, the length of a step as a part of the length of the weights.
      eps: beside the norms.
    """

    scaled: ClassVar[bool] = False

    flattens: ClassVar[bool] = True

    _: KW_ONLY
    momentum: float = 0.9
    trust_coefficient: float = 0.001
    eps: float = 0.0

    def _wrong(self) -> list[str]:
        numbers = positive(trust_coefficient=self.trust_coefficient) + not_negative(eps=self.eps)
        return super()._wrong() + below_one(momentum=self.momentum) + numbers

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns `lars` in the form of this class; decay in the loss alone still counts in lambda."""
        return lars(
            rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            trust_coefficient=self.trust_coefficient,
            eps=self.eps,
            scaled=self.scaled,
            add_decay=self.weight_decay_in != "loss",
            rules=self.rules,
        )


@dataclass(frozen=True)
class LarsScaled(Lars):
    """LARS in its scaled form: today's rate multiplies the whole velocity, as in MLPerf v0.6."""

    scaled: ClassVar[bool] = True
