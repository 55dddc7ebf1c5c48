"""Every kind of update is lowered for GPUs, which are not here: nothing in it calls code that only CPUs have."""

from dataclasses import replace

import jax
import pytest
from absent_devices import absent_mesh, custom_calls, lowered_text
from layout_recipes import pictures, words
from tiny_recipe import tiny

from multipod.data.clicks.synthetic import Synthetic
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.metrics.sparse import SparseTokens
from multipod.models.dlrm import Dlrm
from multipod.models.st_moe import small_st_moe
from multipod.nn.experts import native
from multipod.nn.experts.routing import Routing
from multipod.nn.images.depthwise import depthwise_convolution
from multipod.recipes.find import load
from multipod.step.program import program_of

ONE, FOUR = Layout((1, 1)), Layout((2, 2))
CLICKS = Synthetic(rows=(5000, 30), examples=192, tests=40)


def perceptron(**sync):
    return replace(tiny(), layout=Layout((2, 2), sync=Sync(**sync)), batch=64)


def experts():
    model = small_st_moe(64, features=16, hidden=16, heads=2, kv=8, layers=1, every=1, routing=Routing(4))
    return replace(words(ONE), model=model, objective=SparseTokens())


def clicks():
    model = Dlrm(rows=CLICKS.rows, bottom=(4,), top=(4,), features=8, tt_rows=1000, tt_rank=2)
    return replace(load("dlrm-small"), data=CLICKS, model=model, layout=ONE, batch=32, evaluation_batch=40)


UPDATES = {
    "zero1": lambda: perceptron(sharding="zero1"),
    "ring": lambda: perceptron(gradient_sum="ring"),
    "adasum": lambda: perceptron(gradient_sum="adasum"),
    "batch norm": lambda: pictures(FOUR),
    "words": lambda: words(Layout((1, 2), split=ModelSplit(model=2))),
    "experts": experts,
    "tables": clicks,
}


def lowered_update(recipe, mesh, platform: str) -> str:
    program = program_of(recipe, mesh)
    batch = program.placement.batches.shapes(program.placement.batches.examples[-1])
    return lowered_text(program.update, platform, program.shapes, batch, program.step.guard.control_shapes())


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_for_gpus_has_no_call_of_ours(name):
    recipe = UPDATES[name]()
    text = lowered_update(recipe, absent_mesh(recipe.layout, "cuda"), "cuda")
    assert "stablehlo" in text
    assert not custom_calls(text)


@pytest.mark.skipif(not native.available(), reason="no compiler for the kernels")
def test_the_same_update_for_cpus_has_them():
    recipe = clicks()
    assert any("multipod" in call for call in custom_calls(lowered_update(recipe, make_mesh(recipe.layout), "cpu")))


@pytest.mark.parametrize(("platform", "grouped"), [("cuda", True), ("cpu", False)])
def test_a_depthwise_convolution_is_xlas_where_there_is_no_cpu(platform, grouped):
    image, kernel = jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"), jax.ShapeDtypeStruct((3, 3, 1, 4), "float32")
    total = lambda x, w: depthwise_convolution(x, w, (1, 1), "SAME", feature_group_count=4).sum()  # noqa: E731
    text = lowered_text(jax.grad(total, (0, 1)), platform, image, kernel)
    assert ("feature_group_count = 4" in text) is grouped
