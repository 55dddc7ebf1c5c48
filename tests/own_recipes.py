"""Recipes as users write them: a Flax NNX module with Flax's own batch norm, and a class that nobody can hash."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.nn.model import FlaxModel
from multipod.recipe.recipe import Recipe
from multipod.recipes.digits import digits


class Network(nnx.Module):
    """A convolution, Flax's batch norm, and a dense layer."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.head = nnx.Linear(64 * width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(image)))
        return self.head(x.reshape(len(x), -1))


@dataclass(frozen=True)
class NnxNetwork(FlaxModel):
    """The module under the names that the trainer calls."""

    width: int = 4

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        return Network(self.width, rngs)

    def forward(self, module, batch):
        return module(batch["image"])


@dataclass
class Sums:
    """A model of two functions, in a dataclass that is neither frozen nor hashable."""

    sizes: dict[str, int] = field(default_factory=lambda: {"classes": 10})

    def init(self, key):
        return {"kernel": jax.random.normal(key, (64, self.sizes["classes"])) / 8}, {}

    def apply(self, params, statistics, batch, *, train, key):
        return jnp.reshape(batch["image"], (-1, 64)) @ params["kernel"], statistics


def flax() -> Recipe:
    """An NNX module on the digits."""
    return replace(digits(), name="flax", model=NnxNetwork(), updates=40, evaluate_every=0)


def plain() -> Recipe:
    """Two functions on the digits."""
    return replace(digits(), name="plain", model=Sums(), updates=40, evaluate_every=0)
