"""Fine-tuning: files of tasks, the recipe behind `multipod finetune`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from multipod.data.tasks import Task, read_pairs
from multipod.errors import RecipeError
from multipod.optim.adafactor import Adafactor
from multipod.optim.partly import Partly
from multipod.optim.rates import Constant
from multipod.recipe.override import override
from multipod.recipe.text import differences, from_text, to_text
from multipod.recipes.find import load
from multipod.recipes.finetune import FineTuning, make_finetuning
from multipod.runs.recipes import recorded_recipe

PAIRS = [{"input": f"double {n}", "target": str(2 * n)} for n in range(10)]


def written(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_every_wrong_line_is_named(tmp_path):
    path = written(tmp_path / "task.jsonl", [PAIRS[0], "{", [1], {"input": "a"}, "", {"inputs": "a", "target": 3}])
    with pytest.raises(RecipeError) as refused:
        read_pairs(path)
    said = str(refused.value)
    assert "4 of 6 lines are no pairs of texts" in said
    for part in (
        "line 2: no JSON",
        "line 3: a list, not an object",
        "line 4: no text 'target' among input",
        "line 6: no text 'input' and no text 'target' among inputs, target",
        'Write each as {"input": "...", "target": "..."}.',
    ):
        assert part in said
    with pytest.raises(RecipeError, match=r"it has 1 pairs. Give at least two"):
        read_pairs(written(path, PAIRS[:1]))
    with pytest.raises(RecipeError, match=r"none.jsonl: it cannot be read"):
        read_pairs(tmp_path / "none.jsonl")


def test_a_task_has_sentinels_and_a_test_part(tmp_path):
    pytest.importorskip("tokenizers")
    data = load("st-moe-small").data
    data = replace(data, text=replace(data.text, files="email/*.py", vocab=300))
    task = Task(str(written(tmp_path / "task.jsonl", PAIRS)), data)
    assert (len(task.test()), len(task.train())) == (2, 8)
    row = {name: array[0] for name, array in task.train().arrays.items()}
    assert row["label"][0] == data.vocab - 1  # the sentinel begins the target and ends the input
    last = (row["source"] != 0).sum() - 1
    assert row["source"][last - 1 : last + 1].tolist() == [data.vocab - 1, 3]
    assert row["target"].tolist() == [2, *row["label"][:-1]]
    plain = replace(task, sentinels=False).train().arrays
    assert plain["label"].shape[1] == row["label"].shape[0] - 1
    with pytest.raises(RecipeError, match=r"10 of 10 texts 'input' need more than 3 tokens, the longest \d+. Cut them"):
        replace(task, longest=3).train()


def test_the_recipe_of_a_fine_tuning_is_read_back_from_its_text(tmp_path):
    before = override(load("st-moe-small"), ["model.features=32"])
    recipe = make_finetuning(before, FineTuning(str(tmp_path / "t.jsonl"), ("dense", "attention"), 5e-4))
    assert recipe.optimizer == Partly(Adafactor(Constant(5e-4)), ("dense", "attention"))
    assert (recipe.model.features, recipe.model.dropout, recipe.model.expert_dropout) == (32, 0.1, 0.2)
    assert recipe.model.routing.evaluation_capacity == 2.0
    assert from_text(to_text(recipe)) == recipe
    old = (Path(__file__).parent / "recorded" / "finetuned.toml").read_text()
    assert differences(old, to_text(recipe)) == [f"data.file: task.jsonl, now {tmp_path}/t.jsonl"]


def test_a_run_whose_name_held_json_is_known_by_its_text():
    facts = {"recipe": 'finetune:{"recipe": "st-moe-small"}', "overrides": []}
    text = Path(__file__).parent / "recorded" / "finetuned.toml"
    recipe = recorded_recipe(SimpleNamespace(recipe=text), facts)
    assert recipe == from_text(text.read_text())


def test_only_sparse_text_models_are_fine_tuned():
    with pytest.raises(
        RecipeError, match=r"fine-tuning digits: it is a SmallResNet on Digits. Text-to-text tasks need"
    ):
        make_finetuning(load("digits"), FineTuning("t.jsonl"))
