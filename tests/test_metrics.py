"""Metrics that are sums: classes among the first k, tokens, perplexity; through the step, with padding, and alone."""

import math
import re
import tomllib
from dataclasses import replace

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec
from scipy.special import log_softmax
from sklearn.metrics import accuracy_score, top_k_accuracy_score
from tiny_recipe import tiny

from multipod.errors import MetricError
from multipod.execute.bucketing import all_reduce_tree
from multipod.execute.sums import ordered
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_spec, data_devices, make_mesh
from multipod.metrics.labels import check_labels
from multipod.metrics.objective import Classification, TokenClassification, among_top, masked_sums, means, report_of
from multipod.recipe.text import to_text
from multipod.step.program import program_of
from multipod.step.specs import over_data
from multipod.train.evaluation import evaluate

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.standard_normal((96, 12)).astype(np.float32), RNG.integers(0, 12, 96)
TOKENS = {
    "logits": RNG.standard_normal((16, 5, 30)).astype(np.float32),
    "label": RNG.integers(0, 30, (16, 5)),
    "weight": RNG.random((16, 5)) < 0.4,
}


def over_mesh(objective, outputs, batch, mask):
    """The sums over eight devices, as the step takes them."""
    mesh = make_mesh(Layout((2, 4)))

    def local(outputs, batch, mask):
        return all_reduce_tree(masked_sums(objective(outputs, batch), mask), ordered(DATA_AXES), data_devices(mesh))

    program = jax.jit(over_data(local, mesh, (batch_spec(mesh),) * 3, PartitionSpec()))
    return jax.device_get(program(outputs, batch, mask))


@pytest.mark.jax_version
@pytest.mark.parametrize("real", [96, 61, 1])
def test_accuracies_are_those_of_scikit_learn(real):
    mask = np.arange(96) < real
    sums = over_mesh(Classification(top=(1, 3, 5)), LOGITS, {"label": LABELS}, mask)
    values, classes = means(sums), np.arange(12)
    assert sums["count"] == real
    assert values["accuracy"] == values["top_1_accuracy"] == accuracy_score(LABELS[mask], LOGITS[mask].argmax(1))
    for k in (3, 5):
        expected = top_k_accuracy_score(LABELS[mask], LOGITS[mask], k=k, labels=classes)
        assert values[f"top_{k}_accuracy"] == pytest.approx(expected, abs=1e-15)


@pytest.mark.slow
@given(arrays.arrays(np.int8, (7, 6), elements=st.integers(-2, 2)), st.integers(1, 6))
@settings(deadline=None, max_examples=50)
def test_equal_logits_are_ordered_as_in_top_k(logits, k):
    logits = jnp.asarray(logits, jnp.float32)
    _, chosen = jax.lax.top_k(logits, k)
    for label in range(6):
        labels = jnp.full(7, label)
        np.testing.assert_array_equal(among_top(k, logits, labels), (chosen == label).any(-1))


def test_nan_logits_and_strange_labels_are_not_right():
    logits = jnp.array([[0.0, 1.0], [jnp.nan, 1.0], [jnp.nan, jnp.nan], [0.0, 1.0], [0.0, 1.0]])
    labels = jnp.array([1, 1, 0, 2, -1])
    assert among_top(1, logits, labels).tolist() == [True, False, False, False, False]
    values = Classification(0.1, top=(2,))(logits, {"label": labels})
    assert not values["accuracy"][3:].any()
    assert not values["top_2_accuracy"][3:].any()
    assert means(masked_sums(values, jnp.arange(5) < 1))["loss"] < 1


def test_what_is_masked_gives_no_gradient():
    def loss(logits, objective, labels):
        values = objective(logits, {"label": labels})
        return masked_sums(values, jnp.array([True, False]))["loss"]

    logits = jnp.array([[0.5, 1.0], [2.0, 1.0]])
    for objective, labels in ((Classification(0.1), [1, 7]), (TokenClassification(weight=""), [[1], [7]])):
        shaped = logits.reshape(*np.shape(labels), 2)
        gradient = jax.grad(loss)(shaped, objective, jnp.array(labels))
        assert np.isfinite(gradient).all()
        assert gradient[0].any()
        assert not gradient[1].any()


def test_more_than_the_classes_are_refused():
    with pytest.raises(MetricError, match=re.escape("top_13_accuracy: the model has 12 classes. Give `top` numbers")):
        Classification(top=(13,))(LOGITS, {"label": LABELS})


@pytest.mark.jax_version
@pytest.mark.parametrize("real", [16, 9])
def test_tokens_are_averaged_over_tokens(real):
    mask = np.arange(16) < real
    batch = {name: TOKENS[name] for name in ("label", "weight")}
    objective = TokenClassification()
    values = report_of(objective, over_mesh(objective, TOKENS["logits"], batch, mask))
    right = TOKENS["logits"].argmax(-1) == TOKENS["label"]
    nats = -np.take_along_axis(log_softmax(TOKENS["logits"].astype(float), -1), TOKENS["label"][..., None], -1)[..., 0]
    counts = TOKENS["weight"] & mask[:, None]
    assert set(values) == {"loss", "accuracy", "perplexity"}
    assert values["accuracy"] == accuracy_score(right[counts], np.ones(counts.sum()))
    assert values["perplexity"] == pytest.approx(np.exp(nats[counts].mean()), rel=1e-6)
    own = [nats[i][counts[i]].mean() if counts[i].any() else 0 for i in range(real)]
    assert values["loss"] == pytest.approx(np.mean(own), rel=1e-6)
    same = replace(objective, tokens_per_example=2.0)
    loss = report_of(same, over_mesh(same, TOKENS["logits"], batch, mask))["loss"]
    assert loss == pytest.approx(nats[counts].sum() / 2 / real, rel=1e-6)


def test_even_odds_have_the_perplexity_of_the_vocabulary():
    objective = TokenClassification(weight="")
    sums = masked_sums(objective(jnp.zeros((3, 4, 30)), {"label": jnp.zeros((3, 4), int)}))
    values = report_of(objective, sums)
    assert sums["tokens"] == 12
    assert values["perplexity"] == pytest.approx(30, rel=1e-6)
    assert values["loss"] == pytest.approx(math.log(30), rel=1e-6)


def test_perplexity_of_the_hopeless():
    sums = {"loss": 1.0, "right": 0, "tokens": 1, "count": 1}
    assert TokenClassification().finish({**sums, "nats": 1e6})["perplexity"] == math.inf
    assert math.isnan(TokenClassification().finish({**sums, "nats": math.nan})["perplexity"])


def test_a_strange_token_matters_only_where_it_counts():
    logits, labels = jnp.zeros((2, 2, 5)), jnp.array([[0, 9], [-100, 1]])
    hidden = TokenClassification()(logits, {"label": labels, "weight": jnp.array([[1, 0], [0, 1]])})
    shown = TokenClassification(weight="")(logits, {"label": labels})
    assert np.isfinite(hidden["loss"]).all()
    assert np.isnan(shown["loss"]).all()


def test_nothing_counted_is_refused():
    none = jnp.zeros(96, bool)
    sums = masked_sums(Classification()(jnp.asarray(LOGITS), {"label": jnp.asarray(LABELS)}), none)
    with pytest.raises(MetricError, match="evaluation: no example was counted: the evaluation set is empty, or all"):
        report_of(Classification(), sums)
    sums = {"loss": 0.0, "nats": 0.0, "right": 0, "tokens": 0, "count": 1200}
    text = "evaluation: of 1,200 examples no token counts: batch['weight'] is zero everywhere."
    with pytest.raises(MetricError, match=re.escape(text)):
        report_of(TokenClassification(), sums)


def test_a_recipe_reports_the_first_five():
    recipe = replace(tiny(), objective=Classification(0.1, top=(5,)), layout=Layout((2, 4)), evaluation_batch=100)
    program, test = program_of(recipe, make_mesh(recipe.layout)), recipe.data.test()
    state = program.init()
    sums = evaluate(program, state, test)
    batch = test.read(np.arange(len(test)))
    outputs, _ = recipe.model.apply(jax.device_get(state.params), {}, batch, train=False, key=jax.random.key(0))
    right = top_k_accuracy_score(batch["label"], outputs, k=5, normalize=False, labels=np.arange(10))
    assert sums["top_5_accuracy"] == right
    assert sums["count"] == len(test)
    assert report_of(recipe.objective, sums)["top_5_accuracy"] == right / len(test)
    assert tomllib.loads(to_text(recipe))["objective"]["top"] == [5]


def test_labels_are_checked_where_they_are_read():
    check_labels([[0, 1], [2, 11]], 12)
    check_labels([-1, 3], 4, mask=[False, True])
    check_labels([[-1, -1], [0, 3]], 4, mask=[False, True])
    text = "rank 3: label[1, 0] is 12, the first of 2 outside the 12 classes 0 to 11."
    with pytest.raises(MetricError, match=re.escape(text)):
        check_labels([[0, 1], [12, -1]], 12, rank=3)
    with pytest.raises(
        MetricError, match=re.escape("rank 0: token has dtype float64. Labels are integers from 0 to 4")
    ):
        check_labels([0.5], 5, name="token")
