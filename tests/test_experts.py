"""Sparse layers: the router, the two paths of dispatch, grouped products, and experts split over devices."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from multipod.errors import LayoutError, RecipeError
from multipod.nn.experts import einsum, grouped, native
from multipod.nn.experts.layer import ExpertSpec, SparseMlp, check_split
from multipod.nn.experts.routing import Choices, Routing, choose, logits_of, losses, ranks

GROUP, FEATURES, HIDDEN, EXPERTS = 32, 8, 12, 4
ROUTING = Routing(EXPERTS, group=GROUP, second="all")
SPEC = ExpertSpec(ROUTING, HIDDEN)


# Tiny arrays and large programs: what is saved in compiling is more than what is lost in running.
jitted = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def apply(spec, weights, x, *, train=False, axis=(), counts=None):
    """Output, report, and gradients of a scalar of both by weights and tokens."""
    graph = nnx.split(nnx.eval_shape(lambda: SparseMlp(spec, FEATURES, nnx.Rngs(0))), nnx.Param, ...)[0]

    def total(weights, x):
        module = nnx.merge(graph, *weights)
        module.train() if train else module.eval()
        y, report = module(x, counts, axis=axis, key=jax.random.key(3))
        return jnp.sin(y.astype(jnp.float32)).sum() + report["balance"] + report["z"], (y, report)

    (_, (y, report)), gradients = jax.value_and_grad(total, (0, 1), has_aux=True, allow_int=True)(weights, x)
    return y, report, (gradients[0][0], gradients[1])


applied = jitted(apply, static_argnames=("spec", "train", "axis"))


def weights_of(spec, seed=0):
    """Parameters of which none is zero, and a router that is not even."""
    _, params, rest = nnx.split(SparseMlp(spec, FEATURES, nnx.Rngs(0)), nnx.Param, ...)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), jnp.float32), params), rest


def tokens(count=2 * GROUP, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, FEATURES)), jnp.float32)


def assert_close(a, b, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.abs(other).max()), rtol=tolerance)


# --- grouped products ---


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 80), min_size=5, max_size=5),
    st.integers(0, 40),
    st.sampled_from(["native", "blocks", "ragged"]),
)
def test_grouped_product_is_every_row_with_its_kernel(sizes, rest, way):
    rows = np.zeros((512, 6), np.float32)
    filled = np.random.default_rng(0).normal(size=(sum(sizes) + rest, 6))
    rows[: len(filled)] = filled  # rows of nobody must not count
    kernels = np.random.default_rng(1).normal(size=(5, 6, 3)).astype(np.float32)
    expected = _both(rows, kernels, jnp.array(sizes, jnp.int32), None)
    assert_close(_both(rows, kernels, jnp.array(sizes, jnp.int32), way), expected)


@partial(jitted, static_argnums=3)
def _both(rows, kernels, sizes, way):
    def total(rows, kernels):
        y = grouped.reference(rows, kernels, sizes) if way is None else grouped.product(rows, kernels, sizes, way)
        return jnp.sin(y).sum(), y

    gradients, y = jax.grad(total, (0, 1), has_aux=True)(rows, kernels)
    return y, gradients


@pytest.mark.slow
def test_grouped_product_equals_jax_ragged_dot():
    rng = np.random.default_rng(0)
    rows, kernels = rng.normal(size=(600, 16)).astype(np.float32), rng.normal(size=(2, 16, 8)).astype(np.float32)
    sizes = jnp.array([333, 200], jnp.int32)  # blocks of 128 and of 32
    expected = jax.jit(jax.lax.ragged_dot)(rows, kernels, sizes)
    for way in ("native", "blocks"):
        assert_close(jax.jit(partial(grouped.product, way=way))(rows, kernels, sizes), expected)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize(("experts", "inner", "outer"), [(3, 33, 45), (4, 64, 300)])
def test_grouped_products_of_bfloat16_are_float32_sums_rounded_once(tiles, experts, inner, outer):
    native.register()
    rng = np.random.default_rng(0)
    sizes = np.array([70, 0, *rng.multinomial(150, [1 / (experts - 2)] * (experts - 2))], np.int32)
    rows, gradient = (jnp.bfloat16(rng.normal(size=(225, dim))) for dim in (inner, outer))  # five of nobody
    kernels = jnp.bfloat16(rng.normal(size=(experts, inner, outer)))
    ends = sizes.cumsum()
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    r, g, k = (np.asarray(array, np.float64) for array in (rows, gradient, kernels))
    nothing = np.zeros((225 - ends[-1], outer)), np.zeros((225 - ends[-1], inner))
    forward = np.concatenate([*(r[part] @ k[e] for e, part in enumerate(parts)), nothing[0]])
    backward = np.concatenate([*(g[part] @ k[e].T for e, part in enumerate(parts)), nothing[1]])
    by_expert = np.stack([r[part].T @ g[part] for part in parts])
    for made, expected in (
        (native.rows_with_kernels(rows, kernels, sizes, 1, tiles=tiles), forward),
        (native.rows_with_kernels(gradient, kernels, sizes, 2, tiles=tiles), backward),
        (native.rows_with_rows(rows, gradient, sizes, tiles=tiles), by_expert),
    ):
        assert made.dtype == jnp.bfloat16
        # A float32 sum next to the middle of two bfloat16 may fall to either.
        assert (np.asarray(made) != expected.astype(made.dtype)).mean() < 1e-3
        np.testing.assert_allclose(np.asarray(made, np.float64), expected, rtol=2**-8, atol=2**-8)


# --- the router ---


def random_choices(seed, groups=2, size=13, chosen=3):
    rng = np.random.default_rng(seed)
    expert = np.argsort(rng.random((groups, size, EXPERTS)), -1)[..., :chosen].astype(np.int32)
    expert[rng.random(expert.shape) < 0.2] = EXPERTS
    confidence = rng.choice(np.linspace(0.3, 0.9, 6), (groups, size))
    return Choices(expert, np.ones(expert.shape, np.float32), np.float32(confidence))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["choices", "tokens", "confident"]))
def test_ranks_by_sorting_are_those_by_counting(seed, order):
    choices = random_choices(seed)
    made = choices.expert < EXPERTS
    counted = _places(choices, order)
    np.testing.assert_array_equal(np.asarray(_ranks(choices, order))[made], np.asarray(counted)[made])


_ranks = jax.jit(ranks, static_argnums=1)
_places = jax.jit(
    lambda choices, order: einsum.places_by_counting(choices, replace(ROUTING, chosen=3), order), static_argnums=1
)


def test_ranks_count_by_hand():
    expert = np.array([[[0, 1], [0, 2], [1, 0]]], np.int32)
    choices = Choices(expert, np.ones((1, 3, 2), np.float32), np.array([[0.5, 0.9, 0.7]], np.float32))
    assert _ranks(choices, "choices").tolist() == [[[0, 1], [1, 0], [0, 2]]]
    assert _ranks(choices, "tokens").tolist() == [[[0, 0], [1, 0], [1, 2]]]
    assert _ranks(choices, "confident").tolist() == [[[1, 1], [0, 0], [0, 2]]]


def test_gates_add_up_to_one_and_are_kept_by_policy():
    logits = jnp.log(jnp.array([[[0.6, 0.3, 0.1], [0.9, 0.06, 0.04]]]))
    gates = {policy: _gates(logits, policy) for policy in ("all", "none", "threshold", "random")}
    np.testing.assert_allclose(gates["all"], [[2 / 3, 1 / 3], [0.9375, 0.0625]], rtol=1e-5)
    np.testing.assert_allclose(gates["none"], [[2 / 3, 0], [0.9375, 0]], rtol=1e-5)
    np.testing.assert_allclose(gates["threshold"], [[2 / 3, 1 / 3], [0.9375, 0]], rtol=1e-5)
    assert gates["random"][0, 1] > 0  # 1/3 is above the threshold of 0.2: always kept
    many = np.asarray(_gates(jnp.repeat(logits[:, 1:], 4000, axis=1), "random"))
    assert abs((many[:, 1] > 0).mean() - 0.0625 / 0.2) < 0.03  # kept with probability gate / threshold
    top_1 = jax.jit(lambda z: choose(z, Routing(3, 1), train=True).gate)(logits)[0, :, 0]
    np.testing.assert_allclose(top_1, [0.6, 0.9], rtol=1e-5)  # a single choice keeps its probability


@partial(jax.jit, static_argnums=1)
def _gates(logits, policy):
    keys = jax.random.split(jax.random.key(0), 1)
    return choose(logits, Routing(3, second=policy), train=True, key=keys).gate[0]


def test_losses_have_their_closed_forms():
    def report(logits):
        return jax.jit(lambda z: losses(z, choose(z, ROUTING, train=False), ROUTING))(logits)

    assert report(jnp.zeros((1, 8, EXPERTS)))["z"] == pytest.approx(math.log(EXPERTS) ** 2, rel=1e-5)
    one = jnp.full((1, 8, EXPERTS), -30.0).at[..., 2].set(30.0)
    assert report(one)["balance"] == pytest.approx(EXPERTS, rel=1e-5)
    turns = 30.0 * jax.nn.one_hot(jnp.arange(8) % EXPERTS, EXPERTS)[None]
    assert report(turns)["balance"] == pytest.approx(1, rel=1e-5)


def test_padding_changes_no_loss():
    logits = 3 * jax.random.normal(jax.random.key(5), (4, 8, EXPERTS))

    def report(logits, counts=None):
        run = jax.jit(lambda z, c: losses(z, choose(z, ROUTING, train=False, counts=c), ROUTING, c))
        return jax.device_get(run(logits, counts))

    half = jnp.broadcast_to(jnp.arange(4)[:, None] < 2, (4, 8))  # two groups of four are all padding
    for name, value in report(logits[:2]).items():
        np.testing.assert_allclose(report(logits, half)[name], value, rtol=1e-5, err_msg=name)
    uneven = jnp.arange(32).reshape(4, 8) < 9  # one whole group, and one token of another
    squares = jnp.square(jax.nn.logsumexp(logits, -1)).reshape(-1)
    whole, alone = report(logits[:1]), report(logits[1:2, :1])
    padded = report(logits, uneven)
    np.testing.assert_allclose(padded["z"], squares[:9].mean(), rtol=1e-5)
    np.testing.assert_allclose(padded["balance"], (8 * whole["balance"] + alone["balance"]) / 9, rtol=1e-5)
    assert report(logits, jnp.zeros((4, 8), bool))["z"] == 0


def test_slots_are_those_of_the_paper():
    def slots(experts, group, train):
        return Routing(experts, group=group).slots(train=train)

    assert slots(32, 2048, True) == 80  # 1.25 * 2048 / 32
    assert slots(32, 2048, False) == 128
    assert slots(32, 64, True) == 4  # at least 4
    assert slots(2, 8, False) == 8  # at most the group
    assert Routing(32, chosen=1, group=2048).slots(train=True) == 80  # whatever the number of choices


def test_router_stays_float32_beside_bfloat16():
    x = 100 * tokens().astype(jnp.bfloat16)
    kernel = np.random.default_rng(0).normal(size=(FEATURES, EXPERTS)).astype(np.float32)
    logits = jax.jit(logits_of, static_argnums=2)(x[None], kernel, replace(ROUTING))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], np.float64(x) @ np.float64(kernel), atol=1e-4)
    rounded = jax.jit(logits_of, static_argnums=2)(x[None], kernel, replace(ROUTING, dtype="bfloat16"))
    np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16).astype(jnp.float32))


def test_rounded_logits_lose_a_third_of_a_probability():
    # The worked example of arXiv:2202.08906, figure 2: ten logits of 128 and one of 128.5.
    logits = jnp.full((1, 1, 11), 128.0).at[..., 0].set(128.5)
    exact = jax.nn.softmax(logits)[0, 0, 0]
    rounded = jax.nn.softmax(logits.astype(jnp.bfloat16).astype(jnp.float32))[0, 0, 0]
    assert float(rounded / exact - 1) == pytest.approx(-0.358, abs=5e-4)


# --- the two paths ---

PATHS = {
    "choices": {"second": "random", "threshold": 0.9, "jitter": 0.1},
    "tokens": {"order": "tokens", "chosen": 3, "capacity": 2.0},
    "confident": {"order": "confident", "capacity": 0.5},
    "top-1": {"chosen": 1, "capacity": 0.6},
    "dropless": {"dropless": True},
}


@pytest.mark.parametrize("changes", PATHS.values(), ids=PATHS)
def test_sorting_gives_what_one_hot_products_give(changes):
    spec = replace(SPEC, routing=replace(ROUTING, **changes), dropout=0.2 if "jitter" in changes else 0.0)
    counts = jnp.arange(2 * GROUP) % 7 != 0
    weights = weights_of(spec)
    plain = applied(replace(spec, path="einsum"), weights, tokens(), train=True, counts=counts)
    assert_close(applied(spec, weights, tokens(), train=True, counts=counts), plain)
    assert not np.asarray(plain[0])[~counts].any()  # padding goes nowhere
    assert (plain[1]["dropped"] > 0) or changes.get("capacity", 1) >= 1


def test_bfloat16_experts_agree_too():
    spec = replace(SPEC, dtype="bfloat16")
    assert_close(_outputs(spec, tokens()), _outputs(replace(spec, path="einsum"), tokens()), 0.05)


@pytest.mark.slow
def test_one_expert_is_the_dense_layer():
    spec = ExpertSpec(Routing(1, 1, group=GROUP, dropless=True), HIDDEN)
    weights = weights_of(spec)
    w = {"/".join(path): leaf[...] for path, leaf in nnx.to_flat_state(weights[0])}
    x = tokens()
    hidden = jax.nn.gelu(x @ w["experts/gate"][0], approximate=False) * (x @ w["experts/inner"][0])
    assert_close(_outputs(spec, x), hidden * w["experts/factor"][0] @ w["experts/outer"][0])


@pytest.mark.slow
def test_sorting_makes_nothing_of_tokens_times_experts_times_slots():
    spec = replace(SPEC, routing=replace(ROUTING, group=256, capacity=2.0))
    largest = {path: _largest(replace(spec, path=path)) for path in ("sorted", "einsum")}
    assert largest["einsum"] == 512 * EXPERTS * 128
    assert largest["sorted"] <= 512 * 2 * HIDDEN * 2  # rows of hidden features


def _largest(spec):
    """Numbers in the largest array of the program that is compiled."""
    text = applied.lower(spec, weights_of(spec), tokens(512), train=True).as_text()
    return max(math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)", text))


# --- who sees the future ---


def test_first_choice_priority_leaks_the_future_and_token_order_does_not():
    def changed(**changes):
        spec = replace(SPEC, routing=replace(ROUTING, **changes))
        return bool(np.any(np.asarray(_outputs(spec, x) != _outputs(spec, late))[: GROUP // 2])), bool(
            spec.routing.leaks
        )

    x = tokens(GROUP)
    late = x.at[GROUP // 2 :].set(tokens(GROUP, seed=9)[GROUP // 2 :])
    assert changed(capacity=1.0) == (True, True)
    assert changed(capacity=0.5, order="confident") == (True, True)
    assert changed(capacity=0.75, order="tokens") == (False, False)
    assert changed(capacity=0.5, chosen=1) == (False, False)


@partial(jitted, static_argnums=0)
def _outputs(spec, x):
    graph = nnx.split(nnx.eval_shape(lambda: SparseMlp(spec, FEATURES, nnx.Rngs(0))), nnx.Param, ...)[0]
    return nnx.merge(graph, *weights_of(spec))(x)[0]


def test_a_decoder_refuses_what_leaks():
    with pytest.raises(RecipeError, match=r"decoder: order='confident'.*Take order='tokens', or dropless=true"):
        replace(ROUTING, order="confident").check_causal("decoder")
    replace(ROUTING, order="tokens").check_causal("decoder")


# --- experts split over devices ---


def over_devices(spec, weights, x, devices, model=1):
    """On `devices` that share the experts, times `model` that share the hidden features of each."""
    shape, names = (devices, model), ("expert", "model")
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: devices * model])
    whole, split = PartitionSpec(), PartitionSpec("expert")
    # The router is whole on every device, the experts are split by their first dim.
    params = nnx.map_state(lambda path, _: whole if path[0] == "router" else split, weights[0])
    random = jax.tree.map(lambda _: whole, weights[1])

    def local(params, rest, x):
        y, report, (of_params, of_x) = apply(
            spec, (params, rest), x, train=True
        )  # which sees that the experts are split
        of_router = jax.lax.psum(of_params["router"][...], "expert")
        of_params["router"] = of_params["router"].replace(of_router)
        served = jnp.stack([report["dropped"], report["served_first"], report["served_second"]])
        return y, jax.lax.pmean(served, "expert"), of_params, of_x

    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(params, random, split),
        out_specs=(split, whole, params, split),
        axis_names={"expert"},
        check_vma=False,
    )
    inner = weights[0]["experts"]["inner"]
    inner[...] = jax.device_put(inner[...], NamedSharding(mesh, PartitionSpec("expert", None, "model")))
    return jitted(function)(*weights, x)


SPLIT = {
    "slots": (4, 2, {"order": "confident", "capacity": 0.5, "second": "random", "threshold": 0.9, "jitter": 0.1}),
    "dropless": (8, 1, {"dropless": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "model", "changes"), SPLIT.values(), ids=SPLIT)
def test_any_number_of_devices_serves_the_same_tokens(devices, model, changes):
    # No losses: they are means over a device's groups, and their sum over devices is another multiple.
    spec = ExpertSpec(replace(ROUTING, experts=8, group=8, **changes), HIDDEN, dropout=0.1)
    x, weights = tokens(64), weights_of(spec)
    if "dropless" in changes:  # nearly all to one expert: several rounds
        weights[0]["router"][...] = weights[0]["router"][...].at[:, 3].add(x.sum(0))
    y, report, (of_params, _) = applied(spec, weights, x, train=True)
    alone = y, jnp.stack([report["dropped"], report["served_first"], report["served_second"]])
    split = over_devices(spec, weights, x, devices, model)
    assert_close(split[:2], alone, 2e-5)
    assert_close(split[2]["experts"], of_params["experts"], 2e-5)


# --- what cannot be ---


def test_impossible_routings_are_refused_all_at_once():
    with pytest.raises(RecipeError) as refused:
        Routing(2, 3, capacity=0, threshold=0)
    for part in ("chosen=3 of 2 experts", "capacity=0: no token would reach", "threshold=0 must be above 0"):
        assert part in str(refused.value)


def test_tokens_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(RecipeError, match=r"48 tokens of a device do not divide into groups of 32. Take group=24 or"):
        applied(SPEC, weights_of(SPEC), tokens(48))


def test_an_axis_that_does_not_divide_the_experts_is_refused():
    with pytest.raises(LayoutError, match=r"16 experts do not divide over an expert axis of 3 devices with 4 on each"):
        check_split(16, 4, 3)
    spec = replace(SPEC, routing=replace(ROUTING, experts=8, group=8))
    with pytest.raises(LayoutError, match="8 experts do not divide over an expert axis of 1 devices with 4 on each"):
        applied(spec, weights_of(SPEC), tokens(64))
