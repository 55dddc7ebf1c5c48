"""The delay simulator: pipeline training on one device, with every old version of the weights at hand.

The reference that the pipelined execution must match, and the way to study hundreds of stages on one machine. Which
version each pass sees is a table that `multipod.pipelines.check` makes; nothing here knows of ticks or messages.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from multipod.execute.pipeline.passes import PartFunction, trace_passes
from multipod.pytrees import Grads, OptState, Params, Pytree


@dataclass(frozen=True)
class PipelinePart:
    """One part of a model in a pipeline.

    Attributes:
      function: (weights, x, aux) to (y, extra). The first part's x is (), the last part's y is its share of the
        minibatch's loss, a scalar, and its extra is a dictionary of sums; other parts' extra is an empty one.
      optimizer: of this part's weights; sees the gradient of the whole minibatch.
      backward_weights: from (weights, optimizer state, delayed) to what the backward pass uses; None: the weights.
        `delayed` is 1.0, or 0.0 while updates are synchronous.
      kind: parts with equal `kind` have the same function and the same shapes; None: unlike all others.
    """

    function: PartFunction
    optimizer: optax.GradientTransformation
    backward_weights: Callable[[Params, OptState, jax.Array], Params] | None = None
    kind: Hashable = None


class DelayState(NamedTuple):
    """The state of a simulation.

    Attributes:
      versions: for each part its weights, with a first dim of versions; version v is at index v mod that dim.
      optimizer: for each part the state of its optimizer.
      update: updates done, int32.
      filled_from: the version that was there when the pipe last was empty, int32: no pass sees an older one.
    """

    versions: tuple[Params, ...]
    optimizer: tuple[OptState, ...]
    update: jax.Array
    filled_from: jax.Array


def begin_simulation(parts: Sequence[PipelinePart], weights: Sequence[Params], longest: int) -> DelayState:
    """The state before the first update, with room for weights `longest` updates old."""
    versions = [jax.tree.map(lambda w: jnp.broadcast_to(w, (longest + 1, *w.shape)), tree) for tree in weights]
    states = [part.optimizer.init(tree) for part, tree in zip(parts, weights, strict=True)]
    zero = jnp.zeros((), jnp.int32)
    return DelayState(tuple(versions), tuple(states), zero, zero)


def newest_weights(state: DelayState) -> tuple[Params, ...]:
    """The newest weights of each part."""
    return tuple(_read_version(tree, state.update) for tree in state.versions)


def simulate_update(
    parts: Sequence[PipelinePart],
    state: DelayState,
    batches: Pytree,
    forward_delays: jax.Array | np.ndarray,
    *,
    stashed: bool | jax.Array = False,
    delayed: bool | jax.Array = True,
) -> tuple[DelayState, Pytree]:
    """Simulates one update. Returns the new state, and the sums of the last part's `extra` over the micro-batches.

    batches: the `aux` of each micro-batch, with a first dim N. forward_delays: int [parts, N], for update k and
    micro-batch j the forward pass sees version k - delay, but none older than `filled_from`. stashed: the backward pass
    uses that version too (PipeDream), else version k. delayed: false makes this update synchronous, and empties the
    pipe. All three may be traced: one compiled program serves every kind of pipeline.
    """
    k, delays = state.update, jnp.asarray(forward_delays, jnp.int32)
    on = jnp.asarray(delayed)
    oldest = jnp.where(on, state.filled_from, k)
    now = newest_weights(state)
    back = [
        part.backward_weights(tree, held, on.astype(jnp.float32)) if part.backward_weights else tree
        for part, tree, held in zip(parts, now, state.optimizer, strict=True)
    ]

    def add_micro_batch(gradients: Grads, given: tuple[Pytree, jax.Array]) -> tuple[Grads, Pytree]:
        aux, delay = given  # delay: [parts]
        seen = [_read_version(tree, jnp.maximum(k - delay[p], oldest)) for p, tree in enumerate(state.versions)]
        used = [_select(jnp.asarray(stashed) & on, old, new) for old, new in zip(seen, back, strict=True)]
        changes, extra = _run_micro_batch(parts, seen, used, aux)
        return jax.tree.map(jnp.add, gradients, changes), extra

    zeros = jax.tree.map(jnp.zeros_like, now)
    gradients, extra = jax.lax.scan(add_micro_batch, zeros, (batches, delays.T))
    versions, states = [], []
    for part, tree, gradient, held, old in zip(parts, now, gradients, state.optimizer, state.versions, strict=True):
        changes, new = part.optimizer.update(gradient, held, tree)
        versions.append(_store_version(old, optax.apply_updates(tree, changes), k + 1))
        states.append(new)
    sums = jax.tree.map(lambda value: value.sum(0), extra)
    # A synchronous update leaves the pipe empty, with version k + 1.
    return DelayState(tuple(versions), tuple(states), k + 1, jnp.where(on, oldest, k + 1)), sums


def _run_micro_batch(
    parts: Sequence[PipelinePart], seen: list[Params], used: list[Params], aux: Pytree
) -> tuple[tuple[Grads, ...], Pytree]:
    """Finds the gradients of one micro-batch: forward with the weights `seen`, backward with those `used`."""
    x: Pytree = ()
    kept = []
    extra: Pytree = {}
    for part, weights in zip(parts, seen, strict=True):
        both = trace_passes(part.function, weights, x, aux)
        x, extra, saved = both.forward(weights, x, aux)
        kept.append((both, saved))
    dy: Pytree = jnp.ones_like(x)
    gradients = []
    for (both, saved), weights in zip(reversed(kept), reversed(used), strict=True):
        gradient, dy = both.backward(weights, saved, dy)
        gradients.append(gradient)
    return tuple(reversed(gradients)), extra


def _read_version(tree: Params, number: jax.Array) -> Params:
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, number % w.shape[0], 0, keepdims=False), tree)


def _store_version(tree: Params, weights: Params, number: jax.Array) -> Params:
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, number % old.shape[0], 0), tree, weights
    )


def _select(first: jax.Array, a: Params, b: Params) -> Params:
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), a, b)
