"""A model that is two plain functions on a dictionary: a perceptron with one hidden layer, on the digits.

Train it:    multipod train examples/plain_function.py:recipe
Change it:   multipod train examples/plain_function.py:recipe --set model.hidden=32
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from multipod.data.digits import Digits
from multipod.metrics.objective import Classification
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Cosine, WarmUp
from multipod.recipe.recipe import Recipe

PIXELS, CLASSES = 64, 10

Params = dict[str, jax.Array]


def fresh(key: jax.Array, hidden: int) -> Params:
    """The parameters before the first update."""
    first, second = jax.random.split(key)
    return {
        "hidden/kernel": jax.random.normal(first, (PIXELS, hidden)) * (2 / PIXELS) ** 0.5,
        "hidden/bias": jnp.zeros(hidden),
        "out/kernel": jax.random.normal(second, (hidden, CLASSES)) * hidden**-0.5,
        "out/bias": jnp.zeros(CLASSES),
    }


def logits(params: Params, image: jax.Array) -> jax.Array:
    """[examples, classes] from images [examples, 8, 8, 1]."""
    x = image.reshape(len(image), PIXELS)
    x = jax.nn.relu(x @ params["hidden/kernel"] + params["hidden/bias"])
    return x @ params["out/kernel"] + params["out/bias"]


@dataclass(frozen=True)
class Perceptron:
    """The two functions under the names that the trainer calls. Its fields are what `--set` can change."""

    hidden: int = 64

    def init(self, key):
        """Fresh parameters and no statistics."""
        return fresh(key, self.hidden), {}

    def apply(self, params, statistics, batch, *, train, key):
        """Logits of a batch, and the statistics unchanged."""
        return logits(params, batch["image"]), statistics


def recipe() -> Recipe:
    """One hidden layer of 64 on the digits, 20 epochs."""
    return Recipe(
        name="perceptron",
        model=Perceptron(),
        data=Digits(shift=0),
        objective=Classification(),
        optimizer=AdamW(WarmUp(Cosine(1e-2), 0.1)),
        batch=128,
        updates=224,
    )
