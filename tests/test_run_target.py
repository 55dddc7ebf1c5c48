"""Runs that end when an evaluation reaches what the recipe names."""

from dataclasses import replace

import pytest
from tiny_recipe import tiny

from multipod import runs
from multipod.errors import RecipeError
from multipod.recipe.override import override
from multipod.recipe.target import is_reached
from multipod.recipe.text import differences, from_text, to_text


@pytest.mark.parametrize(
    ("target", "values", "reached"),
    [
        ("", {"accuracy": 1.0}, False),
        ("accuracy >= 0.759", {"accuracy": 0.759}, True),
        ("accuracy>=0.759", {"accuracy": 0.7589}, False),
        ("perplexity <= 20", {"perplexity": 19.5}, True),
        ("perplexity <= 20", {"perplexity": float("nan")}, False),
        ("box_AP >= 0.377 and mask_AP >= 0.339", {"box_AP": 0.4, "mask_AP": 0.3}, False),
        ("box_AP >= 0.377 and mask_AP >= 0.339", {"box_AP": 0.4, "mask_AP": 0.34}, True),
        ("auc >= 8.025e-1", {"auc": 0.81, "loss": 0.4}, True),
        ("exact_match/boolq >= 0.8", {"exact_match": 0.9, "exact_match/boolq": 0.7}, False),
    ],
)
def test_a_target_is_reached_by_name_from_above_or_below(target, values, reached):
    assert is_reached(target, values) is reached


def test_a_target_that_cannot_be_meant_is_refused():
    with pytest.raises(RecipeError, match=r"target='accuracy': 'accuracy' is no condition. Write NAME >= NUMBER or"):
        override(tiny(), ["target=accuracy"])
    with pytest.raises(RecipeError, match=r"'loss <= nan' is no condition"):
        override(tiny(), ["target=accuracy>=0.9 and loss <= nan"])
    with pytest.raises(RecipeError, match=r"target='loss <= 1', and evaluate_every=0: .* Give evaluate_every"):
        override(replace(tiny(), evaluate_every=0), ["target=loss <= 1"])
    with pytest.raises(RecipeError, match=r"has no 'bleu'. It has: accuracy, loss. Name one"):
        is_reached("bleu >= 25", {"loss": 1.0, "accuracy": 0.5})


@pytest.mark.slow
def test_a_run_ends_where_its_target_is_reached_and_may_go_on_with_a_higher_one(tmp_path):
    recipe = replace(tiny(), evaluate_every=10, target="accuracy >= 0.3 and loss <= 2.2")
    told = from_text(to_text(recipe)).target
    assert told == recipe.target
    assert differences(to_text(recipe), to_text(replace(recipe, target=""))) == []
    first = runs.train(recipe, out=tmp_path / "run")
    assert (first.ended.update % 10, first.ended.interrupted, first.ended.resume) == (0, False, "")
    assert first.ended.update < recipe.updates
    assert first.values["accuracy"] >= 0.3
    second = runs.train(resume=tmp_path / "run", changes=["target=accuracy >= 0.999"])
    assert second.ended.update == recipe.updates
