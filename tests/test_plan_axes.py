"""Stages, experts and precision in plans: against closed forms, and against what XLA makes of the same layouts."""

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import jax
import layout_recipes
import pytest

from multipod.errors import MultipodError, PlanError
from multipod.layout.compiled import facts_of
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync
from multipod.models.dlrm_published import MLPERF_V2_HOTS, MLPERF_V2_ROWS
from multipod.models.dlrm_tables import TablePlacement
from multipod.models.mlp import Mlp
from multipod.pipelines.build import PIPELINES
from multipod.pipelines.check import check
from multipod.plan import search as search_module
from multipod.plan.asked import layout_of
from multipod.plan.machine import find, here
from multipod.plan.network import all_reduce_s, all_to_all_s, block, group_s
from multipod.plan.placing import on_machine
from multipod.plan.predict import predict_step
from multipod.plan.price import deepest, schedule_of, work_s
from multipod.plan.saved import SavedPlan
from multipod.plan.search import search
from multipod.plan.tables.layers import AttentionCost
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import SHARDED
from multipod.plan.trace import step_events, write_step_trace
from multipod.plan.traced import jaxpr, program, remembered
from multipod.plan.traced.fields import dtype_fields
from multipod.plan.traced.program import expert_splits, workload_of
from multipod.plan.traced.remembered import remember_traces
from multipod.plan.work import Operation, Work
from multipod.plan.workload import Part, Workload
from multipod.recipe.override import override
from multipod.recipes.digits import digits
from multipod.recipes.find import load
from multipod.step.program import program_of
from multipod.step.staged.program import StagedProgram

QUICK = {"xla_backend_optimization_level": 0}
POD = find("tpu-v3-pod:2x2")


def pipelined(**changes):
    return Layout(pipeline=PipelineSplit(4, **changes)), 64


def even(examples, parts, lanes, model):
    """A model of equal parts, whose backward pass takes twice as long as its forward pass."""
    forward = Work((Operation("matmul", "matmul", 1e12 * examples / parts, 0.0),))
    return (Part(forward, forward.times(3), (), (("x", 1, 1e6 * examples),), 0.0),) * parts


EVEN = Workload("even", 1_000_000, lambda *_: Work(()), cut=even, layers=8)
FREE = POD.calibrated(op_s=0.0, hop_s=0.0, message_s=0.0)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("micro", [4, 8, 32])
def test_the_bubble_is_the_published_one(name, chunks, micro):
    """(P - 1) / (chunks N) of the work: arXiv:1811.06965, and arXiv:2104.04473, section 2.2."""
    step = predict_step(EVEN, *pipelined(schedule=name, micro_batches=micro), FREE)
    assert step.idle_s / step.compute_s == pytest.approx(3 / (chunks * micro))
    assert step.compute_s == pytest.approx(work_s(even(64 / 2, 1, 1, 1)[0].whole, FREE) / 4)


def test_an_asynchronous_pipeline_has_none():
    step = predict_step(EVEN, *pipelined(schedule="pipemare", micro_batches=8), FREE)
    assert step.idle_s == pytest.approx(0, abs=1e-9 * step.compute_s)
    with pytest.raises(PlanError, match="pipemare never drains"):
        list(step_events(step, EVEN, FREE))


def test_1f1b_keeps_as_many_micro_batches_as_stages():
    assert max(deepest(PipelineSplit(4, "gpipe", 16))) == 16
    assert deepest(PipelineSplit(4, "1f1b", 16)) == (4, 3, 2, 1)
    for name in PIPELINES:
        pipeline = PipelineSplit(4, name, 8)
        assert deepest(pipeline) == check(schedule_of(pipeline)).peak_live
    kept = {
        name: predict_step(EVEN, *pipelined(schedule=name, micro_batches=16), FREE).memory.activations
        for name in ("gpipe", "1f1b")
    }
    assert kept == {"gpipe": (16 + 2) * 2e6, "1f1b": (4 + 2) * 2e6}


def test_sends_take_the_way_there_and_back():
    """Each stage but the last waits once for a message forward and once for one back: closed form for N = 1."""
    sends = replace(EVEN, cut=lambda *asked: tuple(replace(part, sent_bytes=1e6) for part in even(*asked)))
    lone = 1e6 / FREE.link_bytes_per_s
    found = dict(predict_step(sends, *pipelined(micro_batches=1), FREE).parts)["between stages"]
    assert found == pytest.approx(2 * 3 * lone)


@pytest.mark.slow
def test_a_pipeline_against_xlas_program():
    """Messages of each tick, weights with their slots, and the store of activations, of the very program."""
    model = Mlp(64, 32, 6, 10)
    recipe = replace(digits(), model=model, batch=64)
    laid = replace(recipe, layout=Layout((1, 1), pipeline=PipelineSplit(2, schedule="1f1b", micro_batches=4)))
    workload = workload_of(recipe)
    assert workload.layers == 8
    step = predict_step(workload, Layout(pipeline=PipelineSplit(2, micro_batches=4), sync=Sync("xla")), 64, here(2, 2))
    facts = facts_of(StagedProgram(laid, make_mesh(laid.layout)).lowered.compile(QUICK))
    first, last = workload.cut(16, 2, 1, 1)
    sent = {one.nbytes for one in facts.collectives if one.kind == "collective-permute"}
    assert sent == {first.sent_bytes}
    assert last.sent_bytes == 0
    assert sum(n * size for part in (first, last) for _, n, size in part.weights) == workload.parameters
    state = step.memory.parameters + step.memory.optimizer
    assert facts.memory.arguments - 64 * 65 * 4 == pytest.approx(state, rel=0.01)  # beside the batch
    assert step.memory.total == pytest.approx(facts.memory.peak, rel=0.2)  # so small a model has as much around it


@pytest.mark.slow
def test_experts_send_what_xlas_program_sends():
    recipe = layout_recipes.moe()
    assert expert_splits(recipe) == (ModelSplit(expert=2), ModelSplit(expert=4))
    workload = workload_of(recipe)
    sent = sum(one.nbytes * one.count for one in workload.build(16, ModelSplit(expert=4), 1).messages)
    laid = replace(recipe, layout=Layout((1, 1), split=ModelSplit(expert=4)))
    program = program_of(laid, make_mesh(laid.layout))
    facts = facts_of(program.lowered.compile(QUICK))
    assert sent == pytest.approx(
        sum(one.nbytes * one.times for one in facts.collectives if one.kind == "all-to-all"), rel=0.05
    )
    # What is split: the experts' kernels, 4 layers of them; all else is whole.
    whole, split = (
        predict_step(workload, Layout(split=one, sync=Sync("xla", "zero1")), 64, here(4, 2))
        for one in (ModelSplit(), ModelSplit(expert=4))
    )
    saved = whole.memory.parameters - split.memory.parameters
    assert saved == pytest.approx(4 * workload.expert_parameters * 3 / 4)
    assert facts.memory.arguments == pytest.approx(3 * split.memory.parameters, rel=0.05)


@pytest.mark.parametrize("place", ["row", "table"])
def test_split_tables_send_what_xlas_program_sends(place):
    recipe = override(load("dlrm-small"), ["model.tt_rows=0", f"model.tables.place={place}", "batch=64"])
    workload, split = workload_of(recipe), ModelSplit(expert=4)
    priced = Counter((m.pattern, m.nbytes) for m in workload.build(64, split, 1).messages)
    laid = replace(recipe, layout=Layout((1, 1), split=ModelSplit(expert=4)))
    program = program_of(laid, make_mesh(laid.layout))
    sent = Counter((one.kind, one.nbytes) for one in facts_of(program.lowered.compile(QUICK)).collectives)
    shapes = jax.tree.leaves(program.shapes.params)  # whole tables have the room of the largest in each part
    assert workload.held(split) == sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in shapes)
    assert len(priced) == (3 if place == "row" else 2)  # ids; vectors there, and their gradients back
    assert priced <= sent
    # All else is the gradient sum of what is whole on every device, and the sums of values: a few floats.
    leaves = jax.tree_util.tree_flatten_with_path(program.shapes.params)[0]
    whole = 4 * sum(leaf.size for path, leaf in leaves if not path[0].key.startswith("tables"))
    others = {(kind, nbytes) for kind, nbytes in sent - priced if nbytes > 32}
    assert others == {(kind, whole + -whole % 16) for kind in ("reduce-scatter", "all-gather")}  # four shares of floats


@pytest.mark.slow
def test_bags_send_their_ids_and_are_planned_without_files():
    """MLPerf's DLRM-DCNv2 at its batch on 64 chips: the ids of large tables, beside the vectors that they send."""
    recipe, split, batch = load("dlrm-v2"), ModelSplit(expert=64), 65_536
    bags = replace(recipe, model=replace(recipe.model, tables=TablePlacement("auto", parts=64)))
    single = replace(bags, model=replace(bags.model, hots=()), data=bags.data.clicks)
    large = {f: hot for f, hot in enumerate(MLPERF_V2_HOTS) if 512 * MLPERF_V2_ROWS[f] > 4 << 20}
    assert (len(large), sum(large.values())) == (13, 191)
    for each, ids in ((bags, 191), (single, 13)):
        sent = [message.nbytes for message in workload_of(each).build(batch, split, 1).messages]
        vectors = 4 * 128 * 13 * batch
        assert sorted(sent) == [4 * ids * batch, vectors, vectors]
    workload = workload_of(bags)
    assert workload.parameters == pytest.approx(128 * sum(MLPERF_V2_ROWS) + 16_044_545, rel=1e-6)  # and room to divide
    split_rows = sum(MLPERF_V2_ROWS[f] for f in large)
    whole = workload.parameters - 128 * split_rows
    assert workload.held(split) == pytest.approx(whole + 128 * split_rows / 64, rel=1e-4)


@pytest.mark.parametrize(("model", "published"), [(8, 59.25), (1, None)])
def test_what_a_transformer_keeps(model, published):
    """s b h (10 + 24 / t + 5 a s / (h t)) a layer, arXiv:2205.05198, equation 2; 59.25 GiB in its figure 1 (22B)."""
    s, b, h, a, layers = 2048, 4, 6144, 64, 48
    kept = layers * AttentionCost(h, 4 * h, a, model).work(b, s, [s]).activation_bytes
    assert kept == pytest.approx(layers * s * b * h * (10 + 24 / model + 5 * a * s / (h * model)))
    assert published is None or kept / 2**30 == pytest.approx(published, rel=0.01)


def test_an_all_to_all_crosses_the_middle():
    machine = find("tpu-v4-cube:2x2x2").calibrated(link=1.0, hop_s=0.0, message_s=0.0)
    line, square = (replace(block(4, machine.topology), shape=shape) for shape in ((1, 4), (2, 2)))
    took = all_to_all_s(machine, line, 8e6)  # two chips' halves cross one link
    assert took == pytest.approx(8e6 / machine.link_bytes_per_s)
    assert all_to_all_s(machine, square, 8e6) == pytest.approx(took / 2)


def test_a_box_of_gpus_talks_over_its_own_switch():
    """The cards of a box count only where there are several: NVSwitch carries 300 GB/s, a card 25."""
    box, boxes = (find(name).calibrated(link=1.0, hop_s=0.0, message_s=0.0) for name in ("dgx-a100:1", "dgx-a100:4"))
    assert (box.link_bytes_per_s, boxes.link_bytes_per_s) == (300e9, 25e9)
    ring = 2 * 7 / 8 * 8e9 / 300e9
    assert all_reduce_s(box, "ring", 8e9) == pytest.approx(ring)
    for machine in (box, boxes):
        assert group_s(machine, "all-reduce", 8e9, 8) == pytest.approx(ring, rel=0.2)
        assert group_s(machine, "all-to-all", 8e9, 8) == pytest.approx(7 / 8 * 8e9 / 300e9)
    # Two boxes: an eighth of the vector crosses each card, there and back, while NVSwitch carries the rest.
    assert group_s(boxes, "all-reduce", 8e9, 16) == pytest.approx(max(ring, 2 * 1 / 2 * 1e9 / 25e9))
    whole = Layout(split=ModelSplit(model=8), sync=Sync("ring"))
    assert "gradient sum" not in dict(predict_step(MODELS["bert"], whole, 4, box).parts)


@pytest.mark.slow
def test_layouts_of_a_plan_are_layouts_of_a_run():
    """What a saved plan changes in the recipe makes a program; nothing is compiled."""
    for recipe, layout in (
        (layout_recipes.words(), Layout(pipeline=PipelineSplit(2, "gpipe", 4))),
        (layout_recipes.moe(), Layout(split=ModelSplit(expert=4), sync=Sync(sharding="zero1"))),
        (layout_recipes.moe(), Layout(split=ModelSplit(expert=2, model=2), sync=Sync("ring", "fsdp"))),
        (layout_recipes.pictures(), Layout(split=ModelSplit(spatial=(2, 2)), sync=Sync("ring", "zero1"))),
        (layout_recipes.words(), Layout(sync=Sync("ring", "fsdp", "bfloat16", "bfloat16", 1_000_000))),
    ):
        machine = here(8, 2)
        predict_step(replace(workload_of(recipe), build=lambda *_: Work(())), layout, 64, machine)
        plan = SavedPlan("x", "here:8", on_machine(layout, machine), 64, {})
        changed = override(recipe, plan.changes())
        assert changed.layout == plan.layout
        assert changed.layout.mesh_shape(8) == plan.layout.mesh
        assert program_of(changed, make_mesh(changed.layout)).rows == 64


def test_larger_replicas_are_tried_where_nothing_else_fits(monkeypatch):
    """Weights of 18 GB a device at 16 ways fit no core of a TPU v3; split over 8 x 4 they do."""
    monkeypatch.setattr(search_module, "schedules", lambda topology: ("torus-2d",))
    huge = replace(MODELS["bert"], parameters=4e10, cut=lambda *a: tuple(map(heavier, MODELS["bert"].cut(*a))))
    found = search(huge, find("tpu-v3-pod:4x4"), 32)
    assert found.best.layout.replica_sizes == {"stage": 4, "model": 8}
    assert found.tried == len(found.predictions) + len(found.refused)
    small = search(MODELS["bert"], POD, 64)
    assert max(step.layout.replica_devices for step in small.predictions) <= 16
    assert "replicas of more than 16 devices, which nothing here needs" in small.left_out


def heavier(part):
    return replace(part, weights=tuple((shape, n, 50 * size) for shape, n, size in part.weights))


@pytest.mark.slow
def test_products_of_another_type_move_half_the_bytes():
    recipe = layout_recipes.words()
    workload = workload_of(recipe)
    assert (workload.dtypes, dtype_fields(recipe)) == (("float32", "bfloat16"), ("model.dtype",))
    ops = {one: workload.of(one).build(16, ModelSplit(), 1).ops for one in workload.dtypes}
    moved = {one: sum(op.nbytes for op in ops[one] if op.kind == "matmul") for one in ops}
    assert moved["bfloat16"] == pytest.approx(moved["float32"] / 2, rel=0.25)  # logits stay float32
    with pytest.raises(PlanError, match="bert is known with products of bfloat16 only"):
        MODELS["bert"].of("float32")
    with pytest.raises(PlanError, match="a host multiplies in float32"):
        predict_step(workload, SHARDED, 16, here(2, 2), dtype="bfloat16")
    found = search(workload, find("tpu-v3-pod:1x1"), 64, dtypes=("", "bfloat16"))
    assert {step.dtype for step in found.predictions} == {"", "bfloat16"}
    assert "pipelines that never drain (they learn something else)" in found.left_out


@pytest.mark.parametrize(
    ("text", "batch", "message"),
    [
        ("stage=4,update", 64, "a stage updates its own weights, which is a share already"),
        ("stage=2,spatial=2", 64, "inside a stage only model splits anything"),
        ("stage=2", 66, "a batch of 66 does not divide over 4 pipelines. Take 68"),
        ("stage=8,schedule=interleaved,chunks=4", 64, "into 26 at most"),
        ("stage=2,micro=5", 64, "5 micro-batches do not divide the 16 rows"),
        ("sum=adasum", 64, "sum=adasum combines and does not sum, which has no price"),
    ],
)
def test_layouts_that_have_no_price(text, batch, message):
    with pytest.raises(MultipodError, match=message):
        predict_step(MODELS["bert"], layout_of(text), batch, POD)
    with pytest.raises(PlanError, match="it does not say its layers"):
        predict_step(MODELS["resnet50"], Layout(pipeline=PipelineSplit(2), sync=Sync("xla")), 64, POD)


@pytest.mark.parametrize(
    ("model", "priced"),
    [
        ("bert", (SHARDED, 64)),
        ("bert", (Layout(split=ModelSplit(model=4), sync=Sync("torus-2d", "zero1")), 64)),
        ("bert", (Layout(pipeline=PipelineSplit(4), sync=Sync("torus-2d")), 64)),
        ("transformer", (Layout(split=ModelSplit(model=2), pipeline=PipelineSplit(2), sync=Sync("torus-2d")), 64)),
        ("ssd", (Layout(split=ModelSplit(spatial=(4,)), sync=Sync("torus-2d", "zero1")), 64, 8)),
    ],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_steps_trace_is_in_the_format_and_as_long_as_the_step(model, priced, overlaps, tmp_path):
    """Names, then complete events; on each track one after the other (Trace Event Format, Duca and Sinclair, 2016)."""
    machine = replace(POD, overlaps=overlaps, host_examples_per_s=1e3)
    layout, batch, *group = priced
    step = predict_step(MODELS[model], layout, batch, machine, *group)
    write_step_trace(step, MODELS[model], machine, tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert data["displayTimeUnit"] in ("ms", "ns")
    assert all(event["ph"] == "M" and event["args"] for event in data["traceEvents"] if event not in events)
    tracks = {}
    for event in events:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert event["dur"] >= 0 <= event["ts"]
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len({pid for pid, _ in tracks}) == layout.stages
    for track in map(sorted, tracks.values()):
        assert all(after[0] >= before[1] - 2e-3 for before, after in pairwise(track))
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1e6 * step.step_s, rel=1e-6)


def test_a_second_plan_traces_nothing(tmp_path, monkeypatch):
    """Traces come back from files as they were; another recipe, or another source, has other files."""
    recipe = layout_recipes.words()
    # Its own answer may be None here: other tests load recipes from files that are gone by now.
    monkeypatch.setattr(remembered, "_code", lambda: "as it was")
    remember_traces(tmp_path)
    try:
        made = program._traced.__wrapped__(recipe, 2, 1), program._parts.__wrapped__(recipe, None, 2, 2, 1, 1)
        assert len(list(tmp_path.glob("*.json"))) == 2
        monkeypatch.setattr(jaxpr, "trace", None)  # whoever traces fails
        assert (program._traced.__wrapped__(recipe, 2, 1), program._parts.__wrapped__(recipe, None, 2, 2, 1, 1)) == made
        monkeypatch.setattr(remembered, "_code", lambda: "edited")
        with pytest.raises(PlanError, match="cannot be traced"):
            program._traced.__wrapped__(recipe, 2, 1)
    finally:
        remember_traces(None)


@pytest.mark.slow
def test_fully_sharded_weights_are_kept_in_shares_and_gathered_twice():
    """Memory against XLA's program; on the wire half an all-reduce of gradients and two of weights, of their types."""
    recipe = layout_recipes.words()
    whole, sharded = (Layout((1, 4), sync=Sync("xla", sharding)) for sharding in ("none", "fsdp"))
    workload, machine = workload_of(recipe), here(4, 2)
    priced = {laid: predict_step(workload, laid, 64, machine) for laid in (whole, sharded)}
    held = {}
    for laid in priced:
        program = program_of(replace(recipe, batch=64, layout=laid), make_mesh(laid))
        held[laid] = sum(
            leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(program.shapes)
        )
        state = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves((program.shapes.params, program.shapes.optimizer))
        )
        memory = priced[laid].memory
        assert memory.parameters + memory.optimizer == pytest.approx(state, rel=0.1)
    assert held[sharded] > held[whole] == 0
    pod, bert = find("tpu-v3-pod:4x4").calibrated(message_s=0.0, hop_s=0.0), MODELS["bert"]
    plain, gathered, half = (
        predict_step(bert, layout_of(text), 512, pod).gradient_sum_s
        for text in ("sum=torus-2d", "sum=torus-2d,fsdp", "sum=torus-2d,fsdp,gather=bfloat16,wire=bfloat16")
    )
    assert gathered == pytest.approx(plain / 2 * (1 + 2 * 4 / bert.wire_bytes))
    assert half == pytest.approx(3 / 2 * plain * 2 / bert.wire_bytes)


def test_fsdp_is_found_where_nothing_else_fits(monkeypatch):
    """A model whose state fits a device in shares alone, and which no axis splits."""
    monkeypatch.setattr(search_module, "schedules", lambda topology: ("torus-2d",))
    large = replace(MODELS["bert"], parameters=4e9, axes=(), cut=None, layers=26)
    found = search(large, find("tpu-v3-pod:4x4"), 64)
    assert found.best.layout.sync.fsdp
    assert not any(step.fits for step in found.predictions if not step.layout.sync.fsdp)
