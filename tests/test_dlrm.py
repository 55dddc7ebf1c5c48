"""DLRM: sizes as published, both interactions, tables in every form and place, the objective."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import make_optimizer

from multipod.data.clicks.synthetic import Synthetic
from multipod.errors import LayoutError, MetricError, RecipeError
from multipod.experiments.tt_rec.checks import compression
from multipod.experiments.tt_rec.run import hashed_to
from multipod.layout.tables import WAYS, place_tables, sent_bytes
from multipod.metrics.binary import BinaryClassification
from multipod.metrics.objective import masked_sums, report_of
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_interactions import CrossInteraction, DotInteraction, interact, masked_kernel_of
from multipod.models.dlrm_published import (
    KAGGLE_ROWS,
    MLPERF_ROWS,
    MLPERF_V2_HOTS,
    MLPERF_V2_ROWS,
    TERABYTE_10M_ROWS,
    kaggle,
    mlperf,
    mlperf_v2,
    terabyte,
)
from multipod.models.dlrm_sparse import TABLE, sparse_state, sparse_update
from multipod.nn.tables.tensor_train import materialize, tensor_train
from multipod.optim.adagrad import Adagrad
from multipod.optim.rates import Constant

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
SMALL = Dlrm(rows=(50, 3, 400, 7), features=8, dense=5, bottom=(16,), top=(16, 8))


def randomised(model: Dlrm) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    return {name: jnp.asarray(rng.normal(size=leaf.shape) / 3, jnp.float32) for name, leaf in shapes.items()}


def examples(model: Dlrm, count: int = 16) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    hots = model.hots or (1,) * len(model.rows)
    ids = [rng.integers(0, n, (count, hot)) for n, hot in zip(model.rows, hots, strict=True)]
    dense = jnp.asarray(rng.normal(size=(count, model.dense)), jnp.float32)
    return {"dense": dense, "ids": jnp.asarray(np.concatenate(ids, 1), jnp.int32)}


def logits(model: Dlrm, params, batch) -> jax.Array:
    apply = partial(model.apply, train=True, key=jax.random.key(0))
    return jit(lambda p, b: apply(p, {}, b)[0])(params, batch)


def test_sizes_of_mlperfs_dlrm():
    model = mlperf()
    assert (len(MLPERF_ROWS), sum(MLPERF_ROWS)) == (26, 187_767_399)
    assert model.layer_parameters == {"bottom": 171_392, "top": 2_197_505}
    assert mlperf(interaction=DotInteraction("masked")).layer_parameters["top"] == 2_584_577
    assert model.interaction.outputs(*model.vectors) == 128 + 351
    assert model.embeddings.parameters == 24_034_227_072
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    assert sum(math.prod(leaf.shape) for leaf in shapes.values()) == 24_034_227_072 + 171_392 + 2_197_505


def test_sizes_of_mlperfs_dlrm_dcnv2():
    """The published numbers of rows and ids, and the parameters that these and the published layers come to."""
    model, width = mlperf_v2(), 27 * 128
    assert (len(MLPERF_V2_ROWS), sum(MLPERF_V2_ROWS), max(MLPERF_V2_ROWS)) == (26, 204_184_588, 40_000_000)
    assert (len(MLPERF_V2_HOTS), sum(MLPERF_V2_HOTS)) == (26, 214)
    below = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
    cross = 3 * (width * 512 + 512 * width + width)
    top = (width + 1) * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
    assert model.layer_parameters == {"bottom": below, "cross": cross, "top": top}
    assert (below, cross, top) == (171_392, 10_627_200, 5_245_953)
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    assert sum(math.prod(leaf.shape) for leaf in shapes.values()) == 128 * 204_184_588 + below + cross + top
    assert model.embeddings.parameters == 26_135_627_264


@pytest.mark.parametrize(("model", "top"), [(kaggle(), 367), (terabyte(), 415), (mlperf(), 479)])
def test_inputs_of_the_top(model, top):
    assert model.layers["top/0"][0] == top


def test_sizes_of_criteos_sets():
    assert (len(KAGGLE_ROWS), sum(KAGGLE_ROWS)) == (26, 33_762_577)
    assert (len(TERABYTE_10M_ROWS), sum(TERABYTE_10M_ROWS)) == (26, 49_126_297)


# The published ratios, of tables alone (arXiv:2101.11714): tables of at least so many rows as tensor trains.
@pytest.mark.parametrize(
    ("model", "tables", "ratio"),
    [
        (kaggle(tt_rows=7_000_000, tt_rank=32), 3, 4.1),
        (kaggle(tt_rows=142_572, tt_rank=32), 7, 117),
        (kaggle(tt_rows=142_572, tt_rank=8), 7, 222),
        (terabyte(tt_rows=400_000, tt_rank=8), 7, 112),
    ],
)
def test_compression_as_published(model, tables, ratio):
    assert len(model.embeddings.trains) == tables
    assert model.embeddings.compression == pytest.approx(ratio, rel=0.03)  # our factors pad less than theirs


@pytest.mark.parametrize("form", ["gather", "masked"])
def test_interactions_are_the_pairs_below_the_diagonal(form):
    vectors = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    found = np.asarray(interact(jnp.asarray(vectors), form))
    pairs = [(i, j) for i in range(4) for j in range(i)]
    for column, (i, j) in enumerate(pairs):
        place = column if form == "gather" else 4 * i + j
        np.testing.assert_allclose(found[:, place], (vectors[:, i] * vectors[:, j]).sum(1), rtol=1e-5)
    assert np.count_nonzero(found[0]) == len(pairs)


def test_both_interactions_give_equal_logits():
    masked = Dlrm(**{**SMALL.__dict__, "interaction": DotInteraction("masked")})
    params, batch = randomised(SMALL), examples(SMALL)
    kernel = masked_kernel_of(params["top/0/kernel"], SMALL.features, len(SMALL.rows) + 1)
    assert kernel.shape == masked.layers["top/0"]
    theirs = logits(masked, params | {"top/0/kernel": kernel}, batch)
    np.testing.assert_allclose(logits(SMALL, params, batch), theirs, rtol=1e-4, atol=1e-5)


def test_the_whole_model_equals_pytorchs():
    torch = pytest.importorskip("torch")
    params, batch = randomised(SMALL), examples(SMALL)
    given = {name: torch.from_numpy(np.array(leaf)) for name, leaf in (params | batch).items()}
    x = given["dense"]
    for k in range(2):
        x = torch.relu(x @ given[f"bottom/{k}/kernel"] + given[f"bottom/{k}/bias"])
    tables = torch.split(given["tables/dense"], list(SMALL.rows))
    vectors = [torch.nn.functional.embedding_bag(given["ids"][:, [f]], t, mode="sum") for f, t in enumerate(tables)]
    stacked = torch.stack([x, *vectors], 1)
    i, j = torch.tril_indices(5, 5, -1)
    y = torch.cat([x, torch.bmm(stacked, stacked.transpose(1, 2))[:, i, j]], 1)
    for k in range(3):
        y = y @ given[f"top/{k}/kernel"] + given[f"top/{k}/bias"]
        y = torch.relu(y) if k < 2 else y
    np.testing.assert_allclose(logits(SMALL, params, batch), y[:, 0].numpy(), rtol=1e-4, atol=1e-5)


def pytorchs_dlrm_dcnv2(torch, model: Dlrm, given):
    """Logits of a DLRM-DCNv2 of embedding bags and linear layers, with the weights and the batch that are `given`."""
    ends = np.cumsum([0, *model.hots])
    tables = torch.split(given["tables/dense"], list(model.rows))
    count = len(given["dense"])

    def layer(name, x):
        return torch.nn.functional.linear(x, given[f"{name}/kernel"].T, given[f"{name}/bias"])

    x = given["dense"]
    for k in range(len(model.bottom) + 1):
        x = torch.relu(layer(f"bottom/{k}", x))
    bags = []
    for f, hot in enumerate(model.hots):
        bag = torch.nn.EmbeddingBag(model.rows[f], model.features, mode="sum")
        weights = {"weight": tables[f]}
        flat, offsets = given["ids"][:, ends[f] : ends[f + 1]].reshape(-1), torch.arange(0, count * hot, hot)
        bags.append(torch.func.functional_call(bag, weights, (flat, offsets)))
    first = y = torch.cat([x, *bags], 1)
    for k in range(model.interaction.layers):
        low = torch.nn.functional.linear(y, given[f"cross/{k}/v"].T)
        y = first * (torch.nn.functional.linear(low, given[f"cross/{k}/u"].T) + given[f"cross/{k}/bias"]) + y
    for k in range(len(model.top)):
        y = torch.relu(layer(f"top/{k}", y))
    return layer(f"top/{len(model.top)}", y)[:, 0]


def test_dlrm_dcnv2_equals_pytorchs_in_logits_and_gradients():
    torch = pytest.importorskip("torch")
    model = Dlrm(**{**SMALL.__dict__, "hots": (3, 1, 4, 2), "interaction": CrossInteraction(3, 5)})
    params, batch = randomised(model), examples(model)
    label = np.arange(16) % 2
    given = {name: torch.from_numpy(np.array(leaf)) for name, leaf in (params | batch).items()}
    for name in params:
        given[name].requires_grad_()
    theirs = pytorchs_dlrm_dcnv2(torch, model, given)
    torch.nn.functional.binary_cross_entropy_with_logits(theirs, torch.from_numpy(label).float()).backward()
    ours = logits(model, params, batch)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-5 * float(jnp.abs(ours).max()))

    def loss(params):
        return optax.sigmoid_binary_cross_entropy(model.apply(params, {}, batch, train=True, key=None)[0], label).mean()

    for name, gradient in jit(jax.grad(loss))(params).items():
        expected = given[name].grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def test_a_cross_network_begins_with_the_deviation_it_says():
    model = Dlrm(rows=(5,) * 9, features=8, dense=3, bottom=(4,), top=(4,), interaction=CrossInteraction(2, 40))
    params = jit(model.init)(jax.random.key(0))[0]
    assert {name for name in params if name.startswith("cross")} == {
        f"cross/{layer}/{part}" for layer in range(2) for part in ("v", "u", "bias")
    }
    for name in ("cross/0/v", "cross/1/u"):
        assert float(np.std(params[name])) == pytest.approx((2 / (80 + 40)) ** 0.5, rel=0.05)
    assert not np.asarray(params["cross/1/bias"]).any()


@pytest.mark.slow
def test_tensor_trains_and_several_ids_a_field():
    model = Dlrm(**{**SMALL.__dict__, "tt_rows": 50, "tt_rank": 3, "hots": (2, 1, 3, 2)})
    assert sorted(model.embeddings.trains) == [0, 2]
    params, batch = randomised(model), examples(model)
    tables = {}
    for number, tt in model.embeddings.trains.items():
        tables[number] = materialize(tt, tuple(params.pop(f"tables/{number}/core{k}") for k in range(3)))
    small = params["tables/dense"]
    dense = Dlrm(**{**SMALL.__dict__, "hots": (2, 1, 3, 2)})
    theirs = params | {"tables/dense": jnp.concatenate([tables[0], small[:3], tables[2], small[3:]])}
    np.testing.assert_allclose(
        logits(model, randomised(model), batch), logits(dense, theirs, batch), rtol=1e-4, atol=1e-5
    )


def test_hashed_tables_share_rows():
    model = Dlrm(**{**SMALL.__dict__, "hash_rows": 10})
    assert model.embeddings.dense_rows == {0: 10, 1: 3, 2: 10, 3: 7}
    params, batch = randomised(model), examples(model)
    other = batch | {"ids": batch["ids"].at[:, 2].set((batch["ids"][:, 2] + 10) % 400)}
    np.testing.assert_array_equal(logits(model, params, batch), logits(model, params, other))


@pytest.mark.parametrize("model", [SMALL, Dlrm(**{**SMALL.__dict__, "tt_rows": 300, "tt_rank": 9})])
def test_an_id_outside_its_table_spoils_its_example_alone(model):
    batch = examples(model)
    bad = batch | {"ids": batch["ids"].at[3, 2].set(400).at[5, 1].set(-1)}
    spoilt = np.isnan(logits(model, randomised(model), bad))
    assert np.flatnonzero(spoilt).tolist() == [3, 5]


@pytest.mark.slow
def test_initial_values():
    model = Dlrm(rows=(4000, 9, 900), features=16, tt_rows=4000, tt_rank=8)
    params = {name: np.asarray(leaf) for name, leaf in jit(model.init)(jax.random.key(0))[0].items()}
    small, large = params["tables/dense"][:9], params["tables/dense"][9:]
    assert np.abs(small).max() <= 9**-0.5
    assert np.abs(large).max() <= 900**-0.5 * 1.0001
    assert large.std() == pytest.approx((1 / (3 * 900)) ** 0.5, rel=0.05)
    assert params["bottom/0/kernel"].std() == pytest.approx((2 / (13 + 512)) ** 0.5, rel=0.05)
    assert params["bottom/1/bias"].std() == pytest.approx((1 / 256) ** 0.5, rel=0.2)
    cores = tuple(params[f"tables/0/core{k}"] for k in range(3))
    assert np.asarray(materialize(model.embeddings.trains[0], cores)).var() == pytest.approx(1 / 12_000, rel=0.15)


def test_masked_first_layer_begins_with_the_fan_in_of_the_pairs():
    spread = {}
    for form in ("gather", "masked"):
        model = Dlrm(rows=(5,) * 9, features=8, dense=3, bottom=(4,), top=(64,), interaction=DotInteraction(form))
        spread[form] = float(np.std(jit(model.init)(jax.random.key(0))[0]["top/0/kernel"]))
    assert spread["gather"] == pytest.approx(spread["masked"], rel=0.05)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rows": (5, 0)}, r"rows=\(5, 0\) \(at least 1 each\)"),
        ({"features": 0, "tt_cores": 1}, r"features=0 \(at least 1\), tt_cores=1 \(at least 2\)"),
        ({"hots": (1, 2)}, r"2 hots for 4 tables"),
        ({"interaction": CrossInteraction(0, -1)}, r"interaction.layers=0 \(at least 1\), interaction.rank=-1"),
        ({"hash_rows": 9, "tt_rows": 9}, r"hash_rows=9 with tt_rows=9 \(one of them\)"),
        (
            {"tt_rows": 50, "tt_rank": 15},
            r"tt_rank=15 \(larger than table 0 of 50 rows 8, table 2 of 400 rows 14 can have; at most 8, or tt_rows",
        ),
    ],
)
def test_models_that_cannot_be(fields, said):
    with pytest.raises(RecipeError, match=said):
        Dlrm(**{**SMALL.__dict__, **fields})


def test_ids_of_another_number_of_fields():
    with pytest.raises(RecipeError, match=r"ids of shape \(2, 3\), and 4 fields take 4 a row"):
        SMALL.embeddings.embed(randomised(SMALL), jnp.zeros((2, 3), jnp.int32))


def test_mlperfs_tables_lie_as_the_multipod_had_them():
    plan = place_tables(MLPERF_ROWS, 128, 256)
    small = [table for table in plan.tables if table.way == "replicated"]
    assert (len(small), sum(table.rows for table in small)) == (13, 19_660)
    assert all(table.way == "row" for table in plan.tables if table not in small)
    large = 4 * 128 * (187_767_399 - 19_660)
    assert large == pytest.approx(96.13e9, rel=1e-4)
    assert plan.fullest_bytes == pytest.approx(large / 256 + 4 * 128 * 19_660, rel=1e-4)
    assert list(plan.offsets().values()) == np.cumsum([0, *(t.rows for t in small)]).tolist()[:-1]


def test_tensor_trains_save_memory_and_messages():
    trains = {n: tensor_train(rows, 128, 16).parameters for n, rows in enumerate(MLPERF_ROWS) if rows > 7500}
    dense, compressed = place_tables(MLPERF_ROWS, 128, 256), place_tables(MLPERF_ROWS, 128, 256, compressed=trains)
    assert all(table.way == "replicated" for table in compressed.tables)
    assert dense.fullest_bytes / compressed.fullest_bytes > 10
    assert dense.sent_bytes(65536) / compressed.sent_bytes(65536) > 10


def test_what_a_table_sends():
    rows = {way: place_tables([64], 8, 4, way=way).tables[0] for way in WAYS}
    assert sent_bytes(rows["replicated"], 100, 4) == round(2 * 3 / 4 * 4 * 64 * 8)
    assert sent_bytes(rows["row"], 100, 4) == round(3 / 4 * (400 + 2 * 3200))
    assert sent_bytes(rows["column"], 100, 4, hot=2) == round(3 / 4 * (800 + 2 * 800))
    assert sent_bytes(rows["table"], 100, 4) == round(3 / 4 * (400 + 6400) / 4)
    assert place_tables([9, 5, 4], 2, 2, way="table").fullest_bytes == 4 * 2 * 9


def test_places_that_cannot_be():
    with pytest.raises(LayoutError, match=r"way='rows' on 4 devices. Ways are replicated, table, row, column and auto"):
        place_tables([5], 8, 4, way="rows")
    with pytest.raises(LayoutError, match=r"6 columns do not divide over 4 devices"):
        place_tables([5], 6, 4, way="column")


def test_the_objective():
    objective = BinaryClassification()
    values = objective(jnp.array([2.0, -1.0, 0.0, 3.0]), {"label": jnp.array([1, 0, 0, 7])})
    np.testing.assert_allclose(values["loss"][:3], [np.log1p(np.exp(-2)), np.log1p(np.exp(-1)), np.log(2)], rtol=1e-6)
    assert np.isnan(values["loss"][3])
    assert values["accuracy"].tolist()[:3] == [True, True, True]
    sums = masked_sums(values, jnp.array([True, True, True, False]))
    found = report_of(objective, {name: float(total) for name, total in sums.items()} | {"auc": 0.75})
    assert found["accuracy"] == 1.0
    assert found["auc"] == 0.75
    with pytest.raises(MetricError):
        report_of(objective, {"count": 0, "loss": 0.0})


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad"])  # which has Adagrad for all but the table
def test_updates_of_touched_rows_are_those_of_whole_gradients(rule):
    model = Dlrm(**{**SMALL.__dict__, "tt_rows": 300, "tt_rank": 3, "hots": (2, 1, 1, 1)})
    params, batch = randomised(model), examples(model) | {"label": jnp.arange(16) % 2}
    whole = make_optimizer(rule, Constant(0.1), momentum=0.0).build(2)
    if rule == "rowwise_adagrad":  # which it is for tables alone here
        adagrad = Adagrad(Constant(0.1)).build(2)
        kinds = {name: "rows" if name == TABLE else "rest" for name in params}
        whole = optax.multi_transform({"rows": whole, "rest": adagrad}, kinds)

    @jit
    def both(params):
        dense, state, own = params, whole.init(params), sparse_state(params, rule)
        for _ in range(2):

            def loss(params):
                logits, _ = model.apply(params, {}, batch, train=True, key=None)
                return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()

            updates, state = whole.update(jax.grad(loss)(dense), state, dense)
            dense = optax.apply_updates(dense, updates)
            own, _ = sparse_update(model, own, batch, rule, 0.1)
        return dense, own.params

    dense, own = both(params)
    for name in params:
        np.testing.assert_allclose(own[name], dense[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_experiment_counts_as_published_and_hashes_to_equal_size():
    claims, section = compression()
    assert all(claim.holds for claim in claims)
    assert len(section.rows) == 4
    data = Synthetic(rows=(3000, 50, 7))
    hashed = hashed_to(data, 16 * 157)
    assert hashed.embeddings.parameters == 16 * (100 + 50 + 7)
