"""A plan trains as planned: what it holds, what it makes of a recipe, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from click.testing import CliRunner

from multipod.cli.main import cli
from multipod.cli.train import planned_lines
from multipod.errors import PlanError
from multipod.layout.layout import Layout
from multipod.layout.mesh import abstract_mesh
from multipod.layout.sync import Sync
from multipod.plan import pinned
from multipod.plan.machine import find
from multipod.plan.network import group_s
from multipod.plan.pinned import candidate_of, differing, plan_of
from multipod.plan.predict import predict_step
from multipod.plan.saved import read_plan, write_plan
from multipod.plan.search import Every, norm_group, priced, search
from multipod.plan.tables.models import MODELS
from multipod.plan.traced import jaxpr
from multipod.plan.traced.fields import bare, norm_examples_of, norm_fields
from multipod.plan.traced.program import _arguments, workload_of
from multipod.recipe.override import override
from multipod.recipes.find import RECIPES, load
from multipod.runs.options import RuntimeOptions
from multipod.runs.request import TrainRequest, requested_recipe
from multipod.step.program import program_of

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
POD = find("tpu-v3-pod:4x4")


def saved(tmp_path, name, step, machine, recipe, changes=()):
    """A plan as it comes back from its file."""
    plan = plan_of(name, str(machine), step, machine, recipe, changes, recipe.updates)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    return plan


def test_resnet50_trains_as_planned_on_the_multipod(tmp_path):
    """MLPerf v0.7's run: 92 epochs planned, batch norm over 64 examples, so 8 of 8,192 devices, 2 x 2 chips."""
    multipod, table = find("tpu-v3-multipod"), MODELS["resnet50"]
    recipe = override(load("resnet50"), ["batch=65536"])
    group = norm_group(table, multipod, 65536, 1)
    quick = predict_step(table, Layout(sync=Sync("xla", "zero1")), 65536, POD, group)  # the pod's sum is soon priced
    plan = saved(tmp_path, "resnet50", replace(quick, machine=str(multipod)), multipod, recipe)
    trained = requested_recipe(TrainRequest("resnet50", plan=plan), RuntimeOptions())
    assert group == 8
    assert candidate_of(table, trained, multipod).norm_group == 8
    assert (trained.batch, trained.updates, trained.layout.mesh) == (65536, 1817, (32, 256))
    assert trained.model.model.batch_norm_tile == (2, 4)
    assert (trained.model.dtype, trained.model.model.dtype) == ("bfloat16", "bfloat16")
    assert trained.layout.sync == Sync("xla", "zero1")
    assert trained.optimizer == recipe.optimizer
    program = program_of(trained, abstract_mesh(trained.layout))
    assert program.mesh.size == 8192
    rate = program.recipe.optimizer.schedule(program.recipe.updates)
    assert float(rate(645)) == pytest.approx(23.081, rel=1e-4)  # 33 epochs, of the script for 65,536
    assert priced_again(table, trained, POD).step_s == quick.step_s


def priced_again(workload, trained, machine):
    candidate = candidate_of(workload, trained, machine)
    return predict_step(workload, candidate.layout, trained.batch, machine, candidate.norm_group)


@pytest.mark.parametrize("name", RECIPES)
def test_a_plan_read_back_is_a_recipe_of_the_same_price(name, tmp_path, monkeypatch):
    """Every recipe, with the work of a table in place of its own; that its traces are the same is seen in `bare`."""
    monkeypatch.setattr(pinned, "_example", lambda recipe: {})  # most need files that are not here
    changes = [f"batch={min(load(name).batch, 4096)}"]
    recipe = override(load(name), changes)
    norms = {"norm_group_messages": 9 * bool(norm_fields(recipe)), "norm_examples": norm_examples_of(recipe)}
    workload = replace(MODELS["resnet50"], name=name, optimizer="adam", other=None, **norms)
    found = search(workload, POD, recipe.batch)
    for step in (found.best, found.predictions[-1]):
        plan = saved(tmp_path, name, step, POD, recipe)
        trained = override(load(name), plan.changes())
        assert differing(plan, trained) == []
        assert bare(trained) == bare(recipe)
        assert priced_again(workload, trained, POD).step_s == step.step_s


def test_a_plan_holds_what_changes_its_price(tmp_path):
    """The real work of a recipe with batch norm, a split batch and gradients of another type on the wire."""
    changes = ["accumulate=2", "layout.sum_dtype=bfloat16", "layout.bucket_bytes=4000", "model.batch_norm_tile=1x2"]
    changes.append("model.blocks=1")
    recipe = override(load("digits"), changes)
    workload = workload_of(recipe)
    step = priced(workload, candidate_of(workload, recipe, POD), 128, POD, Every(56))
    plan = saved(tmp_path, "digits", step, POD, recipe, changes)
    trained = override(load("digits"), plan.changes())
    assert (trained.accumulate, trained.model.batch_norm_tile) == (2, (1, 2))
    assert trained.layout.sync == step.layout.sync == Sync("ordered", bucket_bytes=4000, sum_dtype="bfloat16")
    assert workload_of(trained).norm_replicas == 2
    again = workload_of(trained)
    assert (
        priced(again, candidate_of(again, trained, POD), 128, POD, Every(trained.evaluate_every)).step_s == step.step_s
    )
    program = program_of(trained, abstract_mesh(trained.layout))
    text = str(jax.make_jaxpr(program.update)(program.shapes, *_arguments(program)))
    assert "axis_index_groups=((0, 1), (2, 3)," in text  # of 32 devices that are not here, two share statistics
    assert differing(plan, override(trained, ["evaluate_every=1", "seed=3"])) == ["evaluate_every: planned 56, now 1"]


def test_batch_norms_sums_are_those_of_the_program():
    """Two moments of each layer, there and back: the messages in the program of two devices."""
    recipe = override(load("digits"), ["model.blocks=1"])
    workload, layout = workload_of(recipe), Layout((1, 2))
    program = program_of(replace(recipe, batch=2, layout=layout), abstract_mesh(layout))
    sent = jaxpr.trace(jax.make_jaxpr(program.update)(program.shapes, *_arguments(program))).sent
    moments = [one for one in sent if one.pattern == "all-gather"]
    assert sum(one.count for one in moments) == workload.norm_group_messages > 0
    gathered = sum(one.nbytes * one.count for one in moments)  # of both devices
    assert gathered / 2 == workload.norm_bytes * workload.norm_group_messages


def test_moving_moments_of_tiles_are_priced():
    """Where batch norm spans a tile, pooled moments of each layer go over all devices once more."""
    recipe = override(load("digits"), ["model.blocks=1", "model.batch_norm_tile=1x2"])
    workload, layout = workload_of(recipe), Layout((1, 4))
    program = program_of(replace(recipe, batch=4, layout=layout), abstract_mesh(layout))
    sent = jaxpr.trace(jax.make_jaxpr(program.update)(program.shapes, *_arguments(program))).sent
    sums, layers = workload.norm_group_messages, workload.norm_group_messages / 2
    assert sum(one.count for one in sent if one.pattern == "all-gather") == sums + layers
    tile, mesh = (dict(predict_step(workload, Layout(), 128, POD, group).parts) for group in (2, POD.devices))
    one_s = group_s(POD, "all-reduce", workload.norm_bytes, POD.devices)
    assert tile["moving moments"] == pytest.approx(layers * one_s)
    assert "moving moments" not in mesh
    each_s = group_s(POD, "all-gather", workload.norm_bytes * POD.devices, POD.devices)
    kept = predict_step(replace(workload, norm_moving="kept"), Layout(), 128, POD, 2)
    assert dict(kept.parts)["moving moments"] == pytest.approx(layers * each_s)


def test_what_differs_from_the_plan_is_refused_all_at_once(tmp_path):
    recipe = load("digits")
    step = predict_step(replace(MODELS["resnet50"], name="digits"), Layout(sync=Sync("ring")), 128, POD, 4)
    plan = saved(tmp_path, "digits", step, POD, recipe)
    changes = ["batch=64", "updates=9", "model.activation=relu", "layout.gradient_sum=xla", "optimizer=lamb", "seed=7"]
    with pytest.raises(PlanError) as refused:
        requested_recipe(TrainRequest("digits", changes, plan=plan), RuntimeOptions())
    text = str(refused.value)
    for line in (
        "batch: planned 128, now 64",
        "updates: planned 336, now 9",
        "model.activation: planned silu, now relu",
        "layout.gradient_sum: planned ring, now xla",
        "optimizer.kind: planned AdamW, now Lamb",
    ):
        assert line in text
    assert "seed" not in text
    assert requested_recipe(TrainRequest("digits", ["seed=7"], plan=plan), RuntimeOptions()).seed == 7
    elsewhere = replace(plan, layout=replace(plan.layout, mesh=()))
    assert requested_recipe(TrainRequest("digits", plan=elsewhere), RuntimeOptions(mesh=(2, 4))).layout.mesh == (2, 4)


def test_a_plan_of_a_former_format_is_silent_about_the_rest(tmp_path):
    layout = {"mesh": [4, 8], "gradient_sum": "torus-2d", "shard_update": True}
    former = {"format": "multipod-plan-2", "name": "digits", "machine": "tpu-v3-pod:4x4", "layout": layout, "batch": 64}
    former |= {"prediction": {"step_s": 1.0}, "dtype": "bfloat16", "precision": ["model.dtype"]}
    (tmp_path / "old.json").write_text(json.dumps(former))
    plan = read_plan(tmp_path / "old.json")
    assert set(plan.changes()) == {
        "batch=64",
        "model.dtype=bfloat16",
        "layout.mesh=4x8",
        "layout.gradient_sum=torus-2d",
        "layout.shard_update=true",
    }
    _, line = planned_lines(plan)
    assert "does not hold batch norm's span, the number of updates" in line
    assert differing(plan, override(load("digits"), ["updates=3"])) == []


OWN = (EXAMPLES / "plain_function.py:recipe", HERE / "own_recipes.py:flax", HERE / "own_recipes.py:plain")


@pytest.mark.parametrize("name", OWN, ids=lambda path: path.name)
def test_a_recipe_of_ones_own_is_planned_and_trained_like_ours(name, tmp_path, monkeypatch):
    """The step is traced, changes count, and the plan in the file trains what was priced."""
    monkeypatch.chdir(tmp_path)
    words = ["plan", str(name), "--on", "tpu-v3-pod:2x2", "--set", "updates=30", "--save", "p.json", "--cache", "off"]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    assert result.exception is None, result.exception
    plan = read_plan(tmp_path / "p.json")
    trained = requested_recipe(TrainRequest(str(name), plan=plan), RuntimeOptions())
    assert trained.updates == plan.prediction["updates"] == 30
    assert plan.fields["example.image"] == "float32[8, 8, 1]"
    machine, workload = find("tpu-v3-pod:2x2"), workload_of(trained)
    assert workload.parameters == sum(leaf.size for leaf in jax.tree.leaves(trained.model.init(jax.random.key(0))[0]))
    assert priced_again(workload, trained, machine).step_s == pytest.approx(plan.prediction["step_s"], rel=1e-12)
    assert plan.prediction["compute_s"] > 0
