"""DLRM in the trainer: tables in every place, caches of hot rows, the same losses, checkpoints that fit everywhere."""

import itertools
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from multipod.data.batches import TrainBatches
from multipod.data.clicks.multi_hot import MultiHotClicks
from multipod.data.clicks.synthetic import Synthetic
from multipod.errors import LayoutError, RecipeError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_hot import Hot
from multipod.models.dlrm_interactions import CrossInteraction
from multipod.models.dlrm_sparse import sparse_state, sparse_update
from multipod.models.dlrm_tables import TablePlacement, pack_tables
from multipod.nn.model import Moved
from multipod.nn.tables import sharded_tables
from multipod.nn.tables.hot_rows import HotRows, moves
from multipod.nn.tables.sharded_tables import TableFields
from multipod.nn.tables.tensor_train import LARGEST
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import to_text
from multipod.recipes.find import load
from multipod.step.post_update import post_update_of
from multipod.step.program import program_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.context import RunContext
from multipod.train.loop import train

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
DATA = Synthetic(rows=(120, 30, 5), examples=192, tests=40)
SMALL = Dlrm(rows=DATA.rows, bottom=(4,), top=(4,), features=8)


BAGS = MultiHotClicks(DATA, (3, 1, 4))
CROSS = replace(SMALL, hots=BAGS.hots, interaction=CrossInteraction(2, 5))


def recipe(model: Dlrm, layout: Layout, updates: int = 5) -> Recipe:
    base = load("dlrm-small")
    return replace(
        base, data=BAGS if model.hots else DATA, model=model, layout=layout, batch=32, updates=updates,
        evaluate_every=0, checkpoint_every=0, evaluation_batch=40,
    )  # fmt: skip


def run(model: Dlrm, layout: Layout, state=None, first: int = 0, last: int = 5):
    """The losses of updates `first` to `last`, and the state after them."""
    asked = recipe(model, layout)
    program = program_of(asked, make_mesh(layout))
    update, state = program.compile_update(), program.init() if state is None else state
    rows, losses = np.arange(program.rows), []
    batches = TrainBatches(asked.data.train(), asked.batch, asked.seed, rows, program.padded).start(first)
    for batch in itertools.islice(batches, last - first):
        state, sums = update(state, program.place_batch(batch, rows, program.rows), program.controls())
        losses.append(float(sums["loss"]) / asked.batch)
    return losses, state, program


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return run(SMALL, Layout((1, 1)))[0]


@pytest.mark.parametrize(
    ("place", "layout", "share"),
    [
        ("row", Layout((1, 1), split=ModelSplit(expert=4)), 1 / 4),
        ("table", Layout((1, 2), split=ModelSplit(expert=2), sync=Sync(sharding="zero1")), 1 / 2),
        ("column", Layout((1, 1), split=ModelSplit(expert=4)), 1 / 4),
        ("auto", Layout((2, 1), split=ModelSplit(expert=2)), 1 / 2),
    ],
)
def test_losses_are_those_of_whole_tables(place, layout, share, alone):
    model = replace(SMALL, tables=TablePlacement(place, parts=4, small_bytes=2000))
    losses, state, program = run(model, layout)
    np.testing.assert_allclose(losses, alone, rtol=2e-5)
    split = {name: leaf for name, leaf in state.params.items() if name in model.dims()}
    assert split
    for leaf in split.values():
        assert leaf.addressable_shards[0].data.size == leaf.size * share
    squares = [
        leaf for leaf in jax.tree.leaves(program.shapes.optimizer) if leaf.shape in {w.shape for w in split.values()}
    ]
    assert all(
        leaf.sharding.shard_shape(leaf.shape)[0] * leaf.sharding.shard_shape(leaf.shape)[1] <= leaf.size * share
        for leaf in squares
    )


@pytest.fixture(scope="module")
def bags_alone() -> list[float]:
    return run(CROSS, Layout((1, 1)))[0]


@pytest.mark.parametrize(
    ("place", "layout"),
    [
        ("replicated", Layout((2, 2))),
        ("row", Layout((1, 1), split=ModelSplit(expert=4))),
        ("table", Layout((1, 2), split=ModelSplit(expert=2), sync=Sync(sharding="zero1"))),
        ("column", Layout((2, 1), split=ModelSplit(expert=2))),
    ],
)
def test_losses_of_bags_and_a_cross_network_are_those_of_whole_tables(place, layout, bags_alone):
    model = replace(CROSS, tables=TablePlacement(place, parts=4, small_bytes=2000))
    np.testing.assert_allclose(run(model, layout)[0], bags_alone, rtol=2e-5)


@pytest.mark.parametrize("place", ["table", "auto"])
def test_a_row_begins_the_same_wherever_it_lies(place):
    tables = TablePlacement(place, parts=4, small_bytes=2000)
    whole, split = (jit(model.init)(jax.random.key(0))[0] for model in (SMALL, replace(SMALL, tables=tables)))
    first = dict(zip(range(3), np.cumsum([0, 120, 30]), strict=True))
    arrays = pack_tables(dict(enumerate(DATA.rows)), 8, tables)
    assert sorted(n for array in arrays.values() for n in array.numbers) == [0, 1, 2]
    for name, array in arrays.items():
        used = np.zeros(array.rows, bool)
        for number, begin, size in zip(array.numbers, array.begins, array.sizes, strict=True):
            expected = whole["tables/dense"][first[number] : first[number] + size]
            assert np.array_equal(split[name][begin : begin + size], expected)
            used[begin : begin + size] = True
        assert not np.asarray(split[name])[~used].any()


@pytest.mark.parametrize("way", ["look_up_by_rows", "look_up_by_tables", "look_up_by_columns"])
def test_split_lookups_give_the_vectors_and_gradients_of_the_whole_array(way):
    """Several ids a field, and a place that is none."""
    rng = np.random.default_rng(0)
    array = rng.normal(size=(32, 8)).astype(np.float32)
    fields = TableFields((2, 1, 3), homes=(0, 2, 3), parts=4)
    places = np.concatenate(
        [8 * home + rng.integers(0, 8, (16, n)) for home, n in zip(fields.homes, fields.hots, strict=True)], 1
    ).astype(np.int32)
    places[5, 2] = -1
    cotangent = rng.normal(size=(16, 3, 8)).astype(np.float32)
    mesh, split = Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x")
    cut = PartitionSpec(None, "x") if way == "look_up_by_columns" else split

    def each(own, places, cotangent):
        def total(own):
            vectors = getattr(sharded_tables, way)(own, places, fields, "x")
            return jnp.nansum(vectors * cotangent), vectors

        (_, vectors), gradient = jax.value_and_grad(total, has_aux=True)(own)
        return vectors, gradient

    together = jax.shard_map(each, mesh=mesh, in_specs=(cut, split, split), out_specs=(split, cut), check_vma=False)
    vectors, gradient = jit(together)(array, places, cotangent)
    rows = np.where((places >= 0)[..., None], array[places], np.nan)
    expected = np.stack([rows[:, :2].sum(1), rows[:, 2], rows[:, 3:].sum(1)], 1)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5)
    assert np.isnan(vectors[5, 1]).all()
    np.testing.assert_allclose(
        vectors, sharded_tables.look_up_whole(jnp.asarray(array), jnp.asarray(places), fields), rtol=1e-5
    )
    summed = np.zeros_like(array)
    column = np.repeat(np.arange(3), fields.hots)
    for k in range(6):
        used = places[:, k] >= 0
        np.add.at(summed, places[used, k], cotangent[used, column[k]])
    np.testing.assert_allclose(gradient, summed, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_cached_rows_are_the_same_on_any_mesh_and_a_checkpoint_goes_on_on_another(tmp_path):
    """Both kinds at once: dense tables that are split, and a tensor train with a cache that is refreshed."""
    cache = Hot(0.05, warmup=2, every=2, policy="discard")  # to write back is tested with `hot_rows`: it compiles long
    model = replace(SMALL, tt_rows=100, tt_rank=3, tt_cores=2, hot=cache, tables=TablePlacement("row", parts=4))
    losses, alone, _ = run(model, Layout((1, 1)))
    begun, state, _ = run(model, Layout((1, 1), split=ModelSplit(expert=2)), last=3)
    store = Checkpoints(tmp_path / "checkpoints", 1)
    store.save(state, 3)
    store.wait()
    wider = Layout((1, 2), split=ModelSplit(expert=2))
    restored = store.restore(program_of(recipe(model, wider), make_mesh(wider)).shapes, None)
    store.close()
    rest, spread, _ = run(model, wider, restored, first=3)
    np.testing.assert_allclose(begun + rest, losses, rtol=1e-4)
    hot = alone.statistics["tables/0/hot"].hot
    assert np.count_nonzero(np.asarray(hot.ids) < LARGEST) == 6
    for ours, theirs in zip(hot, spread.statistics["tables/0/hot"].hot, strict=True):
        assert np.array_equal(ours, theirs)
    notes = model.notes(alone.statistics)["hot rows"]
    assert re.match(
        r"6 of 1 tables, [\d.]+% of the lookups since they were cached; \d+ have left, with .* learnt", notes
    )


def test_optimizer_state_follows_rows_and_begins_anew_for_those_that_enter():
    optimizer = optax.adagrad(0.1, initial_accumulator_value=0.25)
    params = {"hot": jnp.arange(6.0).reshape(3, 2), "other": jnp.ones(3)}
    state = optimizer.init(params)
    state = jax.tree.map(lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape) + 1, state)

    class Model:
        def rearranged_params(self):
            return ("hot",)

        def is_due(self, update):
            return update == 4

        def rearrange(self, params, statistics):
            assert list(params) == ["hot"]
            moved = Moved(jnp.array([2, 0, 0]), jnp.array([True, False, True]))
            return {"hot": params["hot"] + 10}, statistics + 1, {"hot": moved}

    asked = replace(load("dlrm-small"), model=Model())

    @jit
    def after(update):
        return post_update_of(asked, optimizer)((params, jnp.int32(0), state), update)

    new, statistics, moved = after(jnp.int32(4))
    assert int(statistics) == 1
    assert np.array_equal(new["hot"], params["hot"] + 10)
    assert np.array_equal(new["other"], params["other"])
    squares = next(leaf for leaf in jax.tree.leaves(moved) if leaf.shape == (3, 2))
    assert squares.tolist() == [[5, 6], [0.25, 0.25], [1, 2]]
    same = after(jnp.int32(3))
    assert jax.tree.all(jax.tree.map(np.array_equal, same, (params, jnp.int32(0), state)))


def test_where_rows_of_a_cache_were():
    hot = HotRows(*(jnp.asarray(a, jnp.int32) for a in ([3, 7, 9], [], [], 0, 0)))
    place, known = moves(hot, hot._replace(ids=jnp.array([2, 9, LARGEST])))
    assert known.tolist() == [False, True, False]
    assert int(place[1]) == 2


def test_a_run_tells_of_its_cache():
    model = replace(SMALL, tt_rows=100, tt_rank=3, tt_cores=2, hot=Hot(0.05, policy="discard"))
    asked = recipe(model, Layout((1, 1)), updates=3)
    told = []
    _, ended = train(program_of(asked, make_mesh(asked.layout)), RunContext(observers=[told.append]))
    assert 0 < ended.values["auc"] < 1
    assert ended.notes["hot rows"] == "0 of 1 tables"
    text = to_text(asked)
    assert 'place = "replicated"' in text
    assert "share = 0.05" in text


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (SMALL, Layout((1, 1), split=ModelSplit(expert=4)), r"layout.expert=4 splits nothing of this model"),
        (
            replace(SMALL, tables=TablePlacement("row", parts=4)),
            Layout((1, 1), split=ModelSplit(expert=8)),
            r"tables/rows \[156, 8\]: table_rows of 156 does not divide over expert=8",
        ),
        (
            replace(SMALL, features=6, tables=TablePlacement("column")),
            Layout((1, 1), split=ModelSplit(expert=4)),
            r"tables/columns \[155, 6\]: table_columns of 6 does not divide over expert=4. Pad it by 2 to 8",
        ),
        (
            replace(SMALL, tables=TablePlacement("table", parts=6)),
            Layout((1, 1), split=ModelSplit(expert=4)),
            r"whole tables in 6 parts do not divide over expert=4 devices. Take expert=1 or 2 or 3 or 6",
        ),
    ],
)
def test_places_that_do_not_fit_the_devices(model, layout, said):
    with pytest.raises(LayoutError, match=said):
        _ = program_of(recipe(model, layout), make_mesh(layout)).lowered


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tables": TablePlacement(parts=0, small_bytes=-1)}, r"tables.parts=0 \(at least 1\), tables.small_bytes=-1"),
        ({"tt_rows": 9, "hot": Hot(1.5, warmup=0)}, r"hot.warmup=0 \(at least 1\), hot.share=1.5 \(0 to 1\)"),
        ({"hot": Hot(0.1)}, r"hot.share=0.1 with tt_rows=0 \(rows are cached of tensor trains\)"),
    ],
)
def test_models_that_cannot_be(fields, said):
    with pytest.raises(RecipeError, match=said):
        replace(SMALL, **fields)


def test_updates_of_touched_rows_refuse_tables_that_are_to_be_split():
    model = replace(SMALL, tables=TablePlacement("row"))
    with pytest.raises(RecipeError, match=r"tables.place=row keeps tables for the trainer to split"):
        sparse_update(model, sparse_state({}, "sgd"), {"ids": jnp.zeros((2, 3), jnp.int32)}, "sgd", 0.1)
