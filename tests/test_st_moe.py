"""ST-MoE: published sizes, span corruption, relative positions, causality, fine-tuning of parts, NaN."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.data.span_corruption import Spans, corrupt, restore, teacher_forced
from multipod.errors import PoisonedError, RecipeError
from multipod.metrics.objective import masked_sums
from multipod.metrics.sparse import SparseTokens
from multipod.models.st_moe import StMoe, _decoder_steps, small_st_moe, st_moe_large, t5_like
from multipod.nn.dims import dims_of
from multipod.nn.experts.routing import Routing
from multipod.nn.merge import merge_model
from multipod.nn.text.relative_positions import buckets
from multipod.optim.adafactor import Adafactor
from multipod.optim.partly import SUBSETS, Partly
from multipod.optim.rates import Constant, Rsqrt, WarmUp
from multipod.train.bad_numbers.poisoned import means_of_update
from multipod.train.context import RunContext, RunInfo

TINY = small_st_moe(
    32, features=16, hidden=12, heads=2, kv=8, layers=1, every=1, group_rows=2, routing=Routing(4, second="all")
)
jitted = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def counted(model):
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert {path: len(leaf.shape) for path, leaf in shapes.items()} == {p: len(d) for p, d in dims_of(model).items()}
    return shapes, sum(math.prod(leaf.shape) for leaf in shapes.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "published", "within", "flops"),
    [(st_moe_large(), 4.1e9, 0.05e9, 645e9), (StMoe(), 269e9, 0.5e9, 20.2e12)],
    ids=["ST-MoE-L", "ST-MoE-32B"],
)
def test_parameters_and_work_are_those_published(model, published, within, flops):
    # arXiv:2202.08906, table 11. Six sparse layers on each side, each with a dense block behind it.
    shapes, count = counted(model)
    assert abs(count - published) < within
    assert count == model.parameters()
    experts = sum(math.prod(leaf.shape) for path, leaf in shapes.items() if "/experts/" in path)
    assert experts == count - model.parameters(served=0)
    assert model.flops(512, 114) == pytest.approx(flops, rel=0.01 if published > 1e11 else 0.12)
    if published == 4.1e9:
        assert 0.80 < experts / count < 0.82  # "about 80 %"
    else:
        assert abs(model.parameters(served=1.25) - 32e9) < 0.5e9  # the 32 billion of its name


def test_relative_positions_are_those_of_t5():
    # By hand from arXiv:1910.10683: single distances up to 7, then logarithmic ones, all beyond 128 in the last.
    distance = np.array([0, -1, -7, -8, -16, -64, -127, -128, -1000, 1, 8, 500])
    both = buckets(distance, both_ways=True)
    assert both.tolist() == [0, 1, 7, 8, 10, 14, 15, 15, 15, 17, 24, 31]
    one = buckets(distance, both_ways=False)
    assert one.tolist() == [0, 1, 7, 8, 16, 26, 31, 31, 31, 0, 0, 0]


def test_spans_have_the_published_lengths():
    spans = Spans()
    assert spans.text_for(512) == 568
    assert spans.lengths(568) == (512, 114)
    places = spans.places(568, np.random.default_rng(0))
    assert (places > 0).sum() == 85
    assert places.max() == 28
    assert places[0] == 0


@pytest.mark.parametrize("seed", range(5))
def test_restored_text_is_the_text(seed):
    rng = np.random.default_rng(seed)
    text = rng.integers(4, 90, 60).astype(np.int32)
    places = Spans().places(60, rng)
    source, target = corrupt(text, places, 100)
    assert (len(source), len(target)) == Spans().lengths(60)
    np.testing.assert_array_equal(restore(source, target, 100, places.max()), text)


def test_corrupted_by_hand():
    text, places = np.array([10, 11, 12, 13, 14, 15]), np.array([0, 1, 1, 0, 2, 0])
    source, target = corrupt(text, places, 100)
    assert source.tolist() == [10, 99, 13, 98, 15, 3]
    assert target.tolist() == [99, 11, 12, 98, 14, 3]


def batch_of(rows=4, length=8, seed=0):
    rng = np.random.default_rng(seed)
    return teacher_forced(*(rng.integers(4, 32, (rows, length)).astype(np.int32) for _ in range(2)))


@pytest.fixture(scope="module")
def params():
    shapes, _ = jax.eval_shape(TINY.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    return {path: np.float32(0.3 * rng.normal(size=leaf.shape)) for path, leaf in shapes.items()}


@partial(jitted, static_argnums=0, static_argnames="train")
def outputs(model, params, batch, train=False):
    return model.apply(params, {}, batch, train=train, key=jax.random.key(0))[0]


@partial(jitted, static_argnums=(0, 3))
def trained(model, params, batch, optimizer):
    def loss(params):
        values = SparseTokens()(model.apply(params, {}, batch, train=True, key=jax.random.key(0))[0], batch)
        return values["loss"].mean(), values

    gradients, values = jax.grad(loss, has_aux=True)(params)
    transformation = optimizer.build(10)
    changes, _ = transformation.update(gradients, transformation.init(params), params)
    return changes, masked_sums(values)


def test_decoder_does_not_see_the_future(params):
    batch = batch_of()
    later = {**batch, "target": batch["target"].copy()}
    later["target"][:, 5:] = 7
    before, after = (outputs(TINY, params, b, train=True)["logits"] for b in (batch, later))
    # Slots are shared by sequences: what an earlier sequence does reaches the next, its own past never.
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert (before[0, 5:] != after[0, 5:]).any()
    with pytest.raises(RecipeError, match="StMoe: decoder: order='choices': the first choices of later tokens"):
        replace(TINY, decoder_order="choices")


def test_only_the_named_part_is_trained(params):
    batch = batch_of()
    changes, sums = trained(TINY, params, batch, Partly(Adafactor(Constant(0.01)), ("experts",)))
    moved = {path for path, change in changes.items() if np.any(np.asarray(change))}
    assert moved == {path for path in params if "/experts/" in path}
    reported = SparseTokens().finish(sums)
    assert {"loss", "accuracy", "exact", "balance/encoder/0", "dropped/decoder/0", "load/decoder/0/3"} <= set(reported)
    assert sum(reported[f"load/encoder/0/{expert}"] for expert in range(4)) == pytest.approx(1)
    sizes = {name: sum(map(rule, params)) for name, rule in SUBSETS.items()}
    assert sizes["experts"] + sizes["non-experts"] == sizes["all"] == len(params)
    assert sizes["sparse"] + sizes["non-sparse"] == sizes["attention"] + sizes["non-attention"] == sizes["all"]
    assert min(sizes.values()) > 0
    with pytest.raises(RecipeError, match=r"train=expert: no such part. 'expert': Nearest: .*experts"):
        Partly(Adafactor(Constant(0.01)), ("expert",))


def test_adafactor_clips_the_step_of_each_tensor():
    weights = {"w": jnp.ones((4, 4))}
    gradient = {"w": jnp.zeros((4, 4)).at[0, 0].set(1.0)}
    for clipping in (1.0, 0.1):
        optimizer = Adafactor(Constant(1.0), clipping=clipping, relative=False).build(1)
        step = optimizer.update(gradient, optimizer.init(weights), weights)[0]["w"]
        assert float(jnp.sqrt(jnp.mean(step**2))) <= clipping * 1.01
    rates = WarmUp(Rsqrt(0.01), updates=100).schedule(0)
    np.testing.assert_allclose([rates(50), rates(100), rates(400)], [0.005, 0.01, 0.005], rtol=1e-5)


@pytest.mark.slow
def test_nan_in_a_router_is_named(params):
    poisoned = {**params, "decoder/0/sparse/router": np.full_like(params["decoder/0/sparse/router"], np.nan)}
    batch = batch_of()
    sums = masked_sums(SparseTokens()(outputs(TINY, poisoned, batch), batch))
    checkpoints = SimpleNamespace(wait=lambda: None, updates=lambda: [3, 6, 8])
    context = RunContext(checkpoints, info=RunInfo("runs/x"))
    with pytest.raises(PoisonedError) as stopped:
        means_of_update(context, SparseTokens(), jax.device_get(sums), 9)
    # Update 9 met what update 8 left behind, and so did checkpoint 8.
    assert str(stopped.value) == (
        "update 9: NaN in the router of decoder/0: its logits are not finite. Lower the rate, raise routing.z, or see "
        "which examples do that. Last good checkpoint: 6. Go on from there with --resume runs/x --at 6."
    )


DECODERS = {
    "sparse": replace(TINY, layers=2, routing=Routing(4, dropless=True)),
    "slots for all": replace(TINY, path="einsum", routing=Routing(4, capacity=4.0, evaluation_capacity=4.0)),
    "T5": t5_like(vocab=32, features=16, hidden=12, heads=2, kv=8, layers=2),
    "T5 1.0": t5_like(vocab=32, features=16, hidden=12, heads=2, kv=8, layers=1, dense_gated=False, tied=True),
}


def random_params(model, seed=0, size=0.3):
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return {path: np.float32(size * rng.normal(size=leaf.shape)) for path, leaf in shapes.items()}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=name, marks=[pytest.mark.slow] if name != "T5 1.0" else [])
        for name, model in DECODERS.items()
    ],
)
def test_a_step_gives_the_logits_of_the_whole_decoder(model):
    """Place after place from keys and values that were kept, against one pass over all; sources of two lengths."""
    params, batch = random_params(model), batch_of(rows=4, length=10)
    batch["source"][1, 6:] = 0
    batch["target"][:, 0] = 0  # T5's start token is its padding

    @jitted
    def by_steps(params, batch):
        step, cache = _decoder_steps(merge_model(model, params), batch, 10, 1)

        def place(cache, given):
            logits, cache = step(*given, cache)
            return cache, logits

        return jax.lax.scan(place, cache, (batch["target"].T, jnp.arange(10)))[1].swapaxes(0, 1)

    whole = np.asarray(outputs(model, params, batch)["logits"])
    stepped = np.asarray(by_steps(params, batch))
    assert (stepped[..., 0] == -np.inf).all()  # padding is never told
    np.testing.assert_allclose(stepped[..., 1:], whole[..., 1:], rtol=1e-5, atol=1e-5)


def plainly_answered(model, params, batch, *, start, end, length):
    """The whole decoder for every token: what `generate` must give."""
    target = np.zeros((len(batch["source"]), length + 1), np.int32)
    target[:, 0] = start
    ended = np.zeros(len(target), bool)
    for place in range(length):
        logits = np.asarray(outputs(model, params, {**batch, "target": target[:, :-1]})["logits"])[:, place, 1:]
        target[:, place + 1] = np.where(ended, 0, 1 + logits.argmax(-1))
        ended |= target[:, place + 1] == end
    return target[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse", "T5"])
def test_answers_are_those_of_the_whole_decoder(name):
    model = DECODERS[name]
    params, batch = random_params(model, size=0.6), batch_of(rows=8, length=6)
    batch["source"][::2, 4:] = 0
    marks = {"start": 2, "end": 3}
    told = jitted(partial(model.generate, **marks, length=12))(params, {"source": batch["source"]})
    # A token that rows tell early on ends them: some rows then end before others.
    marks["end"] = int(np.bincount(np.asarray(told)[:, 1:5].ravel()).argmax())
    told = jitted(partial(model.generate, **marks, length=12))(params, {"source": batch["source"]})
    np.testing.assert_array_equal(told, plainly_answered(model, params, batch, **marks, length=12))
    lengths = (np.asarray(told) != 0).sum(1)
    assert lengths.min() < lengths.max()
    found = jitted(partial(model.translate, **marks, length=12, beam=4))(params, {"source": batch["source"]})
    best = np.asarray(found.tokens[:, 0])
    target = np.concatenate([np.full((8, 1), 2, np.int32), best[:, :-1]], 1)
    logits = np.asarray(outputs(model, params, {**batch, "target": target})["logits"])
    logs = np.asarray(jax.nn.log_softmax(np.where(np.arange(32) == 0, -np.inf, logits), axis=-1))
    told = np.take_along_axis(logs, best[..., None], 2)[..., 0]
    lengths = (best != 0).sum(1)
    expected = np.where(best != 0, told, 0).sum(1) / ((5 + lengths) / 6) ** 0.6
    np.testing.assert_allclose(found.scores[:, 0], expected, rtol=1e-4)


@pytest.mark.slow
def test_full_experts_do_not_change_an_answer():
    """A capacity that would drop most of a decoder's tokens: it is not asked for while they are told one by one."""
    narrow = replace(TINY, routing=Routing(4, evaluation_capacity=0.01))
    free = replace(narrow, routing=Routing(4, dropless=True))
    params, batch = random_params(TINY, size=0.6), batch_of(rows=8, length=12)
    batch["source"] = batch["source"][:, :2]  # groups of four tokens have four slots: the encoder drops none
    routers = outputs(narrow, params, batch)["routers"]
    assert routers["decoder/0"]["dropped"] > 0.2
    assert routers["encoder/0"]["dropped"] == 0
    answers = [
        jitted(partial(model.generate, start=2, end=3, length=12))(params, {"source": batch["source"]})
        for model in (narrow, free)
    ]
    np.testing.assert_array_equal(*answers)


def test_a_token_costs_one_place_of_the_decoder():
    """Operations that XLA counts: of one step with 64 places kept, and of the decoder over all 64 places."""
    model = replace(DECODERS["T5"], features=32, hidden=64, layers=2)
    params, batch = random_params(model), batch_of(rows=2, length=64)
    encoded = np.zeros((2, 64, 32), np.float32)

    def whole(params, batch, encoded):
        return merge_model(model, params).decode(batch, encoded)[0]

    def one(params, batch):
        step, cache = _decoder_steps(merge_model(model, params), {"source": batch["source"][:, :1]}, 64, 1)
        return step(batch["target"][:, 0], jnp.int32(0), cache)[0]

    def operations(function, *arguments):
        return jitted(function).lower(*arguments).compile().cost_analysis()["flops"]

    assert operations(whole, params, batch, encoded) > 20 * operations(one, params, batch)
