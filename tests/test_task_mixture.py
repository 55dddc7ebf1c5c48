"""Mixtures of tasks: the shares of the paper, an order in which nothing is lost or comes early, recipes."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from multipod.data.batches import TrainBatches
from multipod.data.source import identity_of
from multipod.data.task_mixture import MixedRows, TaskMixture, mixing_shares
from multipod.data.tasks import Task
from multipod.data.text.files import TextFiles
from multipod.errors import RecipeError
from multipod.metrics.text_to_text import AsksTasks, TextToText
from multipod.recipe.text import from_text, to_text
from multipod.recipes.find import load
from multipod.recipes.finetune import FineTuning, make_finetuning


def rows_of(examples, **settings):
    """Rows that hold their own number."""
    return MixedRows({"label": np.arange(sum(examples))[:, None]}, examples, **settings)


def test_shares_are_those_of_the_paper():
    # arXiv:1910.10683, section 3.5.2: r_m = min(e_m, K) / sum of min(e_n, K), then to the power 1 / T and renormalised.
    examples, limit = (100_000, 2_000, 500), 4_000
    np.testing.assert_allclose(mixing_shares(examples, limit), np.array([4000, 2000, 500]) / 6500)
    np.testing.assert_allclose(mixing_shares(examples), np.array(examples) / 102_500)
    roots = np.sqrt([4000, 2000, 500])
    np.testing.assert_allclose(mixing_shares(examples, limit, 2.0), roots / roots.sum())
    np.testing.assert_allclose(mixing_shares(examples, limit, 1e9), np.full(3, 1 / 3), rtol=1e-6)


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)


@given(sizes, st.integers(0, 30), st.sampled_from([1.0, 2.0, 7.5]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_each_task_goes_through_all_its_examples_before_any_comes_again(examples, limit, temperature, seed):
    rows = rows_of(examples, limit=limit, temperature=temperature)
    epochs = [rows.epoch_order(seed, epoch, 8) for epoch in range(6)]
    assert {len(order) for order in epochs} == {len(rows)} == {rows.quotas.sum()}
    assert (np.abs(rows.quotas - mixing_shares(examples, limit, temperature) * len(rows)) < 1).all()
    assert rows.quotas.min() >= 1
    if temperature == 1:
        assert rows.quotas.tolist() == [min(count, limit or count) for count in examples]
    read = np.concatenate(epochs)
    firsts = np.cumsum([0, *examples])
    for number, (first, end) in enumerate(itertools.pairwise(firsts)):
        own = read[(read >= first) & (read < end)]
        assert len(own) == 6 * rows.quotas[number]
        for begin in range(0, len(own), end - first):
            one_pass = own[begin : begin + end - first]
            assert len(set(one_pass.tolist())) == len(one_pass)


def test_batches_are_the_same_on_any_number_of_hosts_and_after_a_stop():
    rows = rows_of((50, 7, 3), limit=20)
    whole = TrainBatches(rows, 8, 3, np.arange(8))
    halves = [TrainBatches(rows, 8, 3, np.arange(first, first + 4)) for first in (0, 4)]
    places = range(12)  # three epochs and more: 30 examples each
    told = [whole[place]["label"] for place in places]
    for place in reversed(places):
        again = TrainBatches(rows_of((50, 7, 3), limit=20), 8, 3, np.arange(8))
        np.testing.assert_array_equal(again[place]["label"], told[place])
        np.testing.assert_array_equal(np.concatenate([half[place]["label"] for half in halves]), told[place])
    counts = Counter(np.concatenate(told)[:90, 0].tolist())
    assert sum(counts[n] for n in range(50)) == 60
    assert max(counts[n] for n in range(50)) == 2  # 60 of 50: all once, ten again
    assert {counts[n] for n in range(50, 60)} == {3}
    assert len({identity_of(rows_of((50, 7, 3), limit=limit)) for limit in (0, 20, 21)}) == 3
    tasks = [rows.epoch_order(0, 0, 8) // 50 for _ in range(2)]
    assert tasks[0][:8].sum() not in (0, 8)  # mixed, not one behind the other


@pytest.fixture
def mixture(tmp_path):
    """Twelve short pairs, ten long ones and five in between, of one pre-training."""
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text("one two three four five six\n" * 40)
    text = TextFiles(
        train_files=f"{tmp_path}/text.txt", test_files=f"{tmp_path}/text.txt", length=16, vocab=300, spans=True
    )
    files = []
    for name, count, words in (("short", 12, 1), ("long", 10, 9), ("other/short", 5, 2)):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        pairs = [{"input": f"{name} {n}", "target": "four " * words + str(n)} for n in range(count)]
        path.write_text("\n".join(map(json.dumps, pairs)))
        files.append(str(path))
    return TaskMixture(tuple(Task(file, text) for file in files), limit=6)


def test_rows_of_all_tasks_are_of_one_length_and_know_their_task(mixture):
    train, test = mixture.train(), mixture.test()
    assert (train.examples, len(train), len(test)) == ((9, 8, 4), 6 + 6 + 4, 3 + 2 + 1)
    assert train.arrays["label"].shape[1] == mixture.tasks[1].train().arrays["label"].shape[1]
    shown = train.read(np.array([0, 9, 17]))
    assert shown["task"].tolist() == [0, 1, 2]
    for row, task in enumerate(mixture.tasks):
        alone = task.train().arrays
        for name in ("source", "target", "label", "weight"):
            length = alone[name].shape[1]
            np.testing.assert_array_equal(shown[name][row, :length], alone[name][0])
            assert not shown[name][row, length:].any()
    assert mixture.answer_text(shown["label"][1]) == "four " * 9 + "1"
    assert mixture.decode(shown["label"][0]) == "<299>four 1[END]"
    assert mixture.task_names() == ("short.0", "long", "short.2")
    assert isinstance(mixture, AsksTasks)
    assert isinstance(mixture.tasks[0], AsksTasks)
    assert Task("hub:super/glue-x:train").task_names() == ("glue-x",)


def test_a_fine_tuning_on_several_tasks_is_read_back_from_its_text(mixture):
    before = load("st-moe-small")
    before = replace(before, data=mixture.tasks[0].pretrained, model=replace(before.model, vocab=300))
    files = tuple(task.file for task in mixture.tasks)
    recipe = make_finetuning(before, FineTuning(files, limit=6, metrics=("rouge_l",)))
    assert recipe.data == mixture
    assert recipe.objective == TextToText(metrics=("rouge_l",))
    assert from_text(to_text(recipe)) == recipe


def test_what_is_no_mixture_is_refused(mixture):
    first, second, _ = mixture.tasks
    other = replace(second, pretrained=replace(second.pretrained, length=20))
    with pytest.raises(RecipeError, match=r"task mixture: 2 tasks of 2 pre-trainings. Give one task or more, all of"):
        TaskMixture((first, other))
    with pytest.raises(RecipeError, match=r"task mixture: limit=-1 \(examples; 0: none\), temperature=0.5 \(1 or more"):
        TaskMixture((first,), limit=-1, temperature=0.5)
