"""Updates of touched rows in the trainer, against Optax on gradients of whole tables."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from optimizers import make_optimizer

from multipod.data.batches import TrainBatches
from multipod.data.clicks.synthetic import Synthetic
from multipod.errors import LayoutError, RecipeError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.sync import Sync
from multipod.models.dlrm import Dlrm
from multipod.optim.adagrad import Adagrad
from multipod.optim.optimizer import Optimizer
from multipod.optim.rates import Constant, Cosine, WarmUp
from multipod.optim.sgd import Sgd
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipes.find import load
from multipod.step.program import program_of

DATA = Synthetic(rows=(120, 30, 5), examples=192, tests=40)
MODEL = Dlrm(rows=DATA.rows, bottom=(4,), top=(4,), features=8, tt_rows=100, tt_rank=2)


def recipe(optimizer: Optimizer, layout: Layout, **changes) -> Recipe:
    base = replace(load("dlrm-small"), data=DATA, model=MODEL, batch=30, updates=3, evaluate_every=0)
    return replace(base, optimizer=optimizer, layout=layout, checkpoint_every=0, **changes)


def trained(asked: Recipe):
    """The losses of three updates, and the state after them."""
    program = program_of(asked, make_mesh(asked.layout))
    update, state, rows, losses = program.compile_update(), program.init(), np.arange(program.rows), []
    batches = iter(TrainBatches(DATA.train(), asked.batch, asked.seed, rows, program.padded).start(0))
    for _ in range(asked.updates):
        placed = program.place_batch(next(batches), rows, program.rows)
        state, sums = update(state, placed, program.controls())
        losses.append(float(sums["loss"]))
    return losses, state


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad"])
def test_touched_rows_change_as_under_optax_with_whole_gradients(rule):
    whole = make_optimizer(rule, Constant(0.5), momentum=0.0)
    layout = Layout((1, 2))
    (losses, state), (own_losses, own) = (
        trained(recipe(optimizer, layout)) for optimizer in (whole, replace(whole, sparse=True))
    )
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    assert jax.tree.structure(own) == jax.tree.structure(state)  # a checkpoint of one is one of the other
    for ours, theirs in zip(
        jax.tree.leaves((own.params, own.optimizer)), jax.tree.leaves((state.params, state.optimizer)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_no_gradient_has_the_size_of_a_table():
    data = replace(DATA, rows=(200_000, 30, 5))
    model = Dlrm(rows=data.rows, bottom=(4,), top=(4,), features=8)
    optimizer = Adagrad(Constant(1e-3), sparse=True)
    asked = replace(recipe(optimizer, Layout((1, 2))), data=data, model=model)
    program = program_of(asked, make_mesh(asked.layout))
    compiled = program.lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 8 * 200_000 / 4
    assert f"f32[{200_035 * 8}]" not in compiled.as_text()  # what a sum of whole gradients would send


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (Sgd, {}, r"leaves rows without gradient as they are, with optimizer.momentum=0.9 \(0\)"),
        (
            Adagrad,
            {"clip": 1.0, "weight_decay": 0.1},
            r"optimizer.weight_decay=0.1 \(0\), optimizer.clip=1.0",
        ),
    ],
)
def test_optimizers_that_move_every_row(kind, fields, said):
    with pytest.raises(RecipeError, match=said):
        kind(Constant(1e-3), **fields, sparse=True)


def test_only_optimizers_that_leave_rows_alone_can_be_sparse():
    with pytest.raises(RecipeError, match=r"no field 'optimizer.sparse'. .* optimizer is AdamW."):
        override(load("digits"), ["optimizer.sparse=true"])


def test_what_needs_whole_gradients():
    optimizer = Adagrad(WarmUp(Cosine(1e-3), 0.1), sparse=True)
    asked = recipe(optimizer, Layout((1, 2), sync=Sync(sharding="zero1")), accumulate=5)
    with pytest.raises(LayoutError, match=r"layout.shard_update=true and accumulate=5 with optimizer.sparse=true"):
        _ = program_of(asked, make_mesh(asked.layout)).sync
    digits = replace(load("digits"), optimizer=optimizer)
    with pytest.raises(RecipeError, match=r"optimizer.sparse=true: \w+ has no tables of vectors"):
        _ = program_of(digits, make_mesh(digits.layout)).sync
