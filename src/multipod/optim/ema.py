"""The exponential moving average of the weights, which is judged and saved in their place."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.optim.numbers import below_one, refuse
from multipod.pytrees import Grads, OptState, Params, Pytree, Statistics


class EmaState(NamedTuple):
    """An optimizer's state with the averages beside it, so that they are split, saved and moved as it is.

    Attributes:
      inner: the optimizer's own.
      params: the averaged parameters.
      statistics: the averaged statistics of the model (batch norm's moving moments); the step keeps them.
      updates: done, int32.
    """

    inner: OptState
    params: Params
    statistics: Statistics
    updates: jax.Array


@dataclass(frozen=True)
class Ema:
    """An average of the weights of all updates, each newer one weighing more: a_n = d_n a_(n-1) + (1 - d_n) w_n.

    a_0 are the first weights, and n is 1 after the first update. Statistics are averaged likewise, as in EfficientNet's
    TensorFlow code, so that batch norm fits the averaged weights. Evaluation, answers and exports take the averages;
    training goes on from the weights.

    Source: Polyak and Juditsky, 1992, doi:10.1137/0330046; EfficientNet (arXiv:1905.11946) has decay 0.9999.

    Attributes:
      decay: d of late updates, at least 0 and below 1.
      warm_up: d_n = min(decay, (1 + n) / (10 + n)): the rule of TensorFlow's moving average with a
        number of updates, which EfficientNet's code gives. It forgets the first weights in a few
        updates. Without it d_n = decay from the first update on, and the first weights keep the share decay^n.
    """

    decay: float = 0.9999
    warm_up: bool = True

    def __post_init__(self) -> None:
        refuse([line.replace("optimizer.", "ema.") for line in below_one(decay=self.decay)])

    def decay_at(self, update: jax.Array) -> jax.Array:
        """d of the update of this number, the first being 1; float32."""
        n = update.astype(jnp.float32)
        return jnp.minimum(self.decay, (1 + n) / (10 + n)) if self.warm_up else jnp.full_like(n, self.decay)

    def around(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """`optimizer` with the average of what it makes of the parameters in its state."""

        def init(params: Params) -> EmaState:
            return EmaState(optimizer.init(params), params, (), jnp.zeros((), jnp.int32))

        def update(gradients: Grads, state: EmaState, params: Params) -> tuple[Grads, EmaState]:
            changes, inner = optimizer.update(gradients, state.inner, params)
            averaged = self.follow(state.params, optax.apply_updates(params, changes), state.updates + 1)
            return changes, EmaState(inner, averaged, state.statistics, state.updates + 1)

        return optax.GradientTransformation(init, update)

    def follow(self, average: Pytree, new: Pytree, update: jax.Array) -> Pytree:
        """The averages after the update of this number; what is no float is taken as it is."""
        decay = self.decay_at(update)

        def step(a: jax.Array, w: jax.Array) -> jax.Array:
            if not jnp.issubdtype(w.dtype, jnp.floating):
                return w
            return a - ((1 - decay) * (a - w)).astype(a.dtype)

        return jax.tree.map(step, average, new)
