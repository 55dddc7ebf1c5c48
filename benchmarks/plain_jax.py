"""The peer that our step is compared with: what a user of JAX and Flax would write without multipod.

One program over all devices, `jax.jit` with a `NamedSharding` on the batch; XLA's partitioner finds the
collectives. Of multipod it takes the network's convolutions, the order of the data and the optimizer, so
that it does the same work; batch norm is Flax's own, which under `jax.jit` spans the whole batch as ours
does.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from multipod.models.resnet import SmallResNet
from multipod.recipe.recipe import Recipe

State = tuple[Any, Any, Any]
"""Parameters, moving moments, Optax state."""
Step = Callable[[State, dict[str, jax.Array]], tuple[State, dict[str, jax.Array]]]


def network(spec: SmallResNet, key: jax.Array) -> nnx.Module:
    """The network of `spec` with Flax's batch norm in place of ours."""
    module = spec.module(nnx.Rngs(key))
    module.norm = batch_norm(module.norm)
    for block in module.blocks:
        block.norm1, block.norm2 = batch_norm(block.norm1), batch_norm(block.norm2)
    return module


def batch_norm(ours: Any) -> nnx.BatchNorm:
    """Flax's layer with the size and numbers of ours."""
    return nnx.BatchNorm(ours.scale.shape[0], momentum=ours.momentum, epsilon=ours.epsilon, rngs=nnx.Rngs(0))


def shardings() -> tuple[NamedSharding, NamedSharding]:
    """The batch split over all devices, and whole on each."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def build(recipe: Recipe) -> tuple[Step, State]:
    """The compiled step and the state before the first update; the step gives up the state passed in."""
    key, _ = jax.random.split(jax.random.key(recipe.seed))
    graph, params, statistics = nnx.split(network(recipe.model, key), nnx.Param, ...)
    optimizer = recipe.optimizer.build(recipe.updates)

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        params, statistics, moments = state

        def loss(params: Any) -> tuple[jax.Array, Any]:
            module = nnx.merge(graph, params, statistics, copy=True)
            logits = module(batch["image"])
            targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), recipe.objective.label_smoothing)
            right = (logits.argmax(-1) == batch["label"]).sum(dtype=jnp.int32)
            return optax.softmax_cross_entropy(logits, targets).mean(), (nnx.split(module, nnx.Param, ...)[2], right)

        (value, (statistics, right)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), statistics, moments), {"loss": value, "right": right}

    split, whole = shardings()
    state = jax.device_put((params, statistics, optimizer.init(params)), whole)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), state)
    example = recipe.data.train().read(np.zeros(recipe.batch, int))
    batch = {k: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=split) for k, array in example.items()}
    return jax.jit(step, donate_argnums=0, out_shardings=whole).lower(shapes, batch).compile(), state
