"""Ranks as rows of arrays, against a mesh."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.data.digits import Digits
from multipod.data.source import ArraySource
from multipod.execute.adasum import operator as adasum
from multipod.experiments.perceptron import Perceptron
from multipod.experiments.ranks import Carry, Study, curves, first_epochs, grid, start, step, tree
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_sharding, make_mesh
from multipod.layout.sync import Sync
from multipod.metrics.objective import Classification
from multipod.optim.rates import Constant
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe
from multipod.step.program import program_of

DIGITS = Digits(shift=0)
TRAIN = DIGITS.train().arrays
SGD = Sgd(Constant(0.1), nesterov=False)


@dataclass(frozen=True)
class First:
    """The first digits, in their order."""

    examples: int

    def train(self):
        return ArraySource({name: array[: self.examples] for name, array in TRAIN.items()})

    test = train


def study(model, ranks, optimizer=SGD, **fields):
    options = {"train": TRAIN, "judged": {"train": TRAIN}, "examples": 16, "epochs": 2} | fields
    return Study(model, Classification(), lambda settings: optimizer.build(10), ranks=ranks, **options)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["xla", "adasum"])
def test_a_step_is_that_of_a_mesh(how):
    model = Perceptron(hidden=(8,), norm=True, tile=(1, 1) if how == "adasum" else "all")
    recipe = Recipe("two", model, First(64), Classification(), SGD, 64, 10, Layout((1, 4), sync=Sync(how)))
    program = program_of(recipe, make_mesh(recipe.layout))
    ours = study(model, ranks=4, adasum=how == "adasum")
    state, optimizer = program.init(), SGD.build(10)
    carry = Carry(state.params, state.statistics, start(ours, optimizer, jax.random.key(0)).states)
    carry = jax.device_get(carry)  # the update gives the state up
    batch = {name: array[:64] for name, array in TRAIN.items()}
    update = jax.jit(program.update)
    one = jax.jit(lambda carry, rows: step(ours, optimizer, carry, rows))
    for _ in range(3):
        state, _ = update(state, jax.device_put(batch, batch_sharding(program.mesh)), program.controls())
        carry = one(carry, {name: array.reshape(4, 16, *array.shape[1:]) for name, array in batch.items()})
    for name, value in state.params.items():
        np.testing.assert_allclose(carry.params[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    for name, value in state.statistics.items():
        np.testing.assert_allclose(carry.statistics[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_the_tree_is_that_of_the_operator():
    vectors = np.random.default_rng(0).normal(size=(8, 5, 3)).astype(np.float32)
    vectors[2] = 0
    right = adasum.tree({k: vector.ravel() for k, vector in enumerate(vectors)}).reshape(5, 3)
    np.testing.assert_allclose(tree(jnp.asarray(vectors)), right, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adasum", [False, True])
def test_runs_at_once_are_the_runs_one_by_one(adasum):
    some = {name: array[:64] for name, array in TRAIN.items()}
    small = replace(study(Perceptron(hidden=(4,)), ranks=2), train=some, judged={"train": some}, adasum=adasum)
    settings = grid(seed=[0, 1, 2, 3])
    together = curves(small, settings)["train"]["loss"]
    assert together.shape == (4, 2)
    alone = curves(small, {name: column[3:] for name, column in settings.items()})["train"]["loss"]
    np.testing.assert_allclose(together[3:], alone, rtol=1e-4)
    assert len(np.unique(together[:, -1])) == 4


def test_the_first_epoch_at_a_loss():
    losses = np.array([[3.0, 1.0, 2.0], [3.0, 3.0, 3.0]])
    np.testing.assert_array_equal(first_epochs(losses, 1.5), [2, np.inf])
