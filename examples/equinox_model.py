"""A model written in Equinox, as it is.

Train it:    multipod train examples/equinox_model.py:recipe
"""

import equinox as eqx
import jax

from multipod.data.digits import Digits
from multipod.interop.equinox import from_equinox
from multipod.metrics.objective import Classification
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Cosine, WarmUp
from multipod.recipe.recipe import Recipe


class Network(eqx.Module):
    """Two convolutions, the second of which halves the image, and a linear layer."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, width, 3, padding=1, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, key=keys[1])
        self.head = eqx.nn.Linear(2 * width * 4 * 4, 10, key=keys[2])

    def __call__(self, image: jax.Array) -> jax.Array:
        """[10] logits of one image, [8, 8, 1]; Equinox puts channels first."""
        x = jax.nn.relu(self.conv1(image.transpose(2, 0, 1)))
        return self.head(jax.nn.relu(self.conv2(x)).ravel())


def build(key: jax.Array) -> Network:
    """A network of 16 channels."""
    return Network(16, key)


def recipe() -> Recipe:
    """A small Equinox convolution network on the digits, 20 epochs."""
    return Recipe(
        name="equinox",
        model=from_equinox(build, "image"),
        data=Digits(),
        objective=Classification(),
        optimizer=AdamW(WarmUp(Cosine(2e-2), 0.1), weight_decay=0.01),
        batch=128,
        updates=224,
    )
