"""Gradients that can be looked at: an optimizer that keeps the last one in its state, whatever the layout."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.optim.optimizer import Builds
from multipod.pytrees import Grads, OptState, Params
from multipod.recipe.recipe import Recipe


class RecordedState(NamedTuple):
    """An optimizer's state with the gradient of the last update beside it, split and moved as it is.

    Attributes:
      inner: the optimizer's own.
      gradient: summed over the devices, before the optimizer limits or decays anything.
    """

    inner: OptState
    gradient: Grads


def recording(recipe: Recipe) -> Recipe:
    """`recipe` with an optimizer that keeps its last gradient.

    The recipe itself where updates are of touched rows alone: then there is no gradient of whole tensors.
    """
    if getattr(recipe.optimizer, "sparse", False):
        return recipe
    return replace(recipe, optimizer=_recording(recipe.optimizer))


def gradient_in(optimizer: OptState) -> Grads | None:
    """The gradient that the state of a `recording` optimizer keeps; None in others."""

    def is_one(node: Any) -> bool:
        return isinstance(node, RecordedState)

    return next((node.gradient for node in jax.tree.leaves(optimizer, is_leaf=is_one) if is_one(node)), None)


def _recording(optimizer: Builds) -> Builds:
    """A copy of an optimizer, of a class below its own, so that all else that it says of itself stays."""
    kind: Any = type(optimizer)

    def build(self: Builds, updates: int) -> optax.GradientTransformation:
        return _beside(kind.build(self, updates))

    made = copy.copy(optimizer)
    object.__setattr__(made, "__class__", type(f"Recording{kind.__name__}", (kind,), {"build": build}))
    return made


def _beside(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def init(params: Params) -> RecordedState:
        return RecordedState(inner.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Grads, state: RecordedState, params: Params | None = None) -> tuple[Grads, RecordedState]:
        changes, own = inner.update(gradients, state.inner, params)
        return changes, RecordedState(own, gradients)

    return optax.GradientTransformation(init, update)
