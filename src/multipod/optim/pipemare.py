"""PipeMare's corrections for weights that change between a micro-batch's forward and backward pass.

Each stage i of P has its delay tau_i = (2 (P - i) + 1) / N in updates (`multipod.pipelines.model.tau`). Three
techniques, each of which can be used alone:

- T1, `reschedule`: a smaller rate at first for stages with a long delay;
- T2, `track_velocity`: the backward pass uses weights extrapolated back to those that the forward pass saw;
- T3: synchronous updates at first; the executor's affair, which T1 is told of by `start`.

Source: Yang et al., 2019, arXiv:1910.05124, section 3.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.errors import RecipeError

Number = float | jax.Array


class RescheduleState(NamedTuple):
    """taken: updates done, int32."""

    taken: jax.Array


def reschedule(tau: Number, anneal: Number, start: Number = 0) -> optax.GradientTransformation:
    """Multiplies updates by 1 / max(tau, 1)^p, p = 1 - min((k - start) / anneal, 1), from update k = start on.

    As the last part of a chain it scales the learning rate, decoupled weight decay included.
    Source: arXiv:1910.05124, T1. Here tau below 1 counts as 1: late stages would otherwise get a larger rate than asked
    for. Before `start`, while the warm-up is synchronous, nothing is changed.
    """

    def init(params: Any) -> RescheduleState:
        return RescheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: RescheduleState, params: Any = None) -> tuple[Any, RescheduleState]:
        since = state.taken - start
        p = jnp.where(since < 0, 0.0, 1 - jnp.clip(since / jnp.maximum(anneal, 1), 0.0, 1.0))
        scale = jnp.maximum(jnp.asarray(tau, jnp.float32), 1.0) ** -p
        return jax.tree.map(lambda u: u * scale.astype(u.dtype), updates), RescheduleState(state.taken + 1)

    return optax.GradientTransformation(init, update)


class VelocityState(NamedTuple):
    """delta: a moving mean of the weights' changes, one array a weight."""

    velocity: Any


def track_velocity(gamma: Number) -> optax.GradientTransformation:
    """Passes updates on, and keeps delta_{t+1} = gamma delta_t + (1 - gamma) (w_{t+1} - w_t), from 0.

    Last in a chain, where the updates are the weights' changes: so it works with any optimizer, weight decay and
    clipping included. `correct_weights` reads it.
    Source: arXiv:1910.05124, T2.
    """

    def init(params: Any) -> VelocityState:
        return VelocityState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: VelocityState, params: Any = None) -> tuple[Any, VelocityState]:
        changed = jax.tree.map(lambda d, u: (gamma * d + (1 - gamma) * u).astype(d.dtype), state.velocity, updates)
        return updates, VelocityState(changed)

    return optax.GradientTransformation(init, update)


def gamma_of(decay: Number, delay: Number) -> Number:
    """Returns D^(1 / delay), delay = tau_forward - tau_backward > 0; D near exp(-2) = 0.135 is best in theory."""
    return decay ** (1 / delay)


def correct_weights(params: Any, velocity: Any, delay: Number) -> Any:
    """Returns the weights for the backward pass, u = w - delay * delta: about those that the forward pass saw."""
    return jax.tree.map(lambda w, d: w - jnp.asarray(delay, w.dtype) * d, params, velocity)


@dataclass(frozen=True)
class PipeMare:
    """Which of the three techniques a run uses, and with what numbers.

    Attributes:
      anneal: (T1) K, updates over which the rate of late stages comes up to the base rate; 0: without T1. The paper
        takes a quarter of the first phase of constant rate, or five times a Transformer's warm-up.
      decay: (T2) D; 0: without T2. The paper takes 0.5 for ResNets, 0.1 for Transformers; theory says 0.135.
      warmup: (T3) synchronous updates at the start.
    """

    anneal: int = 0
    decay: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        least = {"anneal": self.anneal, "warmup": self.warmup}
        wrong = [f"pipemare.{name}={n} must be at least 0" for name, n in least.items() if n < 0]
        if not 0 <= self.decay < 1:
            wrong.append(f"pipemare.decay={self.decay} must be at least 0 and below 1")
        if wrong:
            raise RecipeError(f"{'; '.join(wrong)}. Change it in the recipe or with --set.")

    def wrap(self, optimizer: optax.GradientTransformation, delay: float) -> optax.GradientTransformation:
        """Returns `optimizer` for a stage with this delay, with what T1 and T2 need behind it."""
        parts = [optimizer]
        if self.anneal and delay > 0:
            parts.append(reschedule(delay, self.anneal, self.warmup))
        if self.decay and delay > 0:
            parts.append(track_velocity(gamma_of(self.decay, delay)))
        return optax.chain(*parts)

    def backward_weights(self, params: Any, state: Any, delay: Number) -> Any:
        """Returns the weights for the backward pass from the state of `wrap`'s transformation."""
        if not self.decay or not isinstance(state[-1], VelocityState):
            return params
        return correct_weights(params, state[-1].velocity, delay)
