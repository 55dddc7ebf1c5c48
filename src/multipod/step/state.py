"""The state of a run, as one value."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.recipe.recipe import Recipe


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

    params: Any
    statistics: Any
    optimizer: Any
    key: jax.Array
    update: jax.Array
    position: jax.Array


def fresh_state(recipe: Recipe, optimizer: optax.GradientTransformation) -> State:
    """The state before the first update; a pure function of the recipe."""
    params_key, train_key = jax.random.split(jax.random.key(recipe.seed))
    params, statistics = recipe.model.init(params_key)
    zero = jnp.zeros((), jnp.int32)
    return State(params, statistics, optimizer.init(params), jax.random.key_data(train_key), zero, zero)


def device_bytes(tree: Any) -> int:
    """The bytes of a tree of (abstract) global arrays on one device of its mesh."""

    def held(leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for n in shape:
            size *= n
        return size

    return sum(map(held, jax.tree.leaves(tree)))
