"""The step: every way of summing and splitting gives the same training."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from tiny_recipe import Perceptron

from multipod.data.batches import TrainBatches
from multipod.data.global_arrays import owned_rows, to_mesh
from multipod.errors import LayoutError
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_sharding, make_mesh
from multipod.metrics.objective import masked_sums
from multipod.optim.rates import Cosine
from multipod.optim.sgd import Sgd
from multipod.step.program import program_of
from multipod.step.specs import over_data
from multipod.step.state import device_bytes, fresh_state
from multipod.train.evaluation import evaluate

pytestmark = pytest.mark.jax_version


def trained(recipe, updates):
    """The state and the last sums after some updates of a recipe, without the loop."""
    program = program_of(recipe, make_mesh(recipe.layout))
    sharding = batch_sharding(program.mesh)
    rows = owned_rows(sharding, recipe.batch)
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows)
    update = program.compile_update()
    state, go = program.init(), program.controls()
    for position in range(updates):
        state, sums = update(state, to_mesh(batches[position], rows, recipe.batch, sharding), go)
        jax.block_until_ready(state)
    return program, state, sums


def largest_difference(a, b):
    """Over all tensors of two trees."""
    pairs = zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)


def plain_update(recipe, updates):
    """Training on one device with nothing but jax.grad and Optax: the readable reference."""
    optimizer = recipe.optimizer.build(recipe.updates)
    state = fresh_state(recipe, optimizer)
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, np.arange(recipe.batch))

    @jax.jit
    def update(params, statistics, optimizer_state, batch):
        def loss(params):
            outputs, new = recipe.model.apply(params, statistics, batch, train=True, key=jax.random.key(0))
            return recipe.objective(outputs, batch)["loss"].mean(), new

        gradients, statistics_ = jax.grad(loss, has_aux=True)(params)
        changes, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, changes), statistics_, optimizer_state

    params, statistics, optimizer_state = state.params, state.statistics, state.optimizer
    for position in range(updates):
        params, statistics, optimizer_state = update(params, statistics, optimizer_state, batches[position])
    return params, statistics


def smooth(small, **fields):
    """A recipe whose rounding errors do not grow: SGD, where Adam divides by moments near zero."""
    recipe = small(updates=50, **fields)
    return type(recipe)(**{**vars(recipe), "optimizer": Sgd(Cosine(0.02))})


@pytest.mark.slow
def test_torus_gives_the_same_parameters_as_xla_after_50_updates(small):
    _, xla, _ = trained(smooth(small), 50)
    _, torus, _ = trained(smooth(small, gradient_sum="torus"), 50)
    assert largest_difference(xla.params, torus.params) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("gradient_sum", ["xla", "torus"])
@pytest.mark.parametrize("shard_update", [False, True])
def test_the_mesh_trains_like_one_plain_device(small, gradient_sum, shard_update):
    recipe = smooth(small, gradient_sum=gradient_sum, shard_update=shard_update)
    _, state, _ = trained(recipe, 5)
    params, statistics = plain_update(recipe, 5)
    assert largest_difference(state.params, params) < 2e-6
    assert largest_difference(state.statistics, statistics) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("make", [optax.sm3, optax.adafactor], ids=lambda make: make.__name__)
def test_an_optimizer_from_elsewhere_works_with_a_split_update(small, make):
    class Elsewhere:
        def build(self, updates):
            return make(0.01)

    _, whole, _ = trained(small(model=Perceptron(), optimizer=Elsewhere()), 5)
    _, split, _ = trained(small(model=Perceptron(), optimizer=Elsewhere(), shard_update=True), 5)
    assert largest_difference(whole.params, split.params) < 2e-5


def test_optimizer_state_on_each_device_falls_with_the_number_of_devices(small):
    whole = device_bytes(program_of(small(), make_mesh(Layout((2, 4)))).shapes.optimizer)
    program, state, _ = trained(small(shard_update=True), 1)
    split = device_bytes(program.shapes.optimizer)
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state.optimizer)
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[3]
    )
    assert held == split
    assert whole / split > 7.5


@pytest.mark.parametrize("mesh", [(2, 4), (1, 7), (3, 1), (1, 1)])
def test_each_test_example_counts_once_on_any_number_of_devices(small, mesh):
    recipe = small(mesh=mesh, batch=7 * 3 * 8, evaluation_batch=100)
    program = program_of(recipe, make_mesh(recipe.layout))
    reference = program_of(small(mesh=(1, 1), batch=7 * 3 * 8), make_mesh(Layout((1, 1))))
    test = recipe.data.test()
    sums, expected = evaluate(program, program.init(), test), evaluate(reference, reference.init(), test)
    assert sums["count"] == expected["count"] == 360
    assert sums["accuracy"] == expected["accuracy"]
    assert sums["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_statistics_and_sums_are_the_same_on_every_device(small):
    _, state, sums = trained(small(mesh=(2, 4)), 2)
    for leaf in jax.tree.leaves((state.params, state.statistics, sums)):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == 8
        assert all(np.array_equal(copy, copies[0]) for copy in copies)


def test_one_device_that_asks_for_a_stop_is_heard_by_all(small):
    program, state, sums = trained(small(), 1)
    assert int(sums["stop"]) == 0
    batch = small().batch
    data = {"image": np.zeros((batch, 8, 8, 1), np.float32), "label": np.zeros(batch, np.int32)}
    sharding = batch_sharding(program.mesh)
    flags = jax.device_put(np.eye(8, dtype=np.int32)[3], sharding)
    _, sums = jax.jit(program.update)(state, jax.device_put(data, sharding), program.controls()._replace(stop=flags))
    assert int(sums["stop"]) == 1


def test_axes_beyond_the_data_axes_are_left_to_xla():
    mesh = jax.make_mesh((2, 2, 2), (*DATA_AXES, "model"), axis_types=(AxisType.Auto,) * 3)
    w = np.arange(16, dtype=np.float32).reshape(4, 4)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    split = jax.device_put(w, jax.sharding.NamedSharding(mesh, PartitionSpec(None, "model")))
    function = over_data(
        lambda x, w: jax.lax.psum(x.T @ x @ w, DATA_AXES),
        mesh,
        (PartitionSpec(DATA_AXES), PartitionSpec()),
        PartitionSpec(),
    )
    np.testing.assert_allclose(jax.jit(function)(x, split), x.T @ x @ w, rtol=1e-6)


def test_model_and_objective_promote_no_dtype_by_accident(small):
    recipe = small()  # Optax itself does promote, so not the whole step
    params, statistics = recipe.model.init(jax.random.key(0))
    batch = {"image": np.ones((2, 8, 8, 1), np.float32), "label": np.zeros(2, np.int32)}

    def loss(params):
        outputs, _ = recipe.model.apply(params, statistics, batch, train=True, key=jax.random.key(0))
        return masked_sums(recipe.objective(outputs, batch))["loss"]

    with jax.numpy_dtype_promotion("strict"):
        shapes = jax.eval_shape(jax.grad(loss), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_ones(small):
    with pytest.raises(
        LayoutError, match=r"batch=50 does not divide over the 8 devices of mesh 2x4. Use batch=48 or 56"
    ):
        _ = program_of(small(batch=50), make_mesh(Layout((2, 4)))).lowered


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(LayoutError, match=r"mesh 3x4 needs 12 devices, and there are 8 \(cpu\)\. Use --mesh 2x4"):
        make_mesh(Layout((3, 4)))
