"""Recipes read back from their own text, and from texts of older versions."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import optax
import pytest

from multipod.errors import RecipeError
from multipod.layout.layout import Layout
from multipod.metrics.objective import Classification
from multipod.optim.adamw import AdamW
from multipod.optim.lars import Lars
from multipod.optim.optimizer import SparseOptimizer
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.partly import Partly
from multipod.optim.presets import PRESETS, find_preset
from multipod.optim.rates import RATES, Constant, Cosine, Rsqrt, WarmUp
from multipod.optim.sgd import Sgd
from multipod.recipe.override import override
from multipod.recipe.text import differences, from_text, to_text
from multipod.recipes.digits import digits
from multipod.recipes.find import RECIPES, load
from multipod.runs.options import RuntimeOptions
from multipod.runs.recipes import configure_recipe, recorded_changes, recorded_recipe
from multipod.train.run_folder import RunFolder

OLD = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_read_back_from_its_text(name):
    assert from_text(to_text(load(name))) == load(name)


def test_every_preset_is_read_back_from_its_text():
    for name in PRESETS:
        recipe = override(digits(), [f"preset={name}", "batch=4096"])
        assert recipe.optimizer == find_preset(name).at(4096).optimizer
        assert from_text(to_text(recipe)) == recipe, name


def test_every_optimizer_at_every_rate_is_read_back_from_its_text():
    for kind in OPTIMIZERS.values():
        for decay in RATES.values():
            recipe = replace(digits(), optimizer=Partly(kind(WarmUp(decay(0.1), 0.5)), ("all",)))
            assert from_text(to_text(recipe)) == recipe


@dataclass(frozen=True)
class Mine:
    """A user's own optimizer, with fields of every sort."""

    scale: float | None = 2.0
    sizes: tuple[tuple[int, ...], ...] = ((1, 2), (3,))
    loss: object = np.square
    parts: tuple[Classification, ...] = (Classification(), Classification(top=(5,)))
    named: dict[str, float] = field(default_factory=lambda: {"a": 1.0})

    def build(self, updates):
        return optax.sgd(1.0)


def own_function(x):
    """Stands at the top of its module."""
    return x


@dataclass(frozen=True)
class Beside:
    """An objective that holds a function."""

    function: object = own_function

    def __call__(self, outputs, batch):
        return {"loss": outputs}


def test_fields_of_every_sort_are_read_back():
    recipe = replace(digits(), optimizer=Mine(scale=None, loss="square"), objective=Beside())
    assert from_text(to_text(recipe)) == recipe


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[model]", "[model", r"the text of a recipe is no TOML: .* Write one with `multipod show RECIPE`."),
        ("multipod.models.resnet:SmallResNet", "mine:Model", r"model: mine:Model cannot be imported .*PYTHONPATH"),
        (
            "multipod.models.resnet:SmallResNet",
            "multipod.models.resnet:Small",
            r"resnet:Small cannot be imported",
        ),
        ("multipod.data.digits:Digits", "os:system", r"data: os:system is no dataclass"),
        ("batch = 128", 'batch = "128"', r"recipe.batch='128' does not fit: Expected `int`, got `str`"),
        ("batch = 128", "bath = 128", r"Recipe has no field bath. recipe.bath: Nearest: batch"),
        ("batch = 128", "", r"recipe: Recipe needs batch. Write that, too."),
        ("peak = 0.004", "peak = -1.0", r"optimizer.rate=-1.0 must be positive"),
    ],
)
def test_a_text_that_is_no_recipe_is_refused(old, new, message):
    text = to_text(digits())
    assert old in text
    with pytest.raises(RecipeError, match=message):
        from_text(text.replace(old, new))


# Texts of older versions, as their run folders keep them.


@pytest.mark.parametrize("name", ["digits", "dlrm-small", "resnet50", "st-moe-small"])
def test_the_text_of_an_older_version_is_the_same_recipe(name):
    old = (OLD / f"{name}.toml").read_text()
    defaults = ["preset=none", "bad_updates.action=ignore"]  # as they were
    if name == "resnet50":
        defaults.append("model.model.batch_norm_tile=all")
    recipe = override(load(name), defaults)
    assert differences(old, to_text(recipe)) == []
    assert from_text(old) == recipe


@pytest.mark.parametrize(
    ("name", "preset", "batch"), [("lars", "resnet50-lars-scaled", 32768), ("lamb", "bert-lamb", 8192)]
)
def test_the_optimizer_of_an_older_version_is_the_same(name, preset, batch):
    old = (OLD / f"{name}.toml").read_text()
    recipe = replace(digits(), optimizer=find_preset(preset).at(batch).optimizer)
    recipe = override(recipe, ["bad_updates.action=ignore"])
    assert differences(old, to_text(recipe)) == []
    assert from_text(old) == recipe
    faster = override(recipe, ["optimizer.rate=1", "optimizer.warmup=0.5", "optimizer.stacked=layers"])
    names = {line.partition(":")[0] for line in differences(old, to_text(faster))}
    assert names == {"optimizer.stacked", "optimizer.warmup", "optimizer.rate"}


def test_a_run_from_before_presets_goes_on_with_its_numbers(tmp_path):
    """A smaller batch had the updates and the rate for 8,192 then, and keeps them."""
    folder, facts = RunFolder(tmp_path), {"recipe": "resnet50", "overrides": ["batch=4096"]}
    old = (OLD / "resnet50.toml").read_text().replace("\nbatch = 8192", "\nbatch = 4096")
    folder.recipe.write_text(old)
    recipe = configure_recipe(recorded_recipe(folder, facts), recorded_changes(folder, facts), RuntimeOptions())
    assert (recipe.batch, recipe.updates) == (4096, 8764)
    assert differences(old, to_text(recipe)) == []
    folder.recipe.write_text(to_text(override(load("resnet50"), ["batch=4096"])))
    recipe = configure_recipe(recorded_recipe(folder, facts), recorded_changes(folder, facts), RuntimeOptions())
    assert recipe == override(load("resnet50"), ["batch=4096"])
    assert recipe.updates == 2 * 8764


def test_the_targets_of_objectives_are_the_recipes():
    text = to_text(load("mask-rcnn"))
    target = 'target = "box_AP >= 0.377 and mask_AP >= 0.339"\n'
    assert target in text
    old = text.replace(target, "").replace(
        "masks = true\n", "masks = true\ntarget_box_ap = 0.377\ntarget_mask_ap = 0.339\n"
    )
    assert from_text(old) == load("mask-rcnn")
    assert differences(old, text) == []


def test_a_warm_up_of_no_length_is_none():
    old = (OLD / "digits.toml").read_text().replace("warmup = 0.2", "warmup = 0.0")
    assert from_text(old).optimizer.rate == Cosine(4e-3)
    assert differences(old, to_text(override(digits(), ["optimizer.warmup=0"]))) == []


# Flat names, and types that are chosen by name.


@pytest.mark.parametrize(
    ("changes", "optimizer"),
    [
        (["optimizer=sgd"], Sgd(WarmUp(Cosine(4e-3), 0.2), weight_decay=0.02)),
        (["optimizer.rate=0.2", "optimizer.name=lars"], Lars(WarmUp(Cosine(0.2), 0.2), weight_decay=0.02)),
        (["optimizer.trust_coefficient=0.1", "optimizer=lars", "optimizer.decay=constant"],
         Lars(WarmUp(Constant(4e-3), 0.2), weight_decay=0.02, trust_coefficient=0.1)),
        (["optimizer.warmup=0", "optimizer.warmup_updates=7", "optimizer.decay=rsqrt"],
         AdamW(WarmUp(Rsqrt(4e-3), updates=7), weight_decay=0.02)),
        (["optimizer.rate.end=0.1", "optimizer.rate.then.peak=1", "optimizer.rules.skip=a,b", "optimizer.stacked=c"],
         AdamW(WarmUp(Cosine(1.0, end=0.1), 0.2), weight_decay=0.02, rules={"skip": ("a", "b"), "stacked": ("c",)})),
        (["optimizer.momentum=0.5"], AdamW(WarmUp(Cosine(4e-3), 0.2), weight_decay=0.02, beta1=0.5)),
    ],
)  # fmt: skip
def test_flat_names_lead_to_nested_fields(changes, optimizer):
    if isinstance(optimizer, AdamW) and isinstance(optimizer.rules, dict):
        optimizer = replace(optimizer, rules=type(AdamW(Constant(1.0)).rules)(**optimizer.rules))
    assert override(digits(), changes).optimizer == optimizer
    assert override(digits(), changes[::-1]).optimizer == optimizer


def test_a_warm_up_is_put_around_a_rate_that_has_none():
    recipe = replace(digits(), optimizer=Sgd(Constant(0.1)))
    assert override(recipe, ["optimizer.warmup=0.1"]).optimizer.rate == WarmUp(Constant(0.1), 0.1)
    assert override(recipe, ["optimizer.decay=cosine"]).optimizer.rate == Cosine(0.1)


def test_defaults_of_one_optimizer_are_not_carried_into_another():
    assert override(digits(), ["optimizer=lamb"]).optimizer.eps == 1e-6
    assert override(digits(), ["optimizer.eps=1e-4"]).optimizer.eps == 1e-4
    assert override(override(digits(), ["optimizer.eps=1e-4"]), ["optimizer=lamb"]).optimizer.eps == 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.nesterov=false"], r"no field 'optimizer.nesterov'. Nearest: .* optimizer is AdamW."),
        (["optimizer.drops=0.5"], r"no field 'optimizer.drops'. Nearest: .* optimizer.rate is Cosine."),
        (["optimizer=sgd", "optimizer.beta2=0.9"], r"no field 'optimizer.beta2'. Nearest: .* optimizer is Sgd."),
        (["optimizer.decay=cosin"], r"optimizer.decay: none is called 'cosin'. Nearest: cosine"),
        (["optimizer.rate=cosine"], r"optimizer.rate='cosine' does not fit: Expected `float`, got `str`"),
        (["optimizer.rules=a"], r"optimizer.rules is a group of fields. Set one of them: optimizer.rules.skip, "),
    ],
)
def test_a_field_that_the_chosen_type_does_not_have_is_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        override(digits(), changes)


def test_a_type_whose_fields_are_missing_is_refused():
    with pytest.raises(RecipeError, match=r"Lars needs optimizer.rate: set that, too."):
        override(replace(digits(), optimizer=Mine()), ["optimizer=lars"])


def test_the_policy_for_bad_updates_is_set_by_its_former_name_too():
    new, old = (override(digits(), [f"{name}.action=skip"]) for name in ("bad_updates", "trouble"))
    assert new == old != digits()


@dataclass(frozen=True)
class SignSgd(SparseOptimizer):
    """An optimizer that nobody knew before."""

    def step(self, rate):
        return optax.chain(self.add_decay(), optax.scale_by_sign(), optax.scale_by_learning_rate(rate))


def test_an_optimizer_is_added_by_a_class_and_a_line(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sign_sgd", SignSgd)
    recipe = override(digits(), ["optimizer=sign_sgd", "optimizer.warmup=0.5", "optimizer.weight_decay=0"])
    assert recipe.optimizer == SignSgd(WarmUp(Cosine(4e-3), 0.5))
    assert from_text(to_text(recipe)) == recipe


@dataclass(frozen=True)
class Inner:
    """A part that need not be there."""

    stages: int = 1
    chunks: int = 1


@dataclass(frozen=True)
class Outer:
    """A value with a part that need not be there, and a flat name into it."""

    aliases: ClassVar[dict[str, str]] = {"stage": "inner.stages"}
    inner: Inner | None = None
    layout: Layout = field(default_factory=Layout)


def test_a_part_that_is_not_there_begins_with_its_defaults():
    assert override(Outer(), ["stage=4"]) == Outer(Inner(4)) == override(Outer(), ["inner.stages=4"])
    assert override(Outer(Inner(4)), ["inner.chunks=2"]) == Outer(Inner(4, 2))
    assert override(Outer(Inner(4)), ["inner=none"]) == Outer()
