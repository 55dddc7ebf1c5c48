"""A model's module with given parameters, for what training does not do: decoding, looking inside."""

from typing import Any

import jax
from flax import nnx

from multipod.nn.model import FlaxModel, skeleton, unflat, with_key
from multipod.pytrees import Params, Statistics


def merge_model(model: FlaxModel, params: Params, statistics: Statistics = None) -> Any:
    """The module of `model` in evaluation mode; inside `jax.jit` its methods trace as its call does.

    `statistics` may be left out where the model has none. What the module changes in itself is lost.
    """
    graph, shapes = skeleton(model)
    random = with_key(shapes[1], jax.random.key(0))  # evaluation draws nothing, but the module wants its generators
    states = unflat(shapes[0], params), random, unflat(shapes[2], statistics or {})
    module = nnx.merge(graph, *states, copy=True)
    module.eval()
    return module
