"""Optimizers and schedules: against the papers' equations in NumPy, Optax, closed forms and published numbers."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import make_optimizer
from test_step import largest_difference, trained
from tiny_recipe import Perceptron

from multipod.data.batches import TrainBatches
from multipod.errors import RecipeError
from multipod.metrics.objective import Classification
from multipod.optim.adamw import AdamW
from multipod.optim.lamb import Lamb
from multipod.optim.lars import Lars, LarsScaled, lars
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.presets import IMAGENET_EXAMPLES, PRESETS, find_preset
from multipod.optim.rates import RATES, Constant, Cosine, Drops, Exponential, Linear, Polynomial, Rsqrt, WarmUp
from multipod.optim.sgd import Sgd
from multipod.optim.sm3 import Sm3, scale_by_sm3
from multipod.optim.tensors import TensorRules, is_norm, name_of
from multipod.optim.trust import tensor_norm, trust_ratio
from multipod.recipe.override import override
from multipod.recipe.text import to_text
from multipod.recipes.digits import digits

SHAPES = {"dense": {"kernel": (4, 3), "bias": (3,)}, "norm1": {"scale": (3,)}, "gain": ()}
ADAPTED = {"dense/kernel"}
IN_LOSS = {"dense/kernel", "dense/bias", "gain"}


def tree(seed, shapes=SHAPES, scale=1.0):
    """Normal random numbers in a tree of these shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: np.asarray(random.normal(0, scale, shape), np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def flat(values):
    """{name: array} of a tree."""
    return {name_of(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(values)}


def run(transformation, params, gradients):
    """The parameters after one update for each of `gradients`."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # to compile is what this costs
    def all_of(params, stacked):
        def one(carry, g):
            params, state = carry
            changes, state = transformation.update(g, state, params)
            return (optax.apply_updates(params, changes), state), None

        return jax.lax.scan(one, (params, transformation.init(params)), stacked)[0]

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)
    return jax.device_get(all_of(jax.tree.map(jnp.asarray, params), stacked))


# The papers' equations, one tensor at a time, in float64. `s` is a dictionary that begins empty.


def ratio(w, g, eta, beta, eps):
    w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    return eta * w_norm / (g_norm + beta * w_norm + eps) if w_norm > 0 and g_norm > 0 else 1.0


def np_sgd(o, s, w, g, rate, beta, adapted, t):
    g = g + beta * adapted * w
    s["v"] = o.momentum * s.get("v", 0) + g
    return w - rate * (g + o.momentum * s["v"])


def np_adamw(o, s, w, g, rate, beta, adapted, t):
    s["m"] = o.beta1 * s.get("m", 0) + (1 - o.beta1) * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    m, v = s["m"] / (1 - o.beta1**t), s["v"] / (1 - 0.999**t)
    return w - rate * (m / (np.sqrt(v) + 1e-8) + beta * adapted * w)


def np_lamb(o, s, w, g, rate, beta, adapted, t):
    s["m"] = o.beta1 * s.get("m", 0) + (1 - o.beta1) * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    m, v = s["m"] / (1 - o.beta1**t), s["v"] / (1 - 0.999**t)
    r = m / (np.sqrt(v) + 1e-6) + beta * adapted * w
    return w - rate * (ratio(w, r, 1, 0, 0) if adapted else 1) * r


def np_lars(o, s, w, g, rate, beta, adapted, t):
    step = rate * (ratio(w, g, o.trust_coefficient, o.weight_decay, o.eps) if adapted else 1)
    s["v"] = o.momentum * s.get("v", 0) + step * (g + beta * adapted * w)
    return w - s["v"]


def np_lars_scaled(o, s, w, g, rate, beta, adapted, t):
    step = rate * (ratio(w, g, o.trust_coefficient, o.weight_decay, o.eps) if adapted else 1)
    s["v"] = o.momentum * s.get("v", 0) + g + beta * adapted * w
    return w - step * s["v"]


def np_lion(o, s, w, g, rate, beta, adapted, t):
    m = s.get("m", 0)
    s["m"] = 0.99 * m + 0.01 * g
    return w - rate * (np.sign(o.beta1 * m + (1 - o.beta1) * g) + beta * adapted * w)


def np_rmsprop(o, s, w, g, rate, beta, adapted, t):
    g = g + beta * adapted * w
    s["ms"] = 0.9 * s.get("ms", 1.0) + 0.1 * g**2
    s["mom"] = o.momentum * s.get("mom", 0) + rate * g / np.sqrt(s["ms"] + 1e-3)
    return w - s["mom"]


def np_sm3(o, s, w, g, rate, beta, adapted, t):
    g = g + beta * adapted * w
    if w.ndim == 2:
        rows, columns = s.get("mu", (np.zeros(len(w)), np.zeros(w.shape[1])))
        nu = np.array([[min(r, c) for c in columns] for r in rows]) + g**2
        s["mu"] = nu.max(axis=1), nu.max(axis=0)
    else:
        nu = s["mu"] = s.get("mu", 0) + g**2
    s["m"] = o.momentum * s.get("m", 0) + (1 - o.momentum) * g / np.sqrt(nu)
    return w - rate * s["m"]


def np_adagrad(o, s, w, g, rate, beta, adapted, count):
    """Duchi et al., 2011, with all weight decay beside the gradient."""
    g = g + beta * w * adapted
    s["v"] = s.get("v", 0) + g**2
    return w - rate * g / np.sqrt(s["v"] + 1e-8)


def np_rowwise_adagrad(o, s, w, g, rate, beta, adapted, count):
    """Gupta et al., 2014: one sum of squares a row."""
    g = g + beta * w * adapted
    squares = (g**2).mean(tuple(range(1, g.ndim)), keepdims=True) if g.ndim > 1 else g**2
    s["v"] = s.get("v", 0) + squares
    return w - rate * g / np.sqrt(s["v"] + 1e-8)


EQUATIONS = {
    "adagrad": np_adagrad,
    "rowwise_adagrad": np_rowwise_adagrad,
    "sgd": np_sgd,
    "adamw": np_adamw,
    "lamb": np_lamb,
    "lars": np_lars,
    "lars_scaled": np_lars_scaled,
    "lion": np_lion,
    "rmsprop": np_rmsprop,
    "sm3": np_sm3,
}


@pytest.mark.parametrize(
    ("name", "where"), [*((name, where) for name in EQUATIONS for where in ("optimizer", "loss")), ("lars", "both")]
)
def test_every_optimizer_is_its_papers_equations(name, where):
    o = make_optimizer(name, WarmUp(Cosine(0.3), 0.25), weight_decay=0.04, weight_decay_in=where, trust_coefficient=0.1)
    params, gradients = tree(0), [tree(seed, scale=0.5) for seed in range(1, 7)]
    ours = flat(run(o.build(8), params, gradients)[0])
    rates = [float(o.schedule(8)(count)) for count in range(6)]
    for tensor, w in flat(params).items():
        w, state = w.astype(np.float64), {}
        for count, (rate, step) in enumerate(zip(rates, gradients, strict=True)):
            g = flat(step)[tensor].astype(np.float64)
            g = g + o.weight_decay * w * (where != "optimizer" and tensor in IN_LOSS)
            beta = 0.0 if where == "loss" else o.weight_decay
            w = EQUATIONS[name](o, state, w, g, rate, beta, tensor in ADAPTED, count + 1)
        np.testing.assert_allclose(ours[tensor], w, rtol=3e-5, atol=3e-6, err_msg=tensor)


@dataclass(frozen=True)
class Stack:
    """Layers in one tensor; sizes that the mesh divides and one that it does not."""

    def init(self, key):
        values = jax.tree.map(np.tanh, tree(0, {"in": (64, 16), "layers": {"kernel": (3, 16, 16), "bias": (3, 16)}}))
        return jax.tree.map(lambda x: jnp.asarray(x / 4), values) | {"bias": jnp.zeros(10)}, {}

    def apply(self, params, statistics, batch, *, train, key):
        x = batch["image"].reshape(-1, 64) @ params["in"]
        for i in range(3):
            x = jnp.tanh(x @ params["layers"]["kernel"][i] + params["layers"]["bias"][i])
        return x[:, :10] + params["bias"], statistics


@dataclass(frozen=True)
class Stacks:
    """A stack for each optimizer, side by side: to compile a program for each would be most of what the test costs."""

    def init(self, key):
        return {name: Stack().init(key)[0] for name in OPTIMIZERS}, {}

    def apply(self, params, statistics, batch, *, train, key):
        return {n: Stack().apply(p, {}, batch, train=train, key=key)[0] for n, p in params.items()}, statistics


@dataclass(frozen=True)
class Losses:
    """The sum of their losses: none has a gradient of another's."""

    def __call__(self, outputs, batch):
        return {"loss": sum(Classification()(logits, batch)["loss"] for logits in outputs.values())}


@dataclass(frozen=True)
class Optimizers:
    """Each optimizer for its own stack."""

    def build(self, updates):
        options = {"weight_decay": 0.01, "weight_decay_in": "both", "clip": 1.0, "eps": 1e-4}
        options["rules"] = TensorRules(stacked=("layers",))
        each = {
            name: make_optimizer(name, Cosine(0.5 if "lars" in name else 0.002), **options).build(updates)
            for name in OPTIMIZERS
        }
        return optax.multi_transform(each, {name: name for name in OPTIMIZERS})


@pytest.mark.jax_version
def test_every_optimizer_is_unchanged_by_splitting_the_update(small):
    options = {"model": Stacks(), "objective": Losses(), "optimizer": Optimizers()}
    _, whole, _ = trained(small(**options), 5)
    _, split, _ = trained(small(**options, shard_update=True), 5)
    parts = {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(split.optimizer) if leaf.size >= 64}
    assert parts == {False}, "nothing was split"
    for name in OPTIMIZERS:
        assert largest_difference(whole.params[name], Stack().init(jax.random.key(0))[0]) > 1e-3, name
        bound = 2e-6 if name != "lion" else 1e-4  # lion takes signs
        assert largest_difference(whole.params[name], split.params[name]) < bound, name


# The rows of `rowwise_adagrad` are those of the first dim, which in a stack counts layers: it is for tables. Adafactor
# has one size of steps for a whole stack.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("rowwise_adagrad", "adafactor")])
def test_a_stack_of_layers_trains_like_its_layers(name):
    options = {"weight_decay": 0.1, "weight_decay_in": "both", "clip": 3.0}
    o = make_optimizer(name, Cosine(0.1), **options, rules=TensorRules(stacked=("layers",)))
    shapes = {"layers": {"kernel": (3, 4, 5), "bias": (3, 4)}, "out": {"kernel": (5, 2)}}
    params, gradients = tree(0, shapes), [tree(seed, shapes) for seed in range(1, 5)]
    # Layers of very different size: one norm for all of them would be wrong for each.
    params["layers"]["kernel"] *= np.array([0.01, 1, 100], np.float32)[:, None, None]

    def apart(values):
        layers = values["layers"]
        each = {str(i): {name: leaf[i] for name, leaf in layers.items()} for i in range(3)}
        return {"each": each, "out": values["out"]}

    together = run(o.build(8), params, gradients)[0]
    separate = run(o.build(8), apart(params), [apart(g) for g in gradients])[0]
    for (tensor, a), b in zip(flat(apart(together)).items(), flat(separate).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=tensor)


def test_optax_agrees_where_it_follows_the_papers():
    shapes = {"a": (4, 3), "b": (2, 3, 2)}
    params, gradients = tree(0, shapes), [tree(seed, shapes) for seed in range(1, 6)]
    pairs = [
        (Lamb(Constant(0.1), weight_decay=0.1), optax.lamb(0.1, weight_decay=0.1)),
        (Lars(Constant(5.0)), optax.lars(5.0)),
        (
            Sm3(Constant(0.1)),
            optax.chain(optax.scale_by_sm3(0.9, eps=0.0), optax.scale(-0.1)),
        ),
    ]
    for ours, theirs in pairs:
        a, b = run(ours.build(9), params, gradients)[0], run(theirs, params, gradients)[0]
        assert largest_difference(a, b) < 1e-5, ours.name
        assert largest_difference(a, params) > 1e-3, ours.name


def test_optax_departs_from_the_papers_where_we_say_so():
    params, gradients = tree(0, {"a": (4, 3)}), [tree(1, {"a": (4, 3)})]
    decaying = run(optax.lars(1.0, weight_decay=1.0), params, gradients)[0]
    ours = run(lars(lambda _: 1.0, weight_decay=1.0), params, gradients)[0]
    assert largest_difference(decaying, ours) > 1e-4
    with pytest.raises((IndexError, TypeError)):
        optax.sm3(0.1).update(jnp.ones(()), optax.sm3(0.1).init(jnp.ones(())))
    slow, _ = optax.scale_by_sm3(0.0).update(jnp.full(2, 1e-6), optax.scale_by_sm3(0.0).init(jnp.ones(2)))
    full, _ = scale_by_sm3().update(jnp.full(2, 1e-6), scale_by_sm3().init(jnp.ones(2)))
    assert float(slow[0]) < 0.02
    np.testing.assert_allclose(full, 1.0, rtol=1e-6)


def lars_pair(rate, rule, count, w):
    """The parameters that scaled and unscaled LARS reach, for gradients `rule(w)`."""
    ends = []
    for scaled in (False, True):
        transformation = lars(rate, scaled=scaled, trust_coefficient=0.1)
        params, state = w, transformation.init(w)
        for _ in range(count):
            changes, state = transformation.update(rule(params), state, params)
            params = optax.apply_updates(params, changes)
        ends.append(np.asarray(params))
    return ends


def test_both_forms_of_lars_agree_while_rate_times_ratio_is_constant():
    w = jnp.asarray(tree(3, {"a": (3, 4)})["a"])
    unscaled, scaled = lars_pair(lambda _: 0.5, lambda w: 3 * w, 5, w)  # |w| / |g| is 1/3 at every update
    np.testing.assert_allclose(unscaled, scaled, rtol=1e-5)
    unscaled, scaled = lars_pair(lambda count: 0.5 / (1 + count), lambda w: 3 * w, 5, w)
    assert np.abs(unscaled - scaled).max() > 1e-3


def test_a_falling_rate_shrinks_old_momentum_in_the_scaled_form_alone():
    unscaled, scaled = lars_pair(lambda count: jnp.where(count == 0, 1.0, 0.1), jnp.ones_like, 2, jnp.zeros(2))
    np.testing.assert_allclose(unscaled, -(1.0 + (0.9 * 1.0 + 0.1)), rtol=1e-6)
    np.testing.assert_allclose(scaled, -(1.0 + 0.1 * (0.9 + 1.0)), rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(-5, 5), rate=st.floats(1e-3, 10))
def test_the_first_change_has_a_length_that_no_gradient_can_alter(seed, size, rate):
    w, g = tree(seed, {"w": (3, 4)})["w"], tree(seed + 1, {"w": (3, 4)})["w"] * 10**size
    for name, expected in (("lars", 0.001), ("lars_scaled", 0.001), ("lamb", 1.0)):
        o = OPTIMIZERS[name](Constant(rate)).build(9)
        change, _ = o.update(g, o.init(w), w)
        assert np.linalg.norm(change) == pytest.approx(rate * expected * np.linalg.norm(w), rel=1e-4)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), updates=st.integers(1, 5), zeros=st.floats(0, 1))
def test_sm3_never_counts_less_than_adagrad_and_never_forgets(seed, updates, zeros):
    random, sm3 = np.random.default_rng(seed), scale_by_sm3()
    state, squares, before = sm3.init(jnp.zeros((3, 4))), np.zeros((3, 4)), np.zeros((3, 4))
    for _ in range(updates):
        g = (random.normal(size=(3, 4)) * (random.random((3, 4)) >= zeros)).astype(np.float32)
        scaled, state = sm3.update(jnp.asarray(g), state)
        squares += g.astype(np.float64) ** 2
        rows, columns = map(np.asarray, state.accumulators)
        cover = np.minimum(rows, columns)
        assert rows.shape == (3, 1)
        assert columns.shape == (1, 4)
        assert (cover >= squares * (1 - 1e-5)).all()
        assert (cover >= before).all()
        assert np.isfinite(scaled).all()
        assert (np.asarray(scaled)[g == 0] == 0).all()
        before = cover


def test_sm3_keeps_as_many_numbers_as_the_dims_are_long():
    o = Sm3(WarmUp(Cosine(1e-3), 0.1), momentum=0.0).build(9)
    state = jax.eval_shape(o.init, {"w": jnp.zeros((128, 64, 3)), "b": jnp.zeros(7), "gain": jnp.zeros(())})
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == (128 + 64 + 3) + 7 + 1 + 1  # and the count


def test_a_ratio_is_one_without_norms_and_hides_no_nan():
    one, nothing, bad = jnp.ones((2, 2)), jnp.zeros((2, 2)), jnp.full((2, 2), jnp.nan)
    for w, g in ((nothing, one), (one, nothing), (nothing, nothing), (one, bad)):
        np.testing.assert_array_equal(trust_ratio(w, g, coefficient=0.1), 1.0)
    for name in OPTIMIZERS:
        o = OPTIMIZERS[name](Cosine(1e-3)).build(9)
        change, _ = o.update(bad, o.init(one), one)
        assert np.isnan(change).all(), name


def test_norms_of_low_precision_are_taken_in_float32():
    x = jnp.full((400, 400), 0.01, jnp.bfloat16)
    np.testing.assert_allclose(tensor_norm(x), 400 * float(jnp.bfloat16(0.01)), rtol=1e-5)
    for name in OPTIMIZERS:
        o = make_optimizer(name, Cosine(0.1), weight_decay=0.1)
        params, _ = run(o.build(9), {"w": jnp.ones((2, 2), jnp.bfloat16)}, [{"w": jnp.ones((2, 2), jnp.bfloat16)}] * 2)
        assert params["w"].dtype == jnp.bfloat16, name
        assert np.asarray(params["w"], np.float32).max() < 1 or "lars" in name


@pytest.mark.parametrize(
    ("name", "dims", "adapted", "in_loss"),
    [
        ("blocks/0/conv1/kernel", 4, True, True),
        ("head/bias", 1, False, True),
        ("attention/query/bias", 2, False, True),
        ("attention/query/bias/value", 2, False, True),
        ("blocks/0/norm1/scale", 1, False, False),
        ("BatchNorm_0/scale", 1, False, False),
        ("batch_normalization_3/gamma", 1, False, False),
        ("layer1/bn2/weight", 1, False, False),
        ("ln_f/weight", 2, False, False),
        ("normal/kernel", 2, True, True),
        ("gain", 0, False, True),
        ("", 2, True, True),
        ("layers/mlp/kernel", 3, True, True),
        ("layers/mlp/wi", 2, False, True),
        ("embedding/table", 2, False, False),
    ],
)
def test_which_tensors_are_adapted_and_decayed(name, dims, adapted, in_loss):
    rules = TensorRules(skip=("Embedding",), stacked=("layers",))
    assert rules.is_adapted(name, dims) == adapted
    assert rules.is_decayed_in_loss(name) == in_loss


def test_the_tensors_of_our_network_fall_under_the_rules():
    params, _ = jax.eval_shape(digits().model.init, jax.random.key(0))
    adapted = TensorRules().adapted(params)
    assert {name for name, yes in adapted.items() if yes} == {name for name in params if name.endswith("kernel")}
    assert {name for name in params if is_norm(name)} == {name for name in params if "norm" in name}


# Schedules.


@pytest.mark.parametrize(
    ("rate", "updates", "rates"),
    [
        (WarmUp(Linear(2.0, end=1.0), 0.5), 8, {0: 0, 2: 1, 4: 2, 6: 1.5, 8: 1, 99: 1}),
        (Cosine(2.0, end=1.0), 8, {0: 2, 4: 1.5, 8: 1, 99: 1}),
        (
            WarmUp(Polynomial(4.0, end=0.1), 0.2, start=0.5),
            10,
            {0: 2, 1: 3, 2: 4, 6: 0.1 + 3.9 / 4, 10: 0.1, 20: 0.1},
        ),
        (Polynomial(1.0, power=3.0), 4, {1: 27 / 64, 3: 1 / 64}),
        (
            WarmUp(Exponential(1.0, end=0.2, factor=0.5, every=0.2), 0.1),
            10,
            {0: 0, 1: 1, 2: 1, 3: 0.5, 4: 0.5, 5: 0.25, 7: 0.2},
        ),
        (
            WarmUp(Exponential(1.0, factor=0.5, every=0.2, from_start=True), 0.3),
            10,
            {1: 1 / 3, 3: 0.5, 4: 0.25, 5: 0.25, 6: 0.125},
        ),
        (WarmUp(Drops(1.0, at=(0.5, 0.8)), 0.1), 10, {0: 0, 4: 1, 5: 0.1, 7: 0.1, 8: 0.01}),
        (WarmUp(Rsqrt(1.0), updates=4), 10, {0: 0, 2: 0.5, 4: 1, 16: 0.5, 64: 0.25}),
        (Rsqrt(1.0), 10, {0: 1, 1: 1, 4: 0.5}),
        (WarmUp(Constant(1.0), 1.0), 10, {0: 0, 5: 0.5, 10: 1, 11: 1}),
        (
            WarmUp(Constant(2.0), updates=4, start=0.01, exponential=True),
            9,
            {0: 0.02, 2: 0.2, 3: 2 / 10**0.5, 4: 2, 8: 2},
        ),
    ],
)
def test_the_rate_at_chosen_updates(rate, updates, rates):
    schedule = jax.jit(jax.vmap(rate.schedule(updates)))
    np.testing.assert_allclose(schedule(np.array(list(rates))), list(rates.values()), rtol=1e-6, atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(
    decay=st.sampled_from(["cosine", "linear", "constant", "polynomial", "exponential", "drops", "rsqrt"]),
    warmup=st.floats(0, 1),
    start=st.floats(0, 1),
    end=st.floats(0, 0.5),
    from_start=st.booleans(),
    updates=st.integers(1, 300),
)
def test_the_rate_rises_to_its_peak_and_then_never_rises(decay, warmup, start, end, from_start, updates):
    options = {"end": end, "from_start": from_start} if hasattr(RATES[decay], "end") else {}
    options |= {"at": (0.2, 0.7)} if decay == "drops" else {}
    o = WarmUp(RATES[decay](0.5, **options), warmup, start=start)
    rates = np.asarray(jax.vmap(o.schedule(updates))(np.arange(310)))[: updates + 5]
    rises = round(warmup * updates)
    assert (np.diff(rates[:rises]) >= -1e-7).all()
    assert (np.diff(rates[rises:]) <= 1e-7).all()
    assert rates.max() <= 0.5 + 1e-6
    assert rates[rises:].min() >= (min(end, 0.5) if decay in ("cosine", "linear", "polynomial") else 0) - 1e-6
    if rises:
        assert rates[0] == pytest.approx(0.5 * start, abs=1e-6)


# Presets: the numbers that the sources print of the resulting runs.

PUBLISHED = [(name, run) for name, rule in PRESETS.items() for run in rule.runs]


def rate_of(name, batch, update):
    chosen = find_preset(name).at(batch)
    return float(chosen.optimizer.schedule(chosen.updates)(update))


def test_bert_starts_at_a_quarter_of_its_rate_and_jumps_down_after_its_warm_up():
    peak = find_preset("bert-lamb").at(8192).rate.then.peak
    published = {0: 76 / 287, 210: 0.997, 211: 0.623, 560: 0.0}
    for update, share in published.items():
        assert rate_of("bert-lamb", 8192, update) / peak == pytest.approx(share, abs=6e-4)


def test_efficientnet_leaves_its_warm_up_two_stairs_down():
    chosen = find_preset("efficientnet-rmsprop").at(4096)
    epoch = IMAGENET_EXAMPLES / 4096
    after = int(5 * epoch)
    assert rate_of("efficientnet-rmsprop", 4096, after) == pytest.approx(0.256 * 0.97**2, rel=1e-5)
    assert rate_of("efficientnet-rmsprop", 4096, after - 1) == pytest.approx(0.256, rel=1e-3)
    assert chosen.updates == pytest.approx(350 * epoch, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "batch", "peak", "warmup", "updates", "end"),
    [
        ("resnet50-lars-scaled", 4096, 10.0, 1563, 22536, 1e-4),
        ("resnet50-lars-scaled", 16384, 25.0, 390, 5634, 1e-4),
        ("resnet50-lars-scaled", 32768, 31.2, 977, 2983, 1e-4),
        ("resnet50-lars-tf", 65536, 24.699, 1738 - 1133 + 1, 1738, 1e-4),
        ("resnet50-lars", 65536, 23.081, 645, 1817, 1e-4),
        ("resnet50-lars", 32768, 29.0, 703, 2512, 1e-4),
        ("efficientnet-lars", 16384, 15.10, 3909, 27388, 0.1),
        ("efficientnet-lars", 32768, 15.10, 1954, 13738, 0.1),
        ("efficientnet-lars", 65536, 20.74, 840, 6913, 0.1),
        ("ssd-sgd", 1024, 0.0992, 578, 7392, 0.000992),
        ("ssd-sgd", 2048, 0.16, 1155, 4620, 0.0016),
        ("ssd-sgd", 4096, 0.1536, 751, 3465, 0.001536),
        ("mask-rcnn-sgd", 128, 0.16, 1000, 18_480, 0.0016),
        ("mask-rcnn-sgd", 256, 0.24, 1800, 9240, 0.0024),
        ("gnmt-adam", 128, 1e-3, 200, 215_136, 1e-3 / 16),
        ("gnmt-adam", 4096, 3.5e-3, 150, 6720, 3.5e-3 / 16),
        ("gnmt-adam", 8192, 4.5e-3, 150, 4200, 4.5e-3 / 16),
        ("dlrm-sgd", 32768, 18.0, 8000, 100_000, 0.0),
        ("dlrm-sgd", 55296, 23.949, 2750, 77_087, 0.0),
    ],
)
def test_presets_reach_their_published_peaks_and_ends(name, batch, peak, warmup, updates, end):
    assert find_preset(name).at(batch).updates == pytest.approx(updates, abs=1)
    assert rate_of(name, batch, warmup) == pytest.approx(peak, rel=5e-4)
    assert rate_of(name, batch, warmup - 1) < rate_of(name, batch, warmup) >= rate_of(name, batch, warmup + 1)
    assert rate_of(name, batch, find_preset(name).at(batch).updates) == pytest.approx(end, rel=1e-4)


def test_dlrm_holds_its_rate_and_falls_as_a_square():
    """lr = base * ((end - t) / length)^2 from the update at which the script begins the fall."""
    for update, share in {2750: 1.0, 49_315: 1.0, 49_315 + 13_886: 0.25, 77_087: 0.0}.items():
        assert rate_of("dlrm-sgd", 55296, update) == pytest.approx(0.887 * 55296 / 2048 * share, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "constant", "warmup"), [("transformer-adam-tf", 1.875, 831), ("transformer-adam-jax", 3.3092, 664)]
)
def test_transformer_presets_are_the_published_product(name, constant, warmup):
    chosen = find_preset(name).at(2048)
    for update in (1, 100, warmup, 5000):
        published = constant * min(1, update / warmup) / max(update, warmup) ** 0.5 / 1024**0.5
        assert float(chosen.optimizer.schedule(1)(update)) == pytest.approx(published, rel=1e-4)


@pytest.mark.parametrize(("name", "run"), PUBLISHED, ids=lambda value: getattr(value, "batch", value))
def test_every_preset_builds_and_says_where_it_is_from(name, run):
    assert find_preset(name).at(run.batch) is run
    assert find_preset(name).beyond(run.batch) == ""
    assert "arXiv:" in run.source
    assert run.batch % 128 == 0
    w = {"w": jax.ShapeDtypeStruct((2, 2), np.float32)}
    transformation = run.optimizer.build(run.updates or 1000)
    jax.eval_shape(lambda w: transformation.update(w, transformation.init(w), w), w)


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_beside_the_published_ones_keeps_the_epochs(name):
    """Warm-up and length in examples are those of the run below; the peak goes with the power of the rule."""
    rule = PRESETS[name]
    below = rule.runs[-1]
    chosen = rule.at(4 * below.batch)
    assert chosen.updates == pytest.approx(below.updates / 4, abs=0.5)
    assert chosen.rate.length(chosen.updates) == pytest.approx(below.rate.length(below.updates) / 4, abs=1.1)
    assert chosen.rate.then.peak == pytest.approx(below.rate.then.peak * 4**rule.power)
    assert f"{below.batch:,}" in rule.beyond(4 * below.batch)
    assert rule.at(2 * below.batch - 1).optimizer.rules == below.optimizer.rules


def test_a_preset_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match=r"no optimizer preset is called 'bert-lam'\. Nearest: bert-lamb"):
        find_preset("bert-lam")


# Clipping before the sum, and the dataclasses.

PEAK = Constant(1e-3)


@pytest.mark.parametrize("shard_update", [False, True])
def test_clipping_before_the_sum_averages_the_clipped_gradients_of_the_devices(small, shard_update):
    plain = Sgd(Constant(0.1), momentum=0.0)
    clipped = replace(plain, clip=0.5, clip_before_sum=True)
    recipe = small(model=Perceptron(), optimizer=clipped, shard_update=shard_update)
    batch = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, np.arange(recipe.batch))[0]
    params, _ = recipe.model.init(jax.random.split(jax.random.key(recipe.seed))[0])

    @jax.jit
    def gradient(batch):
        def loss(params):
            return recipe.objective(recipe.model.apply(params, {}, batch, train=True, key=None)[0], batch)[
                "loss"
            ].mean()

        return jax.grad(loss)(params)

    parts, lengths = [], []
    for rows in np.split(np.arange(recipe.batch), 8):
        g = jax.device_get(gradient({name: array[rows] for name, array in batch.items()}))
        lengths.append(np.sqrt(sum((leaf**2).sum() for leaf in g.values())))
        parts.append({name: leaf * min(1, 0.5 / lengths[-1]) for name, leaf in g.items()})
    assert max(lengths) > 0.6, "nothing is clipped"
    expected = {name: params[name] - 0.1 * np.mean([part[name] for part in parts], axis=0) for name in params}
    _, before, _ = trained(recipe, 1)
    _, after, _ = trained(replace(recipe, optimizer=replace(clipped, clip_before_sum=False)), 1)
    assert largest_difference(before.params, expected) < 1e-6
    assert largest_difference(after.params, expected) > 1e-4


def test_a_gradient_within_the_limit_is_sent_as_it_is():
    g = {"a": np.array([3.0, 4.0], np.float32)}  # a share of 1/8: the device's own gradient has norm 40
    same = AdamW(WarmUp(Cosine(1e-3), 0.1), clip=41.0, clip_before_sum=True).before_sum(g, 8)
    np.testing.assert_array_equal(same["a"], g["a"])
    half = AdamW(WarmUp(Cosine(1e-3), 0.1), clip=20.0, clip_before_sum=True).before_sum(g, 8)
    np.testing.assert_allclose(half["a"], g["a"] / 2, rtol=1e-6)
    assert AdamW(WarmUp(Cosine(1e-3), 0.1), clip=20.0).before_sum(g, 8) is g


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(float("nan")), r"optimizer.rate=nan must be positive. Change it in the recipe or with --set."),
        (lambda: Sgd(PEAK, momentum=1.0), r"optimizer.momentum=1.0 must be at least 0 and below 1"),
        (lambda: WarmUp(PEAK, 0.1, exponential=True), r"warmup_start=0 never rises by a factor: give rate.start"),
        (lambda: WarmUp(PEAK, start=2.0), r"optimizer.warmup_start=2.0 is a part of rate: 0 to 1"),
        (lambda: WarmUp(PEAK, 0.1, updates=3), r"optimizer.warmup=0.1 and optimizer.warmup_updates=3: set one to 0"),
        (lambda: Drops(1.0, (0.5, 30)), r"optimizer.drops has 30, which is no share of all updates, 0 to 1"),
        (
            lambda: Exponential(1.0, end=-1.0, every=0.0),
            r"optimizer.end_rate=-1.0 must be at least 0; optimizer.decay_every=0.0 must be positive",
        ),
        (
            lambda: AdamW(PEAK, clip=-1.0, eps=0.0),
            r"optimizer.clip=-1.0 must be at least 0; optimizer.eps=0.0 must be positive",
        ),
        (lambda: Lamb(PEAK, clip_before_sum=True), r"optimizer.clip_before_sum=true limits nothing without optimizer"),
    ],
)
def test_numbers_that_cannot_be_are_refused_all_at_once(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_flat_names_reach_into_the_rate_and_the_rules():
    changes = [
        *("optimizer.name=lars_scaled", "optimizer.decay=drops", "optimizer.drops=0.5,0.8"),
        *("optimizer.stacked=layers", "optimizer.rate=9", "optimizer.warmup_start=0.5"),
    ]
    changed = override(digits(), changes).optimizer
    rate = WarmUp(Drops(9.0, (0.5, 0.8)), 0.2, start=0.5)
    assert changed == LarsScaled(rate, weight_decay=0.02, rules=TensorRules(stacked=("layers",)))
    assert 'stacked = [\n    "layers",\n]' in to_text(replace(digits(), optimizer=changed))
