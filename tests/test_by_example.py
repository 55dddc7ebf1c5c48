"""What is drawn for an example does not depend on where it lies."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layout_recipes import VOCAB, words

from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync
from multipod.models.transformer import small_transformer
from multipod.nn.by_example import Dropout, numbered, numbered_examples
from multipod.nn.experts.routing import weights_of_groups
from multipod.step.program import program_of
from multipod.verify.recording import recording
from multipod.verify.reference import Reference
from multipod.verify.verify import hold


def masks(numbers: jax.Array, layer: Dropout) -> np.ndarray:
    with numbered_examples(numbers, jax.random.key(7)):
        return np.asarray(layer(jnp.ones((len(numbers), 3, 50))))


def test_a_mask_belongs_to_the_number_of_its_row():
    fresh = lambda: Dropout(0.4, rngs=nnx.Rngs(1))  # noqa: E731
    rows = numbered({"x": np.zeros(8)})["example_numbers"]
    whole = masks(rows, fresh())
    np.testing.assert_array_equal(np.concatenate([masks(rows[:2], fresh()), masks(rows[2:], fresh())]), whole)
    assert {*np.unique(whole)} == {0.0, np.float32(1 / 0.6)}
    assert abs((whole == 0).mean() - 0.4) < 0.05
    assert all((whole[0] != row).any() for row in whole[1:]), "each row has a mask of its own"


def test_without_numbers_it_is_that_of_flax():
    x = jnp.ones((4, 100))
    expected = nnx.Dropout(0.3, rngs=nnx.RngStream(nnx.Rngs(1)["dropout"](), tag="any"))(x)
    np.testing.assert_array_equal(Dropout(0.3, rngs=nnx.Rngs(1))(x), expected)


def test_what_belongs_to_no_example_differs_between_devices():
    rows, key = jnp.arange(8, dtype=jnp.uint32), jax.random.key(7)
    with numbered_examples(rows[:4], key) as one, numbered_examples(rows[4:], key) as other:
        assert (jax.random.key_data(one) != jax.random.key_data(other)).any()
    with numbered_examples(None, key) as own:
        np.testing.assert_array_equal(jax.random.key_data(own), jax.random.key_data(key))


def test_examples_weigh_the_same_wherever_they_are_cut():
    counts = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], bool)
    weights = np.asarray(weights_of_groups(counts, 3))[:, 0]
    np.testing.assert_allclose(weights, [0.4, 0.1, 0.5, 0, 0, 0])
    alone = [np.asarray(weights_of_groups(counts[at : at + 2], 1))[:, 0] for at in (0, 2)]
    np.testing.assert_allclose(np.concatenate(alone) / 2, weights[:4])
    np.testing.assert_allclose(weights_of_groups(counts[:2], 4)[:, 0], [0.8, 0.2])


LAYOUTS = {
    "data, a batch in parts": Layout((2, 2)),
    "stages": Layout((1, 2), pipeline=PipelineSplit(2, "1f1b", 2)),
    "a failed chip": Layout((2, 2), failed=((0, 1),)),
    "biases split twice": Layout((1, 2), ModelSplit(model=2), sync=Sync(sharding="zero1")),
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    """A Transformer that drops, with biases of 640: half of one is too large to be left whole."""
    model = small_transformer(VOCAB, features=16, hidden=640, heads=4, encoder_layers=1, decoder_layers=1, dropout=0.2)
    return Reference(recording(replace(words(), model=model)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_with_dropout_learns_the_same_in_any_layout(reference: Reference, name: str):
    layout = LAYOUTS[name]
    recipe = replace(reference.recipe, layout=layout, accumulate=2 if "parts" in name else 1)
    assert hold(program_of(recipe, make_mesh(layout)), reference).wrong == ()
