"""BLEU of counts that were added, against sacreBLEU on the whole text."""

import re

import hypothesis.strategies as st
import pytest
from fake_hosts import on_hosts
from hypothesis import given, settings

from multipod.errors import MetricError
from multipod.metrics.bleu import BleuCounts, bleu, bleu_counts

# sacreBLEU's own example; its README says what it prints.
HYPOTHESES = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
REFERENCES = [
    ["The dog bit the man.", "It was not unexpected.", "The man bit him first."],
    ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."],
]


def test_the_published_example():
    pytest.importorskip("sacrebleu")
    assert bleu(HYPOTHESES, REFERENCES) == pytest.approx(48.53, abs=0.005)
    counts = bleu_counts(HYPOTHESES, REFERENCES)
    assert (counts.length, counts.reference_length, counts.sentences) == (17, 18, 3)
    assert [100 * r / t for r, t in zip(counts.right, counts.total, strict=True)] == pytest.approx(
        [82.4, 50.0, 45.5, 37.5], abs=0.05
    )


words = st.lists(st.sampled_from(["the", "a", "Dog", "cat", "sat.", ".", ",", "3.5", "don't"]), max_size=12).map(
    " ".join
)


@pytest.mark.slow
@given(st.lists(st.tuples(words, words, words, st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_any_split_gives_what_sacrebleu_gives(sentences):
    sacrebleu = pytest.importorskip("sacrebleu")
    sentences = [("a dog sat", "a dog sat down", "dog", 0, True), *sentences]
    kept = [sentence for sentence in sentences if sentence[4]]
    found, first, second, *_ = zip(*kept, strict=True)
    for options in ({}, {"tokenize": "char"}, {"lowercase": True}):
        parts = []
        for host in range(3):
            own = [sentence for sentence in sentences if sentence[3] == host]
            own_found, own_first, own_second, _, mask = zip(*own, strict=True) if own else ((),) * 5
            parts.append(bleu_counts(own_found, [own_first, own_second], mask, **options))
        for smoothing in ("exp", "floor", "add-k", "none"):
            whole = sacrebleu.metrics.BLEU(smooth_method=smoothing, **options).corpus_score(found, [first, second])
            assert sum(parts, BleuCounts()).score(smoothing) == whole.score


def test_every_host_gets_the_score_of_all():
    pytest.importorskip("sacrebleu")

    def work(host):
        own = slice(host.index, None, 4)  # the last host has no sentence
        return bleu(HYPOTHESES[own], [one[own] for one in REFERENCES], hosts=host)

    assert on_hosts(4, work) == [bleu(HYPOTHESES, REFERENCES)] * 4


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(MetricError, match=re.escape("bleu: 3 hypotheses, and references[1] has 2; mask has 1.")):
        bleu_counts(HYPOTHESES, [REFERENCES[0], REFERENCES[1][:2]], mask=[True])
    with pytest.raises(MetricError, match=re.escape("bleu: 3 hypotheses, and no references. Give one each")):
        bleu_counts(HYPOTHESES, [])
    with pytest.raises(MetricError, match="bleu: no sentence was counted: the evaluation set is empty, or all of it"):
        bleu(HYPOTHESES, REFERENCES, mask=[False] * 3)
