"""The state of a run, as one value."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from multipod.optim.ema import EmaState
from multipod.pytrees import OptState, Params, Pytree, Statistics
from multipod.recipe.recipe import Recipe
from multipod.step.agreement import init_model

Sums = dict[str, jax.Array]
"""Sums over the examples of a batch, by the names of the objective's values; `count` is the number of examples."""
HostSums = dict[str, np.ndarray]
"""The same on the host."""


class State(NamedTuple):
    """Everything that an update reads and replaces; saved whole, so that a resumed run is the same run.

    Attributes:
      params: the model's parameters.
      statistics: the model's statistics (batch norm's moving moments).
      optimizer: the Optax state.
      key: data of the random key that all randomness on the devices comes from, uint32.
      update: updates done, int32.
      position: batches read, int32: the place in `TrainBatches`.
    """

    params: Params
    statistics: Statistics
    optimizer: OptState
    key: jax.Array
    update: jax.Array
    position: jax.Array


class PortableState(NamedTuple):
    """What a run has learnt, whatever its layout.

    Attributes:
      params, optimizer: of the whole model, tensors by their names.
      velocity: (PipeMare's T2) delta of each tensor that has one.
      statistics, key, update, position: as in `State`.
    """

    params: Params
    optimizer: OptState
    velocity: dict[str, jax.Array]
    statistics: Statistics
    key: jax.Array
    update: jax.Array
    position: jax.Array


def begin_reading(sums: Sums) -> None:
    """Has the sums copied to the host as soon as they are made: whoever reads them then does not wait for a copy."""
    for value in sums.values():
        if next(iter(value.devices())).platform != "cpu":  # whose memory is the host's
            value.copy_to_host_async()


def read_sums(sums: Sums) -> HostSums:
    """The sums on the host, in a tenth of the time of `jax.device_get`, which copies what lies on a CPU already."""
    return {name: np.asarray(value) for name, value in sums.items()}


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """The recipe's Optax transformation, with the average of the weights in its state if the recipe has `ema`."""
    optimizer = recipe.optimizer.build(recipe.updates)
    return optimizer if recipe.ema is None else recipe.ema.around(optimizer)


def fresh_state(recipe: Recipe, optimizer: optax.GradientTransformation) -> State:
    """The state before the first update; a pure function of the recipe."""
    params_key, train_key = jax.random.split(jax.random.key(recipe.seed))
    return begin_with(optimizer, *init_model(recipe, params_key), jax.random.key_data(train_key))


def begin_with(
    optimizer: optax.GradientTransformation, params: Params, statistics: Statistics, key: jax.Array
) -> State:
    """The state before the first update that begins with these weights; `key` as in `State`."""
    zero = jnp.zeros((), jnp.int32)
    kept = optimizer.init(params)
    kept = kept._replace(statistics=statistics) if isinstance(kept, EmaState) else kept
    return State(params, statistics, kept, key, zero, zero)


def update_key(state: State) -> jax.Array:
    """The random key of the update that `state` is about to have."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.update)


def parameter_count(recipe: Recipe) -> int:
    """How many parameters the recipe's model has. Nothing is allocated."""
    params, _ = jax.eval_shape(partial(init_model, recipe), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def device_bytes(tree: Pytree) -> int:
    """The bytes of a tree of (abstract) global arrays on one device of its mesh."""

    def local_bytes(leaf: Any) -> int:
        size = leaf.dtype.itemsize
        for n in leaf.sharding.shard_shape(leaf.shape):
            size *= n
        return size

    return sum(map(local_bytes, jax.tree.leaves(tree)))
