"""A model written in Equinox: the module's arrays are the parameters, and all else of it is rebuilt.

Train it:    multipod train examples/equinox_model.py:recipe
Change it:   multipod train examples/equinox_model.py:recipe --set model.width=32
"""

from dataclasses import dataclass

import equinox as eqx
import jax

from multipod.data.digits import Digits
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


@dataclass(frozen=True)
class EquinoxNetwork:
    """Any Equinox module without state meets the trainer in this way; only `Network` is our own here."""

    width: int = 16

    def init(self, key):
        """The module's arrays as parameters, and no statistics."""
        return eqx.filter(Network(self.width, key), eqx.is_inexact_array), {}

    def apply(self, params, statistics, batch, *, train, key):
        """Logits of a batch, and the statistics unchanged."""
        # Only the structure of this module is used: XLA leaves out its arrays, which nobody reads.
        _, rest = eqx.partition(Network(self.width, jax.random.key(0)), eqx.is_inexact_array)
        return jax.vmap(eqx.combine(params, rest))(batch["image"]), statistics


def recipe() -> Recipe:
    """A small Equinox convolution network on the digits, 20 epochs."""
    return Recipe(
        name="equinox",
        model=EquinoxNetwork(),
        data=Digits(),
        objective=Classification(),
        optimizer=AdamW(WarmUp(Cosine(2e-2), 0.1), weight_decay=0.01),
        batch=128,
        updates=224,
    )
