"""A model written in Keras 3, as it is: Keras runs on JAX. Needs `pip install 'multipod[models]'`.

Train it:    multipod train examples/keras_model.py:recipe
"""

import keras

from multipod.data.digits import Digits
from multipod.interop.keras_model import from_keras
from multipod.metrics.objective import Classification
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Cosine, WarmUp
from multipod.recipe.recipe import Recipe


def build() -> keras.Model:
    """A dense layer, batch norm, dropout, and logits."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )


def recipe() -> Recipe:
    """A small Keras network on the digits, 20 epochs."""
    return Recipe(
        name="keras",
        model=from_keras(build, "image", dims={"dense/kernel$": ("", "mlp"), "dense_1/kernel$": ("mlp", "")}),
        data=Digits(shift=0),
        objective=Classification(),
        optimizer=AdamW(WarmUp(Cosine(1e-2), 0.1)),
        batch=128,
        updates=224,
    )
