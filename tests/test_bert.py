"""BERT: published sizes, PyTorch's layers, its two tasks."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.errors import MetricError, RecipeError
from multipod.metrics.objective import TokenClassification, masked_sums, report_of
from multipod.metrics.pretraining import Pretraining
from multipod.models.bert import Bert, bert_base, tiny_bert
from multipod.nn.dims import dims_of

TINY = tiny_bert(19, 12, features=16, hidden=24, layers=1, next_sentence=True)


def parameters(model):
    """Parameters of which none is zero or one, so that every one of them is seen."""
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    moved = {path: float(path.endswith("scale")) for path in shapes}
    return {path: np.float32(moved[path] + 0.3 * rng.normal(size=leaf.shape)) for path, leaf in shapes.items()}


def outputs(model, params, batch, train=False, seed=0):
    run = jax.jit(lambda params, batch: model.apply(params, {}, batch, train=train, key=jax.random.key(seed))[0])
    return jax.device_get(run(params, batch))


def sentences():
    rng = np.random.default_rng(2)
    token = rng.integers(2, 19, (3, 10))
    token[1, 6:] = 0
    return {"token": token, "type": (np.arange(10) > 4).astype(np.int32) * (token != 0)}


@pytest.mark.parametrize(
    ("model", "both_heads", "encoder"),
    [(Bert(), 336_226_108, 335_141_888), (bert_base(), 110_106_428, 109_482_240)],
    ids=["large", "base"],
)
def test_parameters_are_as_many_as_published(model, both_heads, encoder):
    """The counts of the released checkpoints: all, and the model below the heads, with its pooler."""
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    sizes = {path: math.prod(leaf.shape) for path, leaf in shapes.items()}
    assert sum(sizes.values()) == both_heads
    assert sum(size for path, size in sizes.items() if not path.startswith(("trans", "token_", "next"))) == encoder


def test_every_dim_of_every_parameter_has_a_name():
    model = replace(Bert(), layers=1)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    dims = dims_of(model)
    assert {path: len(names) for path, names in dims.items()} == {path: leaf.ndim for path, leaf in shapes.items()}
    assert all(len(set(names)) == len(names) for names in dims.values())
    assert dims["layers/0/attention/value/bias"] == ("heads", "kv")
    assert dims["token_bias"] == ("vocab",)
    assert dims["transform/kernel"] == ("embed", "embed_out")


def test_the_forward_pass_is_that_of_torch():
    torch = pytest.importorskip("torch")
    import torch_layers as theirs

    model = replace(TINY, layers=2)
    params, batch = parameters(model), sentences()
    ours = outputs(model, params, batch)
    with torch.no_grad():
        token, kind = torch.tensor(batch["token"]), torch.tensor(batch["type"], dtype=torch.int64)
        tables = [theirs.tensor(params[f"{name}/table"]) for name in ("tokens", "types", "positions")]
        x = theirs.layer_norm(params, "embedding_norm", tables[0][token] + tables[1][kind] + tables[2][:10], 1e-12)
        for number in range(2):
            layer = theirs.encoder_layer(
                params, f"layers/{number}", 2, norm_first=False, activation="gelu", epsilon=1e-12
            )
            x = layer(x, src_key_padding_mask=token == 0)
        pooled = torch.tanh(theirs.linear(params, "pooler", x[:, 0]))
        following = theirs.linear(params, "next", pooled)
        y = torch.nn.functional.gelu(theirs.linear(params, "transform", x))
        y = theirs.layer_norm(params, "transform_norm", y, 1e-12) @ tables[0].T + theirs.tensor(params["token_bias"])
    counts = batch["token"] != 0
    np.testing.assert_allclose(ours["token"][counts], y.numpy()[counts], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(ours["next"], following.numpy(), rtol=2e-4, atol=2e-4)


def test_logits_at_masked_places_are_those_of_all_places():
    params, batch = parameters(TINY), sentences()
    masked = np.array([[0, 9, 3], [5, 5, 0], [1, 2, 3]])
    everywhere = outputs(TINY, params, batch)["token"]
    np.testing.assert_allclose(
        outputs(TINY, params, batch | {"masked": masked})["token"],
        np.take_along_axis(everywhere, masked[..., None], 1),
        rtol=1e-5,
        atol=1e-5,
    )


def test_packed_sequences_do_not_see_each_other():
    model = replace(TINY, next_sentence=False)
    params = parameters(model)
    one, other = np.array([4, 5, 6]), np.array([7, 8, 9, 10])
    rows = {
        "token": np.array([[*one, *other, 0, 0], [*other, *[0] * 5]]),
        "segment": np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 4 + [0] * 5]),
        "position": np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3] + [0] * 5]),
    }
    logits = outputs(model, params, rows)
    np.testing.assert_allclose(logits[0, 3:7], logits[1, :4], rtol=1e-4, atol=1e-5)
    plain = outputs(model, params, {"token": rows["token"][1:]})
    np.testing.assert_allclose(plain[0, :4], logits[1, :4], rtol=1e-4, atol=1e-5)


def test_rows_longer_than_the_positions_are_refused():
    with pytest.raises(RecipeError, match=r"Bert: rows of 13 tokens, and positions=12 are learnt\. Set positions=13"):
        outputs(TINY, parameters(TINY), {"token": np.ones((1, 13), np.int32)})
    with pytest.raises(RecipeError, match=r"Bert: features=100 do not divide over heads=16\. Take 96"):
        Bert(features=100)


@pytest.mark.slow
def test_the_objective_adds_both_tasks():
    logits = {"token": np.zeros((2, 3, 4), np.float32), "next": np.array([[3.0, 0], [0, 3]], np.float32)}
    logits["token"][0, 0, 2] = 5
    batch = {
        "label": np.array([[2, 1, 0], [0, 0, 0]]),
        "weight": np.array([[1, 1, 0], [1, 0, 0]]),
        "next": np.array([0, 0]),
    }
    objective = Pretraining()
    values = objective(logits, batch)
    first = (math.log(math.exp(5) + 3) - 5 + math.log(4)) / 2
    follows = math.log(1 + math.exp(-3))
    np.testing.assert_allclose(values["loss"], [first + follows, math.log(4) + follows + 3], rtol=1e-5)
    reported = report_of(objective, jax.device_get(masked_sums(values)))
    # Of the tokens that count, the first is told; equal logits tell token 0, which is right in the second example.
    assert reported["accuracy"] == pytest.approx(2 / 3)
    assert reported["next_accuracy"] == 0.5
    assert reported["perplexity"] == pytest.approx(math.exp((2 * first + math.log(4)) / 3), rel=1e-5)
    nothing = jax.device_get(masked_sums(objective(logits, batch | {"weight": np.zeros((2, 3))})))
    with pytest.raises(MetricError, match="no token counts"):
        report_of(objective, nothing)


def test_no_dtype_is_promoted_by_accident():
    model = replace(TINY, dtype="bfloat16", dropout=0.1)
    batch = jax.tree.map(jnp.asarray, sentences() | {"masked": np.zeros((3, 2), np.int32)})
    run = lambda params, key: model.apply(params, {}, batch, train=True, key=key)[0]  # noqa: E731
    with jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(run, parameters(model), jax.random.key(0))
    assert {name: leaf.dtype for name, leaf in found.items()} == dict.fromkeys(("token", "next"), jnp.float32)


@pytest.mark.slow
@pytest.mark.jax_version
def test_pretraining_steps_lower_the_loss_with_all_options():
    """One batch, dropout, bfloat16 and rematerialisation at once, by plain gradient descent."""
    model = replace(TINY, dropout=0.1, dtype="bfloat16", remat="all")
    params, _ = jax.jit(model.init)(jax.random.key(0, impl="rbg"))
    masked = np.tile(np.array([1, 4, 5]), (3, 1))
    batch = sentences() | {"masked": masked, "next": np.array([0, 1, 0]), "weight": np.ones((3, 3), np.int32)}
    batch |= {"label": np.take_along_axis(batch["token"], masked, 1)}
    objective = Pretraining(TokenClassification(tokens_per_example=3))

    @jax.jit
    def update(params, key):
        def loss(params):
            return objective(model.apply(params, {}, batch, train=True, key=key)[0], batch)["loss"].mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients)

    losses = []
    for key in jax.random.split(jax.random.key(1, impl="rbg"), 20):
        value, params = update(params, key)
        losses.append(float(value))
    assert losses[-1] < 0.6 * losses[0]
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype("float32")}
