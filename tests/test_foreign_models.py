# ruff: noqa: E402 (what may be missing is asked for first)
"""Models of other libraries train as ours do: one network with one set of weights has one loss curve in all forms."""

from dataclasses import replace

import jax
import numpy as np
import pytest

for needed in ("keras", "haiku", "equinox"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'multipod[models]'")

import equinox as eqx
import flax.linen as linen
import haiku as hk
import keras
from foreign_models import FORMS, IMAGE, LinenNetwork, OurForm, plain_init

from multipod.data.batches import TrainBatches
from multipod.data.global_arrays import owned_rows, to_mesh
from multipod.errors import LayoutError, RecipeError
from multipod.interop.equinox import from_equinox
from multipod.interop.functions import from_functions
from multipod.interop.inputs import Input
from multipod.interop.keras_model import from_keras
from multipod.interop.linen import from_linen
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_sharding, make_mesh
from multipod.layout.split import ModelSplit
from multipod.nn.dims import dims_of
from multipod.optim.rates import Constant
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import from_text, to_text
from multipod.recipes.digits import digits
from multipod.step.program import program_of

UPDATES = 6


def recipe(model, layout) -> Recipe:
    optimizer = Sgd(Constant(0.1), momentum=0.9)
    return replace(digits(), model=model, layout=layout, optimizer=optimizer, batch=64, updates=UPDATES)


def curve(model, layout, first):
    """The losses of the first updates from the parameters `first` on, and the state after them."""
    chosen = recipe(model, layout)
    program = program_of(chosen, make_mesh(layout))
    sharding, state = batch_sharding(program.mesh), program.init()
    assert {n: x.shape for n, x in first.items()} == {n: x.shape for n, x in state.params.items()}
    state = state._replace(params={n: jax.device_put(x, state.params[n].sharding) for n, x in first.items()})
    rows = owned_rows(sharding, chosen.batch)
    batches = TrainBatches(chosen.data.train(), chosen.batch, 0, rows)
    update, go, losses = program.compile_update(), program.controls(), []
    for position in range(UPDATES):
        state, sums = update(state, to_mesh(batches[position], rows, chosen.batch, sharding), go)
        losses.append(float(sums["loss"]) / chosen.batch)
    return np.array(losses), jax.device_get(state)


@pytest.fixture(scope="module")
def ours():
    """The first parameters of the NNX form, its losses on two devices, and its last state."""
    first = jax.device_get(OurForm().init(jax.random.key(7))[0])
    return first, *curve(OurForm(), Layout((1, 2)), first)


def in_form(names, shapes, values):
    """Values of the NNX form's parameters under the names and in the shapes of another form."""
    taken = {name: values[of[2:]].T if of.startswith("T:") else values[of] for name, of in names.items()}
    return {name: np.reshape(value, shapes[name].shape) for name, value in taken.items()}


@pytest.mark.parametrize("form", FORMS)
def test_one_network_has_one_loss_curve_in_every_form(form, ours):
    """NNX on two devices; the others on four, with the hidden features split over two as their patterns name them."""
    first, losses, last = ours
    model, names = FORMS[form]
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    found, state = curve(model, Layout((1, 2), split=ModelSplit(model=2)), in_form(names, shapes, first))
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    assert losses[-1] < losses[0] - 0.2
    for name, value in in_form(names, shapes, last.params).items():
        np.testing.assert_allclose(state.params[name], value, atol=2e-6, err_msg=name)
    if form in ("linen", "keras"):  # the same moving moments, so also the same answers
        judged = {"image": np.linspace(0, 1, 2 * 64, dtype=np.float32).reshape(2, 8, 8, 1)}
        answers = [
            one.apply(of.params, of.statistics, judged, train=False, key=jax.random.key(0))[0]
            for one, of in ((model, state), (OurForm(), last))
        ]
        np.testing.assert_allclose(*answers, rtol=1e-5, atol=1e-5)


def test_names_of_dims_split_the_parameters_and_the_rest_is_said_to_stay_whole():
    model, _ = FORMS["linen"]
    placed = program_of(
        recipe(model, Layout((1, 2), split=ModelSplit(model=2))), make_mesh(Layout((1, 2), split=ModelSplit(model=2)))
    ).placement
    assert placed.tensors["hidden/kernel"].dims == (None, "mlp")
    assert placed.placements["out/kernel"].axes == (("model",), ())
    assert not placed.placements["hidden/bias"].covered


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, image):
        init = linen.with_partitioning(linen.initializers.ones, ("embed", "mlp"))
        return image.reshape(len(image), -1) @ self.param("kernel", init, (64, 10))


def test_linens_own_names_of_dims_are_read():
    assert dims_of(from_linen(Boxed(), IMAGE)) == {"kernel": ("embed", "mlp")}
    assert dims_of(from_linen(Boxed(), IMAGE, dims={"kernel": ("", "vocab")})) == {"kernel": (None, "vocab")}


def test_patterns_that_fit_nothing_are_refused_all_at_once():
    model = from_linen(LinenNetwork(), IMAGE, dims={"kernel$": ("mlp",), "weight": ("embed", "mlp")})
    with pytest.raises(LayoutError, match=r"'kernel\$' names 1 dims, and hidden/kernel is \[64, 16\]") as refused:
        dims_of(model)
    assert "'weight' is found in none of the parameters hidden/bias, hidden/kernel" in str(refused.value)


def test_a_linen_module_needs_the_shape_of_an_example():
    with pytest.raises(RecipeError, match=r'image has no shape. Write Input\("image", SHAPE\)'):
        from_linen(LinenNetwork(), "image")
    with pytest.raises(RecipeError, match="Name them in their order"):
        from_functions(plain_init, plain_init)


@pytest.mark.parametrize("form", ["linen", "keras", "functions", "equinox"])
def test_the_recipe_of_such_a_model_is_read_back_from_its_text(form):
    """Haiku's pairs are made inside a function of Haiku's, so they are not."""
    asked = recipe(FORMS[form][0], Layout((1, 2)))
    assert from_text(to_text(asked)) == asked


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, image, deterministic=False):
        return linen.Dropout(0.5, deterministic=deterministic)(image)


class EquinoxDropout(eqx.Module):
    drop: eqx.nn.Dropout

    def __call__(self, image, key):
        return self.drop(image, key=key)


def keras_dropout():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Dropout(0.5)])


def haiku_dropout(image, train):
    return hk.dropout(hk.next_rng_key(), 0.5, image) if train else image


DROPOUT = {
    "linen": from_linen(LinenDropout(), IMAGE),
    "equinox": from_equinox(lambda key: EquinoxDropout(eqx.nn.Dropout(0.5)), "image"),
    "keras": from_keras(keras_dropout, "image"),
    "haiku": from_functions(*hk.transform(haiku_dropout), IMAGE, train_argument="train"),
}


@pytest.mark.parametrize("form", DROPOUT)
def test_what_a_module_draws_depends_on_the_updates_key_alone(form):
    model, batch = DROPOUT[form], {"image": np.ones((4, 8, 8, 1), np.float32)}
    params, statistics = model.init(jax.random.key(0))
    assert (params, statistics) == ({}, {})

    def applied(train, key):
        outputs, after = model.apply(params, statistics, batch, train=train, key=jax.random.key(key))
        assert after == {}
        return np.asarray(outputs)

    once = applied(True, 1)
    assert set(np.unique(once)) == {0, 2}
    np.testing.assert_array_equal(once, applied(True, 1))
    assert (once != applied(True, 2)).any()
    np.testing.assert_array_equal(applied(False, 1), batch["image"])


class Subclassed(keras.Model):
    """A model that is built when it first sees an example."""

    def __init__(self):
        super().__init__(name="late")
        self.dense = keras.layers.Dense(3)

    def call(self, image):
        return self.dense(keras.ops.reshape(image, (-1, 64)))


def test_weights_that_keras_draws_follow_the_models_seed_and_nothing_else():
    first, again, other = (from_keras(Subclassed, Input("image", (8, 8, 1)), seed=seed) for seed in (1, 1, 2))
    drawn = [
        np.asarray(jax.jit(one.init)(jax.random.key(k))[0]["late/dense/kernel"])
        for k, one in enumerate((first, again, other))
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
