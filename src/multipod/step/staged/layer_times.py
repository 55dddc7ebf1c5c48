"""How long each layer of a model takes, measured: costs by which a pipeline is cut."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from multipod.data.source import example_of
from multipod.layout.stages import Layer
from multipod.nn.layered import ModelLayer, apply_layers
from multipod.recipe.recipe import Recipe
from multipod.step.staged.pipe import layers_of


def timed_layers(
    recipe: Recipe, rows: int, repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> list[Layer]:
    """The model's layers, the cost of each being the seconds of its forward and backward pass of `rows` examples.

    On the first device, each layer compiled by itself: the median of `repeats`. The last layer is timed without the
    loss. Compare them with each other, not with an update.

    Raises:
      RecipeError: a model that does not say its layers.
    """
    params = jax.jit(recipe.model.init)(jax.random.key(recipe.seed))[0]
    example = example_of(recipe.data, "train")
    batch = {name: jnp.repeat(jnp.asarray(array[:1]), rows, 0) for name, array in example.items()}
    x: Any = ()
    found = []
    for layer in layers_of(recipe):
        own = {name: params[name] for name in layer.weights}
        run = jax.jit(_both_passes(recipe, layer))
        x_next, _ = jax.block_until_ready(run(own, x, batch))  # compiles
        times = []
        for _ in range(repeats):
            began = clock()
            jax.block_until_ready(run(own, x, batch))
            times.append(clock() - began)
        found.append(Layer(layer.name, statistics.median(times), layer.weights))
        x = x_next
    return found


def _both_passes(recipe: Recipe, layer: ModelLayer) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """From (weights, x, batch) to (y, gradients for a dy of ones)."""

    def both(weights: Any, x: Any, batch: Any) -> tuple[Any, Any]:
        def function(weights: Any, x: Any) -> Any:
            model: Any = recipe.model
            return apply_layers(model, (layer,), weights, x, batch, train=True, key=jax.random.key(0))

        y, pull = jax.vjp(function, weights, x)
        return y, pull(jax.tree.map(jnp.ones_like, y))

    return both
