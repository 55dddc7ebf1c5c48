"""The area under the ROC curve against scikit-learn and against counting every pair."""

import itertools
import pickle
import re
import subprocess
import sys
from fractions import Fraction

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_hosts import on_hosts
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.metrics import roc_auc_score

from multipod.errors import MetricError, MultipodError
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.metrics import auc, ranking
from multipod.metrics.ranking import area, merge_scores, pack_scores
from multipod.metrics.scores import buffered_auc, local_scores, record_scores, score_buffer
from multipod.step.specs import over_data

EXAMPLES = 150_000  # more than two pieces


def sample(kind: str, examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and scores that know something of them."""
    rng = np.random.default_rng(len(kind))
    labels = rng.random(examples) < 0.3
    logits = rng.standard_normal(examples) + labels
    scores = {
        "logits": logits.astype(np.float32),
        "probabilities": (1 / (1 + np.exp(-logits))).astype(np.float32),
        "double": logits,
        "half": logits.astype(np.float16),
        "bfloat16": np.asarray(jnp.asarray(logits, jnp.bfloat16)),
        "hundred values": np.round(logits, 1).astype(np.float32),
        "two values": (logits > 0).astype(np.float32),
        "one value": np.zeros(examples, np.float32),
        "all below zero": -np.abs(logits).astype(np.float32),
        "integers": np.round(1000 * logits).astype(np.int32),
        "large integers": np.round(1000 * logits).astype(np.int64) * 2**30,
        "bytes": np.clip(logits * 20, -128, 127).astype(np.int8),
        "booleans": logits > 1,
        "tiny": (logits * 1e-42).astype(np.float32),  # subnormal
        "huge": (logits * 1e37).astype(np.float32),
        "sorted": np.sort(logits).astype(np.float32),
    }
    return labels, scores[kind]


KINDS = (
    *("logits", "probabilities", "double", "half", "bfloat16", "hundred values", "two values", "one value"),
    *("all below zero", "integers", "large integers", "bytes", "booleans", "tiny", "huge", "sorted"),
)


def every_pair(labels, scores) -> Fraction:
    """The definition."""
    positives = [score for score, label in zip(scores, labels, strict=True) if label]
    negatives = [score for score, label in zip(scores, labels, strict=True) if not label]
    won = sum(Fraction(int(p > n)) + Fraction(int(p == n), 2) for p, n in itertools.product(positives, negatives))
    return won / (len(positives) * len(negatives))


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_scikit_learn(kind):
    labels, scores = sample(kind)
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores.astype(np.float64)), abs=1e-15)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64, np.float32, jnp.bfloat16])
def test_labels_have_any_dtype(dtype):
    labels, scores = sample("logits", 1000)
    assert auc(labels.astype(dtype), scores) == auc(labels, scores)


values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-149, -(2.0**-149), 2.0**127, np.inf, -np.inf])


@given(st.lists(st.tuples(st.booleans(), st.one_of(values, st.floats(width=32, allow_nan=False))), min_size=2))
@settings(deadline=None)
def test_it_counts_every_pair(examples):
    labels, scores = zip((True, 0.25), (False, 0.25), *examples, strict=True)
    for dtype in (np.float32, np.float64):
        assert auc(labels, np.array(scores, dtype)) == float(every_pair(labels, scores))


@given(
    arrays.arrays(np.int8, st.integers(2, 60), elements=st.integers(-3, 3)),
    st.randoms(use_true_random=False),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_ranks_and_order_do_not_matter(scores, random, ranks):
    labels = np.array([random.random() < 0.5 for _ in scores])
    labels[:2] = True, False
    whole = auc(labels, scores)
    order = random.sample(range(len(scores)), len(scores))
    owner = np.array([random.randrange(ranks) for _ in scores])
    parts = [pack_scores(labels[order][owner == rank], scores[order][owner == rank]) for rank in range(ranks)]
    assert area(merge_scores([pickle.loads(pickle.dumps(part)) for part in parts])) == whole
    assert auc(~labels, -scores) == whole
    assert auc(~labels, scores) == pytest.approx(1 - whole, abs=1e-15)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("distinct", [1, 2, 5, 50, 10**6])
def test_ties_across_pieces(monkeypatch, chunk, distinct):
    rng = np.random.default_rng(chunk)
    labels, scores = rng.random(301) < 0.4, rng.integers(-distinct, distinct, 301).astype(np.float32)
    monkeypatch.setattr(ranking, "CHUNK", chunk)
    assert auc(labels, scores) == float(every_pair(labels, scores))


def test_it_is_exact_where_floats_are_not():
    """All but one pair is won, of more than 2**53 / 1e6: the last bit of the quotient tells."""
    count = 200_000
    labels = np.repeat([False, True], count)
    scores = np.arange(2 * count, dtype=np.float32)
    scores[[count - 1, count]] = scores[[count, count - 1]]
    assert auc(labels, scores) == float(Fraction(count**2 - 1, count**2)) != 1.0


def test_the_mask_hides_padding_and_what_stands_there():
    labels, scores = sample("logits", 1000)
    mask = np.random.default_rng(0).random(1000) < 0.7
    dirty, strange = np.where(mask, scores, np.nan), np.where(mask, labels, 9)
    whole = auc(labels[mask], scores[mask])
    assert auc(strange, dirty, mask) == whole
    assert auc(strange.reshape(20, 50), dirty.reshape(20, 50), mask.reshape(20, 50)) == whole


def test_the_arguments_are_left_alone():
    labels, scores = sample("logits", 1000)
    kept = labels.copy(), scores.copy()
    auc(labels, scores)
    np.testing.assert_array_equal(labels, kept[0])
    np.testing.assert_array_equal(scores, kept[1])
    assert auc(labels[::-2], scores[::-2]) == auc(labels[::-2].copy(), scores[::-2].copy())


def test_bytes_in_the_other_order_are_the_same_numbers():
    labels, scores = sample("logits", 1000)
    assert auc(labels, scores.astype(scores.dtype.newbyteorder())) == auc(labels, scores)


def test_scores_become_keys_of_their_own_size():
    assert pack_scores([0, 1], np.float32([1, 2])).keys.dtype == np.uint32
    assert pack_scores([0, 1], np.float64([1, 2])).keys.dtype == np.uint64
    assert pack_scores(np.zeros(9, bool), np.zeros(9, np.float16)).keys.nbytes == 36


NAN = np.array([[0.5, 0.25, 0.75], [0.5, np.nan, np.nan]], np.float32)
REFUSED = {
    "one class": (([1, 1], [0.5, 0.25]), "auc: all 2 labels are 1, and the area needs examples of both classes"),
    "the other": (([0, 0, 0], [1, 2, 3]), "auc: all 3 labels are 0"),
    "nothing": (([], []), "auc: there are no scores: the evaluation set is empty, or all of it is masked"),
    "all masked": (([0, 1], [1, 2], [False, False]), "auc: there are no scores"),
    "NaN": (
        ([[0, 1, 0], [0, 1, 0]], NAN),
        "auc: scores[1, 1] is NaN, the first of 2 among 6. Find what the model divides by or overflows there",
    ),
    "NaN beside padding": (
        ([[0, 1, 0], [0, 1, 0]], NAN, [[True, True, True], [False, False, True]]),
        "auc: scores[1, 2] is NaN, the first of 1 among 4.",
    ),
    "shapes": (([0, 1], [1.0, 2.0, 3.0]), "auc: shapes differ: labels (2,), scores (3,)."),
    "mask": (([0, 1], [1.0, 2.0], [True]), "auc: shapes differ: labels (2,), scores (2,), mask (1,)."),
    "label": (([0, 1, 2], [1.0, 2.0, 3.0]), "auc: labels[2] is 2, not 0 or 1."),
    "negative label": (([0, -1], [1.0, 2.0]), "auc: labels[1] is -1, not 0 or 1."),
    "soft label": (([0.0, 0.5], [1.0, 2.0]), "auc: labels[1] is 0.5, not 0 or 1."),
    "NaN label": (([0.0, np.nan], [1.0, 2.0]), "auc: labels[1] is nan, not 0 or 1."),
    "integers": (([0, 1], np.array([2**53, 2**53 + 1])), "auc: scores of dtype int64 do not all fit float64"),
    "complex": (([0, 1], np.array([1j, 2])), "auc: scores of dtype complex128 do not all fit float64"),
    "text": (([0, 1], np.array(["a", "b"])), "auc: scores of dtype <U1 do not all fit float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_ranked_is_refused(case):
    given_, text = REFUSED[case]
    with pytest.raises(MetricError, match=re.escape(text)):
        auc(*given_)


def test_ranks_must_score_with_one_dtype():
    with pytest.raises(MetricError, match=re.escape("auc: rank 1 has float32 scores, rank 2 has float64 scores.")):
        merge_scores([pack_scores([], []), pack_scores([0], np.float32([1])), pack_scores([1], np.float64([1]))])
    assert (
        area(merge_scores([pack_scores([], []), pack_scores([0], np.float32([1])), pack_scores([1], np.float32([2]))]))
        == 1.0
    )
    for nothing in ([], [pack_scores([], [])] * 2):
        with pytest.raises(MetricError, match="auc: there are no scores"):
            area(merge_scores(nothing))


def test_every_host_gets_the_area_of_all():
    labels, scores = sample("logits", 1000)
    answers = on_hosts(3, lambda host: auc(labels[host.index :: 3], scores[host.index :: 3], hosts=host))
    assert answers == [auc(labels, scores)] * 3


def test_a_host_that_refuses_is_named_on_all_and_keeps_none_waiting():
    def work(host):
        return auc([0, 1], [0.5, np.nan if host.index else 1.0], hosts=host)

    answers = on_hosts(3, work)
    assert all(isinstance(answer, MultipodError) for answer in answers)
    lines = str(answers[0]).splitlines()
    assert [line.split(" is NaN")[0] for line in lines] == ["rank 1: auc: scores[1]", "rank 2: auc: scores[1]"]


def test_one_class_on_a_host_is_enough():
    answers = on_hosts(2, lambda host: auc([host.index] * 2, [1.0, 2.0 + host.index], hosts=host))
    assert answers == [0.625] * 2


@pytest.mark.jax_version
def test_devices_keep_their_scores_until_the_end():
    steps, rows = 5, 24
    labels, scores = (array[: steps * rows].reshape(steps, rows) for array in sample("logits"))
    mask = np.arange(steps * rows).reshape(steps, rows) < steps * rows - 7
    labels, scores = np.where(mask, labels, 9), np.where(mask, scores, np.nan)
    mesh = make_mesh(Layout((2, 4)))
    columns, row = PartitionSpec(None, DATA_AXES), PartitionSpec(DATA_AXES)
    specs = type(score_buffer(1, 1))(columns, columns, PartitionSpec())
    record = jax.jit(over_data(record_scores, mesh, (specs, row, row, row), specs))
    buffer = jax.device_put(score_buffer(steps, rows), jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    for step in range(steps):
        buffer = record(buffer, scores[step], labels[step], mask[step])
    assert buffer.scores.sharding.spec == columns
    assert len(local_scores(buffer)) == mask.sum()
    assert buffered_auc(buffer) == auc(labels[mask], scores[mask])
    buffer = record(buffer, scores[0], labels[0], mask[0])
    with pytest.raises(MetricError, match="auc: 6 steps were recorded, and there is room for 5"):
        buffered_auc(buffer)


def test_a_strange_label_on_a_device_is_no_label():
    buffer = record_scores(score_buffer(1, 3), jnp.array([0.1, 0.2, 0.3]), jnp.array([0, 1, 256]))
    with pytest.raises(MetricError, match=re.escape("auc: labels[0, 2] is 2, not 0 or 1.")):
        buffered_auc(buffer)
    empty = score_buffer(3, 2)
    with pytest.raises(MetricError, match="auc: there are no scores"):
        buffered_auc(empty)


def test_the_host_part_needs_no_jax():
    modules = "multipod.metrics, multipod.metrics.bleu, multipod.metrics.coco, multipod.metrics.labels"
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
