"""What XLA says of a recipe's step before it is run: how a split changes it, and whether it fits in memory."""

import math
import re
from dataclasses import replace

import jax
import layout_recipes
import pytest

from multipod.errors import LayoutError, PlanError
from multipod.layout.compiled import CompiledFacts, Memory, facts_of
from multipod.layout.hlo import Collective, Product, Text
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync
from multipod.plan.machine import find, here
from multipod.plan.placing import on_machine
from multipod.plan.predict import predict_step
from multipod.plan.saved import SavedPlan
from multipod.plan.tables.published import split_by
from multipod.plan.traced import splits as splits_module
from multipod.plan.traced.program import workload_of
from multipod.plan.traced.splits import Splits, filled
from multipod.recipe.override import override
from multipod.step.fits import refuse_too_large
from multipod.step.program import program_of


@pytest.fixture(scope="module")
def splits():
    return Splits(layout_recipes.words())


def test_a_model_is_split_as_far_as_its_dims_allow(splits):
    assert splits.able == (ModelSplit(model=2), ModelSplit(model=4))  # four heads
    images = (2,), (4,), (8,), (2, 2), (2, 4), (4, 2)
    assert Splits(layout_recipes.pictures()).able == tuple(ModelSplit(spatial=one) for one in images)


@pytest.mark.slow
def test_memory_and_messages_are_those_of_xla(splits):
    split = ModelSplit(model=2)
    recipe = replace(splits.recipe, batch=24, layout=Layout((1, 1), split=ModelSplit(model=2)))
    expected = facts_of(program_of(recipe, make_mesh(recipe.layout)).lowered.compile())
    workload = workload_of(splits.recipe, splits)
    found = predict_step(workload, Layout(split=split, sync=Sync("xla")), 24, here(2, 2))
    assert found.memory.total == pytest.approx(expected.memory.peak, rel=0.05)
    (sums,) = (message for message in workload.build(24, split, 1).messages if message.pattern == "all-reduce")
    sent = sum(one.nbytes * one.times for one in expected.collectives if one.kind == "all-reduce" and one.peers > 1)
    assert sums.nbytes * sums.count == pytest.approx(sent, rel=0.05)


RECORDED = (
    ("all-reduce", ("model",), 12288, 4),
    ("all-reduce", ("model",), 6144, 7),
    ("all-reduce", ("expert",), 24, 1),
    ("all-gather", ("model",), 768, 2),
    ("all-to-all", ("expert",), 8192, 8),
    ("reduce-scatter", ("expert",), 24128, 1),
    ("all-gather", ("expert",), 24128, 1),
)
"""Most of what XLA's program of `moe` sends for 16 examples split by model=2 and expert=2 (jax 0.10.2): (kind, axes,
bytes, times). Compiling it takes 18 s."""
GROUPS = {("model",): ((0, 2), (1, 3)), ("expert",): ((0, 1), (2, 3))}


@pytest.mark.slow
def test_experts_that_model_splits_too(monkeypatch):
    """Tokens travel as in the trace and in XLA's program, the rest as in the program, but for sums of gradients."""
    split, alone = ModelSplit(model=2, expert=2), ModelSplit(expert=2)
    sent = tuple(Collective(kind, n, ("f32",), GROUPS[axes], times) for kind, axes, n, times in RECORDED)
    memory = Memory(111580, 111436, 110040, 558376, 0)
    facts = {
        alone: CompiledFacts(2, 12188690.0, 10289376.0, None, memory, ()),
        split: CompiledFacts(4, 6534315.0, 6830696.0, None, memory, sent),
    }
    monkeypatch.setattr(splits_module, "_facts", lambda recipe, one, count, cache, told: facts[one])
    workload = workload_of(layout_recipes.moe(), Splits(layout_recipes.moe(), experts=(2, 4)))
    assert set(workload.splits) == {
        *(ModelSplit(model=m) for m in (2, 4)),
        *(ModelSplit(expert=e) for e in (2, 4)),
        *(ModelSplit(model=m, expert=e) for m, e in ((2, 2), (2, 4), (4, 2))),
    }
    whole, part = (workload.build(16, one, 1) for one in (alone, split))
    assert part.flops == pytest.approx(whole.flops * 6534315 / 12188690)
    tokens = [message for message in part.messages if message.name == "experts"]
    assert tokens == list(whole.messages)
    assert {(m.pattern, m.nbytes) for m in tokens if m.nbytes > 1024} == {("all-to-all", 8192)}
    assert sum(m.count for m in tokens if m.nbytes > 1024) == 8
    told = {m.pattern: m.nbytes * m.count for m in part.messages if m not in tokens}
    assert told == pytest.approx({"all-reduce": 4 * 12288 + 7 * 6144, "all-gather": 2 * 768})
    laid = replace(layout_recipes.moe(), layout=Layout((1, 1), split=split))
    shapes = jax.tree.leaves(program_of(laid, make_mesh(laid.layout)).shapes.params)
    assert workload.held(split) == sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in shapes)


@pytest.mark.slow
def test_stages_that_model_splits(splits):
    """Weights to the element as a run lays them; operators and messages are the unstaged step's, cut in two."""
    workload, model = workload_of(splits.recipe, splits), 2
    laid = replace(
        splits.recipe,
        batch=96,
        layout=Layout((1, 1), split=ModelSplit(model=model), pipeline=PipelineSplit(2, micro_batches=4)),
    )
    program = program_of(laid, make_mesh(laid.layout))
    split, whole = (workload.cut(24, 2, 1, n) for n in (model, 1))
    shapes = [leaf for leaf in jax.tree.leaves(program.shapes.params) if leaf.ndim]
    held = sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in shapes)
    layout = Layout(split=ModelSplit(model=model), pipeline=PipelineSplit(2, schedule="gpipe", micro_batches=4))
    step = predict_step(workload, layout, 96, here(4, 2))
    assert step.memory.parameters == held
    plan = SavedPlan("words", "here:4", on_machine(layout, here(4, 2)), 96, {})
    changed = override(splits.recipe, plan.changes())
    assert program_of(changed, make_mesh(changed.layout)).rows == 96
    unstaged, alone = workload.build(24, ModelSplit(model=model), 1), workload.build(24, ModelSplit(), 1)
    share = unstaged.flops / alone.flops
    assert 0.5 <= share < 0.8
    for one, other in zip(split, whole, strict=True):
        assert one.whole.flops == pytest.approx(share * other.whole.flops)
    sent = sum(one.count for part in split for one in part.whole.messages)
    assert sent == pytest.approx(sum(one.count for one in unstaged.messages))
    with pytest.raises(PlanError, match=r"stages that model splits have not been compiled\. Plan with --splits"):
        workload_of(splits.recipe).cut(24, 2, 1, model)


@pytest.mark.slow
def test_split_products_fill_less_of_the_matrix_unit(splits):
    """Heads and hidden features of 16 and 32 over two devices, on tiles of 16 x 16: rounded up to the tile."""
    assert filled((Product(64, 16, 32, 10.0), Product(64, 16, 8, 10.0)), 16) == pytest.approx(20 / (10 + 20))
    assert filled((), 16) == filled((Product(64, 3, 5, 1.0),), 1) == 1.0
    workload = workload_of(splits.recipe, splits)
    fills = {}
    for split in (ModelSplit(), ModelSplit(model=2)):
        ops = [op for op in workload.build(24, split, 16).ops if op.kind == "matmul"]
        fills[split] = sum(op.flops for op in ops) / sum(op.flops / op.fill for op in ops)
    assert 0.5 <= fills[ModelSplit(model=2)] / fills[ModelSplit()] < 0.95
    hlo = "HloModule m\n\nENTRY %main (a: f32[4,6,8], b: f32[4,8,10]) -> f32[4,6,10] {\n"
    hlo += "  %a = f32[4,6,8] parameter(0)\n  %b = f32[4,8,10] parameter(1)\n"
    hlo += "  ROOT %d = f32[4,6,10] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
    hlo += "rhs_batch_dims={0}, rhs_contracting_dims={1}\n}\n"
    assert Text(hlo).products == (Product(24 // 4, 8, 10, 2.0 * 4 * 6 * 10 * 8),)


@pytest.mark.slow
def test_a_split_that_was_not_compiled_is_refused():
    workload = workload_of(layout_recipes.words())
    with pytest.raises(PlanError, match="a split of model 2 has not been compiled"):
        predict_step(workload, Layout(split=ModelSplit(model=2), sync=Sync("xla", "zero1")), 16, here(2, 2))


def test_a_plan_with_a_split_says_how_its_tiles_lie():
    machine = find("tpu-v3-pod:4x4")
    plan = SavedPlan("words", "tpu-v3-pod:4x4", on_machine(split_by(model=8), machine), 64, {})
    changes = plan.changes()
    assert {"layout.model=8", "layout.tile=2x4", "layout.mesh=2x2"} <= set(changes)
    assert override(layout_recipes.words(), changes).layout.replica_devices * 4 == machine.devices
    assert on_machine(split_by(model=4), find("tpu-v3-pod:1x1")).mesh == ()


@pytest.mark.slow
def test_an_update_that_does_not_fit_is_refused_with_what_would():
    recipe = layout_recipes.words(Layout((1, 2)))
    program = program_of(recipe, make_mesh(recipe.layout))
    compiled = program.lowered.compile()
    refuse_too_large(program, compiled)  # there is room
    need = facts_of(compiled).memory.temporaries
    with pytest.raises(LayoutError, match="words: an update of 8 rows on each device needs") as told:
        refuse_too_large(program, compiled, need * 5 // 8)
    assert re.search(r"About what would fit: batch=(8|10), or accumulate=2, or more devices.$", str(told.value))
    with pytest.raises(LayoutError, match="would fit: more devices"):
        refuse_too_large(program, compiled, 10)
