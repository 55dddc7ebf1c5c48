"""Data, model and objective of every recipe fit together, and what does not is refused before anything is compiled."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from multipod.data.source import ArraySource, GivesIds, examples_of
from multipod.errors import DataError, RecipeError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import PipelineSplit
from multipod.metrics.objective import Classification, TokenClassification
from multipod.metrics.pretraining import Pretraining
from multipod.models.bert import tiny_bert
from multipod.models.mlp import Mlp
from multipod.nn.model import TakesIds
from multipod.pytrees import Batch, IdRange
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipes.find import RECIPES, load
from multipod.step.agreement import refusing_misfits
from multipod.step.checks import check_recipe
from multipod.step.program import program_of


def reads(recipe: Recipe, batch: Mapping[str, Any]) -> None:
    """Traces the model, in evaluation, and the objective on `batch`; compiles nothing."""
    params, statistics = jax.eval_shape(recipe.model.init, jax.random.key(0))

    def forward(params: Any, statistics: Any, batch: Batch) -> Any:
        with refusing_misfits(recipe, recipe.model, batch):
            outputs, _ = recipe.model.apply(params, statistics, batch, train=False, key=jax.random.key(0))
        with refusing_misfits(recipe, recipe.objective, batch):
            return recipe.objective(outputs, batch)

    values = jax.eval_shape(forward, params, statistics, batch)
    assert {value.shape for value in values.values()} == {(4,)}


def example_batch(recipe: Recipe) -> dict[str, np.ndarray]:
    """Four rows as the recipe's data give them, or would where reading takes long or there are no files."""
    if recipe.name.startswith("st-moe"):
        side = np.zeros((4, 32), np.int32)
        return dict.fromkeys(("source", "target", "label", "weight"), side)
    if recipe.name.startswith("stdlib"):
        sides = [("source", 16), ("target", 8)] if recipe.name == "stdlib-docs" else [("token", 16)]
        packed = {
            name: np.zeros((4, length), np.int32)
            for side, length in sides
            for name in (side, *(f"{side}_{kind}".removeprefix("token_") for kind in ("segment", "position")))
        }
        told = dict.fromkeys(("label", "weight", *["masked"] * (len(sides) == 1)), np.zeros((4, 8), np.int32))
        return packed | told
    return {name: np.repeat(array[:1], 4, 0) for name, array in examples_of(recipe.data)[-1].items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_agrees_with_its_data(name: str) -> None:
    """The ids fit, the trace runs through, and without any one entry that is read it is refused by name."""
    recipe = load(name)
    check_recipe(recipe)
    if name in ("mask-rcnn", "resnet50", "ssd", "st-moe-32b", "st-moe-l") or name.startswith("efficientnet"):
        return  # they take long to trace; most are forms of digits, ssd-shapes and st-moe-small
    batch = example_batch(recipe)
    reads(recipe, batch)
    with pytest.raises(RecipeError, match=r"reads batch\['label'\] \(\w+\.py:\d+\), and \w+ gives .*Give data"):
        reads(recipe, {entry: array for entry, array in batch.items() if entry != "label"})


BROKEN = {
    "bert-large": "model.vocab=30000",
    "bert-large-phase1": "model.vocab=30000",
    "digits": "model.classes=9",
    "dlrm-small": "model.rows=120000,50000,19999,1000,200,50,20,8",
    "dlrm-v2-small": "model.rows=120000,50000,19999,1000,200,50,20,8",
    "gnmt": "model.vocab=32000",
    "gnmt-small": "model.vocab=100",
    "mlp-small": "model.classes=4",
    "st-moe-32b": "model.vocab=32000",
    "st-moe-l": "model.vocab=32000",
    "st-moe-small": "data.text.vocab=1500",
    "stdlib-docs": "data.vocab=2048",
    "stdlib-lm": "model.vocab=1000",
    "transformer-big": "model.vocab=32000",
}
"""A change of each recipe whose data say their ids, after which they lie beyond the model's."""


def test_every_recipe_whose_data_say_their_ids_has_a_broken_form() -> None:
    files = {"dlrm-kaggle", "dlrm-mlperf", "dlrm-v2"}  # say them where the files are
    says = {name for name in RECIPES if isinstance(load(name).data, GivesIds)}
    assert says - files == set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_ids_beyond_the_model_are_refused(name: str) -> None:
    recipe = override(load(name), [BROKEN[name]])
    with pytest.raises(
        RecipeError, match=rf"recipe {name}: \w+ and \w+ differ. The data give .* Set model\.\w+=[\d,]+"
    ):
        check_recipe(recipe)


def test_columns_of_ids_are_counted() -> None:
    recipe = override(load("dlrm-small"), ["model.rows=120000,50000"])
    with pytest.raises(RecipeError, match=r"give 8 columns of batch\['ids'\], and the model takes 2. Set model.rows="):
        check_recipe(recipe)


def test_the_message_names_the_entry_both_ranges_and_the_fields() -> None:
    recipe = override(load("stdlib-docs"), ["model.vocab=512"])
    given, taken = recipe.data.ids_given(), recipe.model.ids_taken()  # type: ignore[attr-defined]
    assert isinstance(recipe.model, TakesIds)
    assert (given["source"], taken["source"]) == (IdRange((1024,), "vocab"), IdRange((512,), "vocab"))
    with pytest.raises(RecipeError) as refused:
        check_recipe(recipe)
    assert str(refused.value) == (
        "recipe stdlib-docs: Docstrings and Transformer differ. The data give batch['label'], batch['source'], "
        "batch['target'] ids up to 1,023, and the model takes them up to 511. Set model.vocab=1024, or data.vocab no "
        "larger than the model's."
    )


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, all to be told, as a recipe's data."""

    def train(self) -> ArraySource:
        token = np.ones((8, 16), np.int32)
        return ArraySource({"token": token, "label": token, "weight": token})

    test = train


def small_bert(**changes: Any) -> Recipe:
    layout = replace(load("mlp-small").layout, sync=load("digits").layout.sync)
    spec = replace(load("mlp-small"), data=Rows(), model=tiny_bert(64, 16, **changes), batch=8, layout=layout)
    return replace(spec, objective=TokenClassification())


def test_a_head_that_no_data_feed_is_refused_by_train_before_it_compiles() -> None:
    recipe = replace(small_bert(next_sentence=True), objective=Pretraining())
    with pytest.raises(RecipeError, match=r"Pretraining reads batch\['next'\].* Rows gives label, token, weight\."):
        _ = program_of(recipe, make_mesh(recipe.layout)).lowered


def test_outputs_of_another_kind_are_refused_with_the_line() -> None:
    recipe = small_bert(next_sentence=True)
    with pytest.raises(RecipeError, match=r"TokenClassification does not fit .*objective.py:\d+.*label int32\[1, 16\]"):
        _ = program_of(recipe, make_mesh(recipe.layout)).lowered


def test_images_of_another_size_are_refused() -> None:
    recipe = replace(load("mlp-small"), model=Mlp(inputs=32))
    with pytest.raises(RecipeError, match=r"Mlp does not fit .*\(64,\) and \(32,\)\. Digits gives, on a device, image"):
        _ = program_of(recipe, make_mesh(recipe.layout)).lowered


def test_a_misfit_in_stages_is_refused_alike() -> None:
    layout = Layout(mesh=(1, 2), pipeline=PipelineSplit(stages=2, micro_batches=4))
    recipe = replace(load("mlp-small"), model=Mlp(inputs=32), layout=layout)
    with pytest.raises(RecipeError, match="Mlp does not fit what it is given"):
        _ = program_of(recipe, make_mesh(recipe.layout)).lowered


@dataclass(frozen=True)
class Plain:
    """A model of two functions that also says cut points."""

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        return {"w": jax.random.normal(key, (64, 10))}, {}

    def apply(self, params: Any, statistics: Any, batch: Batch, *, train: bool, key: jax.Array) -> tuple[Any, Any]:
        return batch["image"].reshape(len(batch["image"]), -1) @ params["w"], statistics

    def cut_points(self) -> tuple[()]:
        return ()


def test_cut_points_of_a_plain_model_are_refused() -> None:
    layout = Layout(mesh=(1, 2), pipeline=PipelineSplit(stages=2, micro_batches=4))
    recipe = replace(load("mlp-small"), model=Plain(), objective=Classification(), layout=layout)
    with pytest.raises(RecipeError, match=r"Plain is no FlaxModel, so .*Write it as a FlaxModel"):
        _ = program_of(recipe, make_mesh(recipe.layout)).shapes


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="capacity"):
        override(load("st-moe-small"), [f"model.routing.capacity={text}"])


@pytest.mark.parametrize("change", ["model.width=0", "model.width=-8"])
def test_sizes_of_which_no_model_can_be_made_are_refused(change: str) -> None:
    recipe = override(load("digits"), [change])
    said = (
        rf"no SmallResNet can be made \(resnet.py:\d+\): .* Its fields are .*{change.partition('.')[2]}, .* Change one"
    )
    with pytest.raises(RecipeError, match=said):
        _ = program_of(recipe, make_mesh(recipe.layout)).shapes


def test_a_split_of_the_digits_that_cannot_be_is_refused() -> None:
    with pytest.raises(DataError, match=r"digits: test_share=1.5 \(0.006 to 0.994\), shift=-1 \(0 to 8 pixels\)"):
        override(load("digits"), ["data.test_share=1.5", "data.shift=-1"])
