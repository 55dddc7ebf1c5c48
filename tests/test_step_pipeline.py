"""A recipe's model in pipeline stages, against the same model whole."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from multipod.errors import LayoutError, RecipeError, ScheduleError
from multipod.metrics.objective import TokenClassification, masked_sums
from multipod.models.bert import tiny_bert
from multipod.models.mlp import Mlp
from multipod.models.st_moe import small_st_moe
from multipod.models.transformer import small_transformer
from multipod.nn.by_example import NUMBERS
from multipod.nn.layered import shapes_of
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Cosine
from multipod.pipelines.build import build
from multipod.pipelines.check import check
from multipod.recipe.recipe import Recipe
from multipod.recipes.digits import digits
from multipod.step.staged.layer_times import timed_layers
from multipod.step.staged.pipe import cut_of, join_params, pipe_of, split_params

BATCH, LENGTH, VOCAB, N = 8, 6, 11, 2


def test_layers_are_timed_one_by_one():
    """With a clock that ticks once a call: every layer's times are 1, and it is asked twice a repeat."""
    ticks = itertools.count()
    timed = timed_layers(replace(digits(), model=Mlp(features=8, layers=2)), 4, 3, lambda: float(next(ticks)))
    assert [(layer.name, layer.cost) for layer in timed] == [(n, 1.0) for n in ("first", "layer 0", "layer 1", "last")]
    assert next(ticks) == 4 * 2 * 3


@pytest.fixture
def recipe() -> Recipe:
    model = tiny_bert(VOCAB, LENGTH, features=8, hidden=12, layers=3)
    optimizer = AdamW(Cosine(1e-2), weight_decay=0.1)
    return replace(
        digits(),
        model=model,
        batch=BATCH,
        optimizer=optimizer,
        objective=TokenClassification(tokens_per_example=LENGTH),
    )


def a_batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCAB, (2, BATCH, LENGTH))
    return {"token": tokens[0], "label": tokens[1], "weight": np.ones((BATCH, LENGTH), np.int32)}


def a_mesh(stages: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:stages]), ("stage",), axis_types=(AxisType.Auto,))


@pytest.mark.slow
def test_bert_with_its_tied_table_learns_the_same_in_stages(recipe):
    pipe = pipe_of(recipe, check(build("1f1b", 3, N)), a_mesh(3), a_batch())
    params, _ = jax.jit(recipe.model.init)(jax.random.key(0))
    assert pipe.setup.tied == (((0, "tokens/table"), (2, "tokens/table")),)
    state = pipe.begin(split_params(pipe, params))
    micro = jax.tree.map(lambda a: a.reshape(N, -1, *a.shape[1:]), a_batch())
    micro[NUMBERS] = np.arange(BATCH, dtype=np.uint32).reshape(N, -1)
    aux = {"batch": micro, "key": np.zeros((N, 2), np.uint32)}
    state, sums = jax.block_until_ready(pipe.compiled(pipe.setup.weights)(state, aux, True))

    optimizer = recipe.optimizer.build(recipe.updates)

    @jax.jit
    def whole(params):
        def loss(params):
            outputs, _ = recipe.model.apply(params, {}, a_batch(), train=True, key=jax.random.key(0))
            return masked_sums(recipe.objective(outputs, a_batch()))["loss"] / BATCH

        value, gradients = jax.value_and_grad(loss)(params)
        changes, _ = optimizer.update(gradients, optimizer.init(params), params)
        return value, optax.apply_updates(params, changes)

    value, known = whole(params)
    assert float(sums["loss"]) / BATCH == pytest.approx(float(value), rel=1e-5)
    found = join_params(pipe.unpack(state.weights))
    assert found.keys() == known.keys()
    for name, right in known.items():
        np.testing.assert_allclose(found[name], right, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_what_cannot_be_cut(recipe):
    with pytest.raises(LayoutError, match=r"6 stages for 5 layers: every stage needs one. Take 1 to 5 stages"):
        cut_of(recipe, 6)
    with pytest.raises(RecipeError, match="recipe digits: SmallResNet normalises over the batch"):
        cut_of(digits(), 2)
    with pytest.raises(RecipeError, match="recipe digits: StMoe does not say its layers, so it cannot be cut"):
        cut_of(replace(digits(), model=small_st_moe(8, features=8, heads=2, kv=4)), 2)
    clipped = replace(recipe, optimizer=replace(recipe.optimizer, clip=1.0))
    with pytest.raises(RecipeError, match=r"optimizer.clip limits the norm over the whole model"):
        pipe_of(clipped, check(build("1f1b", 2, N)), a_mesh(2), a_batch())
    with pytest.raises(ScheduleError, match=r"cannot stay equal: tokens/table \(parts 0, 1\)"):
        pipe_of(recipe, check(build("pipemare", 2, N, 8)), a_mesh(2), a_batch())
    with pytest.raises(LayoutError, match="batch=8 does not divide into 3 micro-batches on 1 data devices; batch=6"):
        pipe_of(recipe, check(build("1f1b", 2, 3)), a_mesh(2), a_batch())


def test_an_untied_transformer_has_tables_that_no_two_stages_share():
    tied = small_transformer(VOCAB, features=8, hidden=8, heads=2, encoder_layers=1, decoder_layers=1)
    untied = replace(tied, tied=False)
    assert cut_of(replace(digits(), model=tied), 3).tied == {"embedding/table": (0, 2)}
    assert cut_of(replace(digits(), model=untied), 3).tied == {}
    sizes = [sum(leaf.size for leaf in shapes_of(model).values()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == 2 * VOCAB * 8
