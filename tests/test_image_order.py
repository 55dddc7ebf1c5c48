"""Images that lie in another order in the devices' memory: the same run, and a step that takes them as they lie."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from multipod.data.reading import InputOptions
from multipod.data.source import ArraySource
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.metrics.objective import Classification
from multipod.optim.rates import Cosine
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe
from multipod.step.memory_layout import input_formats
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.loop import train


@dataclass(frozen=True)
class Pictures:
    def train(self):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (16, 6, 4, 3), dtype=np.uint8)
        return ArraySource({"image": images, "label": rng.integers(0, 3, 16, dtype=np.int32)})

    def test(self):
        return self.train()


@dataclass(frozen=True)
class Linear:
    def init(self, key):
        return {"weight": 0.01 * jax.random.normal(key, (6, 4, 3, 3))}, {}

    def apply(self, params, statistics, batch, *, train, key):
        return jnp.einsum("nhwc,hwck->nk", batch["image"] / 255, params["weight"]), statistics


def trained(order):
    recipe = Recipe(
        "pictures", Linear(), Pictures(), Classification(), Sgd(Cosine(0.1)), batch=8, updates=3,
        layout=Layout((1, 2)), evaluation_batch=8,
    )  # fmt: skip
    program = program_of(recipe, make_mesh(recipe.layout))
    return program, train(program, RunContext(reading=InputOptions(image_order=order)))[0]


def test_the_order_of_images_in_memory_changes_nothing_that_is_learnt():
    _, plain = trained("")
    for order in ("HWCN", "auto"):
        program, state = trained(order)
        np.testing.assert_allclose(state.params["weight"], plain.params["weight"], rtol=1e-6)
    formats = input_formats(program.compile_update("HWNC"))
    batch = program.place_batch(program.recipe.data.train().read(np.arange(8)), np.arange(8), 8, formats)
    assert batch["image"].format.layout.major_to_minor == (1, 2, 0, 3)
    assert len({shard.device for shard in batch["image"].addressable_shards}) == 2
    np.testing.assert_array_equal(batch["image"], program.recipe.data.train().read(np.arange(8))["image"])
