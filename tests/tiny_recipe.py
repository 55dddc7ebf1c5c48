"""A recipe that compiles in a second: a perceptron of two plain functions, on the digits."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from multipod.recipe.recipe import Recipe
from multipod.recipes.digits import digits


@dataclass(frozen=True)
class Perceptron:
    """A model of two plain functions on a dictionary; its last bias divides by no mesh."""

    width: int = 16

    def init(self, key):
        a, b = jax.random.split(key)
        return {
            "in": jax.random.normal(a, (64, self.width)) / 8,
            "scale": jnp.ones(self.width),
            "out": jax.random.normal(b, (self.width, 10)) / self.width**0.5,
            "bias": jnp.zeros(10),
        }, {}

    def apply(self, params, statistics, batch, *, train, key):
        x = batch["image"].reshape(-1, 64) @ params["in"]
        return jnp.tanh(x * params["scale"]) @ params["out"] + params["bias"], statistics


def tiny() -> Recipe:
    """A perceptron on the digits."""
    return replace(digits(), name="tiny", model=Perceptron(), updates=60, evaluate_every=20, checkpoint_every=20)
