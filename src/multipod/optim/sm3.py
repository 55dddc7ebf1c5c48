"""SM3-II: Adagrad with an accumulator for each row and column instead of one for each weight."""

from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.optim.numbers import below_one
from multipod.optim.optimizer import RegularizedOptimizer
from multipod.optim.tensors import TensorRules, name_of


class Sm3State(NamedTuple):
    """For each tensor a tuple of accumulators: of shape [1, .., n_i, .., 1] for its dim i."""

    accumulators: Any


def scale_by_sm3(rules: TensorRules | None = None) -> optax.GradientTransformation:
    """g / sqrt(nu), with nu the least of the accumulators that cover a weight, plus g^2; 0/0 is 0.

    A tensor of dims n_1 .. n_k keeps n_1 + .. + n_k numbers; one of fewer than two dims keeps one for each
    weight, which is Adagrad. Each accumulator becomes the largest nu that it covers, so nu never falls, and is never
    less than Adagrad's sum of squares. Each slice of a stack of layers has accumulators of its own.

    Departures of `optax.scale_by_sm3` from the paper, not kept here: 1e-8 under the root, which slows
    weights with small gradients; a full-size momentum even at momentum 0, which costs the memory that the
    method saves; an error on tensors without dims.

    Source: Anil et al., 2019, arXiv:1901.11150, algorithm SM3-II, with the cover of its section 4.
    """
    rules = rules or TensorRules()

    def dims_of(path: Any, x: jax.Array) -> range:
        return range(1 if rules.is_stacked(name_of(path)) else 0, x.ndim)

    def init(params: Any) -> Sm3State:
        def accumulators(path: Any, w: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros_like(a) for a in _largest(w, dims_of(path, w)))

        return Sm3State(jax.tree.map_with_path(accumulators, params))

    def update(gradients: Any, state: Sm3State, params: Any = None) -> tuple[Any, Sm3State]:
        paths, structure = jax.tree.flatten_with_path(gradients)
        tree: Any = structure
        scaled, new = [], []
        for (path, g), accumulators in zip(paths, tree.flatten_up_to(state.accumulators), strict=True):
            nu = reduce(jnp.minimum, accumulators) + jnp.square(g)
            scaled.append(jnp.where(nu == 0, 0.0, g / jnp.sqrt(jnp.where(nu == 0, 1.0, nu))))
            new.append(_largest(nu, dims_of(path, g)))
        return tree.unflatten(scaled), Sm3State(tree.unflatten(new))

    return optax.GradientTransformation(init, update)


def _largest(nu: jax.Array, dims: range) -> tuple[jax.Array, ...]:
    """For each of `dims` the largest value over the others, which keep size 1."""
    if len(dims) < 2:
        return (nu,)
    return tuple(jnp.max(nu, axis=tuple(d for d in dims if d != dim), keepdims=True) for dim in dims)


@dataclass(frozen=True)
class Sm3(RegularizedOptimizer):
    """SM3-II with a moving mean of its steps.

    Attributes:
      momentum: the decay of that mean; 0 keeps none.
    """

    _: KW_ONLY
    momentum: float = 0.9

    def _wrong(self) -> list[str]:
        return super()._wrong() + below_one(momentum=self.momentum)

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns `scale_by_sm3` between the weight decay and the momentum."""
        momentum = [optax.ema(self.momentum, debias=False)] if self.momentum else []
        parts = (self.add_decay(), scale_by_sm3(self.rules), *momentum, optax.scale_by_learning_rate(rate))
        return optax.chain(*parts)
