"""The cache of hot rows: counting, lookups, what stays, enters and leaves; sparse optimizers."""

import itertools
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from optimizers import make_optimizer

from multipod.errors import DataError, RecipeError
from multipod.nn.tables.hot_rows import bag_with_hot_rows, count_ids, empty_cache, refresh
from multipod.nn.tables.tensor_train import LARGEST, look_up, materialize, tensor_train
from multipod.nn.tables.tensor_train_bag import bag
from multipod.optim.rates import Constant
from multipod.optim.sparse import adagrad_rows, make_row_gradient, rowwise_adagrad_rows, sgd_rows
from multipod.step.state import State
from multipod.train.checkpoints.checkpoint import Checkpoints

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TT = tensor_train(120, 8, 4)
count = jit(count_ids)
refresh = jit(partial(refresh, TT), static_argnames=("policy", "steps", "fade"))


def drawn(seed: int = 3) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape) / 2, jnp.float32) for shape in TT.shapes)


def one_bag(ids) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(ids, np.int32), np.array([0, len(ids)], np.int32)


def warmed(ids=(5, 5, 5, 9, 9, 2, 2, 2, 2, 70), size: int = 3):
    """A cache that holds the ids 2, 5 and 9."""
    rows, hot = empty_cache(TT, size)
    return refresh(drawn(), rows, count(hot, *one_bag(ids)))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), min_size=12, max_size=12), min_size=1, max_size=8))
def test_counts_are_never_above_and_hardly_below_the_truth(batches):
    _, hot = empty_cache(TT, 2, 6)
    for batch in batches:
        hot = count(hot, *one_bag(batch))
    truth = Counter(itertools.chain.from_iterable(batches))
    found = {int(i): int(c) for i, c in zip(hot.candidates, hot.counts, strict=True) if i < LARGEST}
    assert int(hot.seen) == sum(truth.values())
    for number, true in truth.items():
        assert true - int(hot.seen) / 7 <= found.get(number, 0) <= true


def test_padding_is_not_counted():
    _, hot = empty_cache(TT, 2)
    hot = count(hot, np.array([4, 4, 9, 9, 9], np.int32), np.array([0, 1, 3], np.int32))
    assert dict(zip(hot.candidates.tolist(), hot.counts.tolist(), strict=True)) == {4: 2, 9: 1, LARGEST: 0}
    assert int(hot.seen) == 3


def test_the_most_frequent_enter_with_the_values_of_the_cores():
    cores, rows, hot, report = warmed()
    assert hot.ids.tolist() == [2, 5, 9]
    np.testing.assert_allclose(rows, look_up(TT, cores, hot.ids), rtol=1e-6)
    assert (int(report.entered), int(report.left), float(report.lost)) == (3, 0, 0.0)
    assert float(count(hot, *one_bag([2, 5, 9, 70])).hits) == 3


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_lookups_are_those_of_a_table_with_these_rows(mode):
    cores, rows, hot, _ = warmed()
    rows = rows + 1.0  # as if trained
    rng = np.random.default_rng(0)
    ids = rng.choice([2, 5, 9, 70, 71, 119], 30).astype(np.int32)
    offsets = np.array([0, 4, 4, 20, 26], np.int32)
    weights = jnp.asarray(rng.uniform(1, 2, 30), jnp.float32)
    table = np.array(materialize(TT, cores))
    table[np.asarray(hot.ids)] = rows
    found = jit(
        lambda: bag_with_hot_rows(TT, cores, rows, hot, jnp.asarray(ids), jnp.asarray(offsets), weights, mode)
    )()
    for b in range(4):
        part = slice(offsets[b], offsets[b + 1])
        sums = np.asarray(weights)[part] @ table[ids[part]]
        total = float(np.asarray(weights)[part].sum()) or 1.0
        np.testing.assert_allclose(found[b], sums / (total if mode == "mean" else 1), rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match=r"ads: id 120 at place 0 is outside its 120 rows"):
        bag_with_hot_rows(TT, cores, rows, hot, *one_bag([120]), table="ads")


def test_cached_lookups_leave_the_cores_alone():
    cores, rows, hot, _ = warmed()

    @partial(jit, static_argnums=2)
    def gradients(cores, rows, ids):
        def total(cores, rows):
            return bag_with_hot_rows(TT, cores, rows, hot, *map(jnp.asarray, one_bag(ids))).sum()

        return jax.grad(total, (0, 1))(cores, rows)

    of_cores, of_rows = gradients(cores, rows, (2, 9, 9))
    assert not any(np.asarray(core).any() for core in of_cores)
    assert np.asarray(of_rows)[:, 0].tolist() == [1.0, 0.0, 2.0]
    of_cores, of_rows = gradients(cores, rows, (70, 71))
    assert all(np.asarray(core).any() for core in of_cores)
    assert not np.asarray(of_rows).any()


def test_rows_that_stay_keep_what_they_learnt_bit_for_bit():
    cores, rows, hot, _ = warmed()
    rows = rows + 0.37
    hot = count(hot, *one_bag([70] * 9 + [2, 5]))
    _, new, after, report = refresh(cores, rows, hot)
    assert after.ids.tolist() == [2, 5, 70]
    assert np.array_equal(new[:2], rows[:2])
    assert (int(report.entered), int(report.left)) == (1, 1)


def test_discard_forgets_what_left_and_says_how_much():
    cores, rows, hot, _ = warmed()
    hot = count(hot, *one_bag([70] * 9 + [2, 5]))
    same, new, _, report = refresh(cores, rows + 0.5, hot, policy="discard")
    assert jax.tree.all(jax.tree.map(np.array_equal, same, cores))
    assert float(report.learnt) == float(report.lost) == pytest.approx(0.5 * 8**0.5, rel=1e-4)
    np.testing.assert_allclose(new[2], look_up(TT, cores, np.array([70]))[0], rtol=1e-6)


def test_write_back_teaches_the_cores_what_left():
    cores, rows, hot, _ = warmed()
    trained = rows + 0.5
    hot = count(hot, *one_bag([70] * 9 + [2, 5]))
    taught, new, _, report = refresh(cores, trained, hot)
    assert float(report.learnt) == pytest.approx(0.5 * 8**0.5, rel=1e-4)
    assert float(report.lost) < 0.02 * float(report.learnt)
    np.testing.assert_allclose(look_up(TT, taught, np.array([9]))[0], trained[2], atol=0.02)
    np.testing.assert_allclose(new[2], look_up(TT, taught, np.array([70]))[0], rtol=1e-5, atol=1e-6)


def test_counts_fade():
    *_, hot, _ = refresh(
        drawn(), empty_cache(TT, 2)[0], count(empty_cache(TT, 2)[1], *one_bag([1] * 8 + [2] * 3)), fade=0.5
    )
    assert sorted(hot.counts.tolist())[-2:] == [1, 4]


def test_devices_of_a_mesh_count_together():
    _, hot = empty_cache(TT, 3)
    ids = np.random.default_rng(0).integers(0, 40, (8, 5)).astype(np.int32)
    offsets = np.tile(np.array([0, 5], np.int32), (8, 1))
    mesh, split, whole = Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"), PartitionSpec()
    together = jax.shard_map(
        lambda hot, i, o: count_ids(hot, i[0], o[0], "x"), mesh=mesh, in_specs=(whole, split, split), out_specs=whole,
        check_vma=False,
    )  # fmt: skip
    alone = count(hot, *one_bag(ids.ravel()))
    for ours, theirs in zip(jit(together)(hot, ids, offsets), alone, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
def test_a_checkpoint_holds_the_cache(tmp_path):
    cores, rows, hot, _ = warmed()
    zero = jnp.zeros((), jnp.int32)
    state = State(
        {"cores": cores, "rows": rows}, hot, optax.EmptyState(), jax.random.key_data(jax.random.key(0)), zero, zero
    )
    store = Checkpoints(tmp_path / "checkpoints", 1)
    store.save(state, 0)
    store.wait()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state)
    back = store.restore(shapes, None)
    store.close()
    assert jax.tree.all(jax.tree.map(np.array_equal, back, state))
    ids, offsets = map(jnp.asarray, one_bag([2, 70]))
    again = bag_with_hot_rows(TT, back.params["cores"], back.params["rows"], back.statistics, ids, offsets)
    assert np.array_equal(again, bag_with_hot_rows(TT, cores, rows, hot, ids, offsets))


@pytest.mark.parametrize("sizes", [(0, 0), (5, 3), (500, 600)])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(RecipeError, match=r"hot rows: size=\d+ with counters=\d+ for a table of 120 rows"):
        empty_cache(TT, *sizes)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_touched_rows_move_as_under_the_whole_gradient(name):
    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.normal(size=(12, 4)), jnp.float32)
    batches = [(rng.integers(0, 12, 9).astype(np.int32), rng.normal(size=(9, 4)).astype(np.float32)) for _ in range(3)]
    whole = make_optimizer(name, Constant(0.1), momentum=0.0).build(3)

    @jit
    def both():
        dense, state, own = table, whole.init(table), table
        squares = jnp.zeros(12) if name == "rowwise_adagrad" else jnp.zeros((12, 4))
        for ids, gradients in batches:
            updates, state = whole.update(jnp.zeros_like(table).at[ids].add(gradients), state, dense)
            dense = optax.apply_updates(dense, updates)
            gradient = make_row_gradient(jnp.asarray(ids), jnp.asarray(gradients), 12)
            if name == "sgd":
                own = sgd_rows(own, gradient, 0.1)
            else:
                update = {"adagrad": adagrad_rows, "rowwise_adagrad": rowwise_adagrad_rows}[name]
                own, squares = update(own, squares, gradient, 0.1)
        return dense, own

    np.testing.assert_allclose(*both(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_ids_outside_a_table_move_nothing():
    table = jnp.ones((4, 2))
    gradient = make_row_gradient(jnp.array([7, -1, 2, 7]), jnp.ones((4, 2)), 4)
    assert gradient.ids.tolist() == [2, 4, 4, 4]
    assert np.asarray(sgd_rows(table, gradient, 1.0)).sum(1).tolist() == [2, 2, 0, 2]


@pytest.mark.slow
def test_a_table_far_larger_than_the_batch_learns_under_each_way_of_looking_up():
    rows, hot = empty_cache(TT, 3)
    ids, offsets = map(jnp.asarray, one_bag([1, 2, 3]))
    cores = drawn()
    np.testing.assert_allclose(
        bag_with_hot_rows(TT, cores, rows, hot, ids, offsets), bag(TT, cores, ids, offsets), rtol=1e-6
    )
