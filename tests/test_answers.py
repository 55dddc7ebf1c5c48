"""Metrics of answers: published examples, definitions by hand, scikit-learn; several tasks and hosts."""

import itertools
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from fake_hosts import on_hosts
from hypothesis import given, settings
from sklearn.metrics import f1_score, matthews_corrcoef

from multipod.errors import MetricError
from multipod.metrics.answers import ANSWER_METRICS, common_subsequence, normalize_answer, rouge_l, rouge_n
from multipod.metrics.text_to_text import TextToText

# Lin, 2004, sections 3.1 and 4: one reference and four candidates.
REFERENCE = "police killed the gunman"
KILL, KILLS, FIRST = "police kill the gunman", "the gunman kill police", "the gunman police killed"


def test_the_worked_examples_of_rouge():
    # S2 and S3 share the one bigram "the gunman" of three, and subsequences of three and of two words of four.
    assert rouge_n([KILL], [REFERENCE], n=2) == rouge_n([KILLS], [REFERENCE], n=2) == pytest.approx(1 / 3)
    assert (rouge_l([KILL], [REFERENCE]), rouge_l([KILLS], [REFERENCE])) == (0.75, 0.5)
    assert rouge_l([FIRST], [REFERENCE]) == 0.5  # either "the gunman" or "police killed", as the paper says
    assert rouge_n([FIRST], [REFERENCE], n=2) == pytest.approx(2 / 3)
    assert rouge_l([KILL, KILLS], [REFERENCE, REFERENCE]) == 0.625


def test_rouge_counts_a_repeated_word_as_often_as_both_have_it():
    assert rouge_n(["The, the the CAT"], ["the cat sat on the mat"], n=1) == pytest.approx(2 * 3 / (4 + 6))
    assert rouge_n(["word"], ["word"], n=2) == rouge_l([""], ["word"]) == rouge_l(["..."], ["!"]) == 0
    assert rouge_l(["Don't stop"], ["don t stop"]) == 1


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
@settings(max_examples=100, deadline=None)
def test_the_common_subsequence_is_the_longest_of_all(one, other):
    subsequences = [
        {chosen for size in range(len(text) + 1) for chosen in itertools.combinations(text, size)}
        for text in (one, other)
    ]
    assert common_subsequence(one, other) == max(map(len, subsequences[0] & subsequences[1]))


def test_answers_are_compared_as_squad_does():
    assert normalize_answer("  The  U.S.A., an ally! ") == "usa ally"
    told, wanted = ["the Denver Broncos!", "Gold", "", "Yes", "a"], ["Denver Broncos", "gold  coin", "", "no", "the"]
    assert ANSWER_METRICS["exact_match"](told, wanted) == 3 / 5
    # Words shared: 2 of 2 and 2; 1 of 1 and 2; none where there is none, twice; none where there are some.
    assert ANSWER_METRICS["token_f1"](told, wanted) == pytest.approx((1 + 2 / 3 + 1 + 0 + 1) / 5)
    assert ANSWER_METRICS["answer_accuracy"](["yes ", "Yes"], ["yes", "yes"]) == 0.5


classes = st.lists(st.tuples(st.sampled_from(["yes", "no", "maybe", "what"]), st.sampled_from(["yes", "no", "maybe"])))


@given(classes.filter(bool))
@settings(max_examples=60, deadline=None)
def test_classes_are_judged_as_scikit_learn_judges_them(pairs):
    told, wanted = ([pair[side] for pair in pairs] for side in (0, 1))
    known = sorted(set(wanted))
    numbers = {name: known.index(name) if name in known else -1 for name in {*told, *wanted}}
    expected, found = ([numbers[one] for one in several] for several in (wanted, told))
    correlation = matthews_corrcoef(expected, found) if {*expected, *found} != {0} else 0
    assert ANSWER_METRICS["matthews"](told, wanted) == pytest.approx(correlation)
    each = [f1_score(np.equal(expected, n), np.equal(found, n), zero_division=0) for n in range(len(known))]
    assert ANSWER_METRICS["macro_f1"](told, wanted) == pytest.approx(np.mean(each))


class Letters:
    """Two tasks whose tokens are letters."""

    def answer_text(self, tokens):
        return "".join(map(chr, tokens[tokens > 0]))

    def task_names(self):
        return "first", "second"

    def marks(self):
        return 0, 1


ROWS = [("yes", "yes", 0), ("no", "yes", 0), ("x b", "b c", 1), ("lost", "found", 1), ("no", "no", 0)]


def batch(rows):
    cells = [[[*map(ord, row[side]), *[0] * (8 - len(row[side]))] for row in rows] for side in (0, 1)]
    # The last row fills the batch: it repeats another one and does not count.
    filled = [np.array([*side, [120] * 8]) for side in cells]
    return *filled, np.array([*(row[2] for row in rows), 0]), np.array([True] * len(rows) + [False])


def test_hosts_and_tasks_are_judged_together():
    objective = TextToText(metrics=("answer_accuracy", "token_f1", "macro_f1"))
    wanted = {"answer_accuracy": (2 / 3, 0), "token_f1": (2 / 3, 1 / 4), "macro_f1": ((2 / 3 + 2 / 3) / 2, 0)}

    def work(host):
        own = ROWS[host.index :: 3]
        return objective.judge([batch(own[:1]), batch(own[1:])] if own[1:] else [batch(own)], Letters(), host)

    judged = objective.judge([batch(ROWS)], Letters(), SimpleNamespace(count=1))
    for metric, values in wanted.items():
        assert judged[f"judged/{metric}/first"] == pytest.approx(values[0])
        assert judged[f"judged/{metric}/second"] == pytest.approx(values[1])
        assert judged[f"judged/{metric}"] == pytest.approx(sum(values) / 2)
    assert on_hosts(3, work) == [judged] * 3
    masked = (*batch(ROWS)[:-1], np.zeros(len(ROWS) + 1, bool))
    with pytest.raises(MetricError, match="text-to-text: no answer was counted: all test examples are masked"):
        objective.judge([masked], Letters(), SimpleNamespace(count=1))


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(MetricError, match=r"metrics=f1: no metric of answers is called f1. Name some of answer_acc"):
        TextToText(metrics=("f1",))
    with pytest.raises(MetricError, match=r"beam=0 \(1 or more\), longest=-1 and penalty=0.6"):
        TextToText(beam=0, longest=-1)
    for beam, method in ((1, "generate"), (2, "translate")):
        with pytest.raises(MetricError, match=f"SimpleNamespace has no method `{method}`; int is no task. Take an"):
            TextToText(beam=beam).answer(SimpleNamespace(), {}, {}, {}, 0)
