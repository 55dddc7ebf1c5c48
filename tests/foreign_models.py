"""One small network in the form of each library: a dense layer, batch norm, ReLU, a dense layer.

Each form is a model for a recipe, and a table from the names of its parameters to those of the NNX form; a name behind
`T:` is of the transposed kernel.
"""

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import keras
from flax import nnx

from multipod.interop.equinox import from_equinox
from multipod.interop.functions import from_functions
from multipod.interop.inputs import Input
from multipod.interop.keras_model import from_keras
from multipod.interop.linen import from_linen
from multipod.nn.model import FlaxModel

WIDTH, CLASSES = 16, 10
IMAGE = Input("image", (8, 8, 1))


class NnxNetwork(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, epsilon=1e-3, rngs=rngs)
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, image):
        return self.out(nnx.relu(self.norm(self.hidden(image.reshape(len(image), -1)))))


class OurForm(FlaxModel):
    def module(self, rngs):
        return NnxNetwork(rngs)

    def forward(self, module, batch):
        return module(batch["image"])


class LinenNetwork(linen.Module):
    width: int = WIDTH

    @linen.compact
    def __call__(self, image, train=False):
        x = linen.Dense(self.width, name="hidden")(image.reshape(len(image), -1))
        norm = linen.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-3, name="norm")
        return linen.Dense(CLASSES, name="out")(linen.relu(norm(x)))


class EquinoxNetwork(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.hidden = eqx.nn.Linear(64, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", eps=1e-3, momentum=0.9, mode="batch")
        self.out = eqx.nn.Linear(WIDTH, CLASSES, key=jax.random.fold_in(key, 1))

    def __call__(self, image, state):
        x, state = self.norm(self.hidden(image.reshape(-1)), state)
        return self.out(jax.nn.relu(x)), state


def build_equinox(key):
    return eqx.nn.make_with_state(EquinoxNetwork)(key)


def build_keras():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(WIDTH, name="hidden"),
            layers.BatchNormalization(momentum=0.9, epsilon=1e-3, name="norm"),
            layers.ReLU(),
            layers.Dense(CLASSES, name="out"),
        ],
        name="net",
    )


def forward_haiku(image, is_training):
    x = hk.Linear(WIDTH, name="hidden")(image.reshape(len(image), -1))
    x = hk.BatchNorm(True, True, decay_rate=0.9, eps=1e-3, name="norm")(x, is_training)
    return hk.Linear(CLASSES, name="out")(jax.nn.relu(x))


HAIKU = hk.transform_with_state(forward_haiku)


def plain_init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(first, (64, WIDTH)) / 8, "bias": jnp.zeros(WIDTH)},
        "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
        "out": {"kernel": jax.random.normal(second, (WIDTH, CLASSES)) / 4, "bias": jnp.zeros(CLASSES)},
    }


def plain_apply(params, image):
    x = image.reshape(len(image), -1) @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    mean = x.mean(0)
    x = (x - mean) / jnp.sqrt((x * x).mean(0) - mean * mean + 1e-3) * params["norm"]["scale"] + params["norm"]["bias"]
    return jax.nn.relu(x) @ params["out"]["kernel"] + params["out"]["bias"]


DIMS = {"hidden/(kernel|w)$": ("", "mlp"), "out/(kernel|w)$": ("mlp", "")}
SAME = {name: name for name in ("hidden/kernel", "hidden/bias", "norm/scale", "norm/bias", "out/kernel", "out/bias")}

FORMS = {
    "linen": (from_linen(LinenNetwork(), IMAGE, dims=DIMS), SAME),
    "equinox": (
        from_equinox(build_equinox, "image", dims={"hidden/weight": ("mlp", ""), "out/weight": ("", "mlp")}),
        {
            "hidden/weight": "T:hidden/kernel",
            "hidden/bias": "hidden/bias",
            "norm/weight": "norm/scale",
            "norm/bias": "norm/bias",
            "out/weight": "T:out/kernel",
            "out/bias": "out/bias",
        },
    ),
    "keras": (
        from_keras(build_keras, "image", dims=DIMS),
        {
            "net/hidden/kernel": "hidden/kernel",
            "net/hidden/bias": "hidden/bias",
            "net/norm/gamma": "norm/scale",
            "net/norm/beta": "norm/bias",
            "net/out/kernel": "out/kernel",
            "net/out/bias": "out/bias",
        },
    ),
    "haiku": (
        from_functions(*HAIKU, IMAGE, stateful=True, train_argument="is_training", dims=DIMS),
        {
            "hidden/w": "hidden/kernel",
            "hidden/b": "hidden/bias",
            "norm/scale": "norm/scale",
            "norm/offset": "norm/bias",
            "out/w": "out/kernel",
            "out/b": "out/bias",
        },
    ),
    "functions": (from_functions(plain_init, plain_apply, "image", takes_key=False, dims=DIMS), SAME),
}
"""The model of each form, and what its parameters are called in the NNX form."""
