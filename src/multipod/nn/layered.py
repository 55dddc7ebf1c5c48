"""A model as a sequence of layers, so that a pipeline can cut it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.nn.model import FlaxModel, skeleton, unflat, with_key
from multipod.pytrees import Batch, Outputs, Pytree


@dataclass(frozen=True)
class ModelLayer:
    """One layer.

    Attributes:
      name: of the layer.
      weights: names of the parameters that it uses; one that several layers name is tied.
      function: from (module, x, batch) to x. The first layer's x is (), the last one's result the model's outputs.
      cost: of a forward and backward pass, in any unit; here the multiplications of an example.
    """

    name: str
    weights: tuple[str, ...]
    function: Callable[[Any, Pytree, Batch], Pytree]
    cost: float


@runtime_checkable
class Layered(Protocol):
    """A `FlaxModel` that also says its layers. It has no statistics: those of a micro-batch are not the batch's."""

    def cut_points(self) -> tuple[ModelLayer, ...]:
        """The layers, in the order in which they are applied; together they are `FlaxModel.forward`."""
        ...


def names_under(model: FlaxModel, *prefixes: str) -> tuple[str, ...]:
    """The names of the parameters that begin with one of `prefixes`, in the order of the model."""
    return tuple(name for name in shapes_of(model) if name.startswith(prefixes))


@functools.lru_cache(maxsize=32)
def shapes_of(model: FlaxModel) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape of every parameter, by its name; allocates nothing."""
    return jax.eval_shape(model.init, jax.random.key(0))[0]


def apply_layers(
    model: FlaxModel,
    layers: Sequence[ModelLayer],
    params: Mapping[str, jax.Array],
    x: Pytree,
    batch: Batch,
    *,
    train: bool,
    key: jax.Array,
) -> Outputs:
    """`layers` applied to x, with no other parameters than their own."""
    graph, shapes = skeleton(model)
    # What other layers hold is not there: zeros in its place are used by nothing, and the compiler drops them.
    missing = {n: jnp.zeros(s.shape, s.dtype) for n, s in shapes_of(model).items() if n not in params}
    states = unflat(shapes[0], {**missing, **params}), with_key(shapes[1], key), unflat(shapes[2], {})
    module = nnx.merge(graph, *states, copy=True)
    module.train() if train else module.eval()
    for layer in layers:
        x = layer.function(module, x, batch)
    return x
