"""`multipod plan`: what it prints, writes and refuses; and training by a plan."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from multipod.cli.main import cli
from multipod.cli.train import planned
from multipod.errors import MultipodError, PlanError
from multipod.layout import compiled
from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.plan.machine import find
from multipod.plan.placing import on_machine
from multipod.plan.predict import predict_step
from multipod.plan.saved import SavedPlan, read_plan, write_plan
from multipod.plan.search import largest_batch, of_size, search
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import SHARDED


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command in an empty folder; returns its words in one line, or raises what it raises."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        result = CliRunner().invoke(cli, ["plan", *words, "--cache", "off"], standalone_mode=False)
        if result.exception is not None:
            raise result.exception
        return " ".join(result.output.split())

    return run


def test_a_table_of_layouts_with_parts_and_price(run):
    text = run("resnet50", "--on", "tpu-v3-pod:4x4", "--batch", "4096", "--explain", "1", "--price", "8", "--top", "3")
    assert "resnet50, batch 4,096, on tpu-v3-pod:4x4: 32 devices" in text
    assert "fitted to the steps of MLPerf v0.6" in text
    assert "row-column" in text
    assert "which nothing here needs; wire=bfloat16: -" in text
    assert "gradient sum" in text
    assert "price" in text
    assert "of the peak" in text
    assert "to survive a lost host: 0.14 GiB copied to each host's memory" in text


@pytest.mark.slow
def test_a_hole_a_scale_and_plans(run, tmp_path):
    text = run("ssd", "--on", "tpu-v3-pod:4x4", "--batch", "1024", "--fail", "1-2,2-3", "--save", "a.json")
    assert "with the hole:" in text
    assert "bidirectional-ring, row-column, row-pairs, torus-2d, which need every chip" in text
    scale = ("ssd", "--on", "tpu-v3-pod", "--batch", "1024", "--scale", "4..16", "--draw", "s.svg")
    text = run(*scale, "--updates", "1000")
    assert "100%" in text
    words = {"examples a second", "minutes to the target", "compute"}
    assert {word for word in words if f"<!-- {word} -->" in (tmp_path / "s.svg").read_text()} == words
    run(*scale, "--updates", "1000", "--price", "2")
    assert "<!-- price of the run -->" in (tmp_path / "s.svg").read_text()
    run("ssd", "--on", "tpu-v3-pod:4x4", "--batch", "1024", "--draw", "l.svg", "--top", "2")
    drawn = (tmp_path / "l.svg").read_text()
    assert all(f"<!-- {word} -->" in drawn for word in ("step, ms", "compute", "sums"))
    run("bert", "--on", "tpu-v3-pod:4x4", "--batch", "64", "--updates", "500", "--save", "b.json")
    text = run("compare", "a.json", "b.json")
    assert "step_s" in text
    saved = json.loads((tmp_path / "b.json").read_text())
    assert saved["format"] == "multipod-plan-3"
    assert saved["prediction"]["run_s"] > 500 * saved["prediction"]["step_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnett", "--on", "tpu-v3-pod:2x2"), "nothing to plan is called 'resnett'. Nearest: resnet50"),
        (("resnet50", "--on", "tpu-v3-podd", "--batch", "4"), "no machine 'tpu-v3-podd'. Nearest: tpu-v3-pod"),
        (("resnet50", "--on", "tpu-v3-pod:2x2"), "has no batch of its own. Give --batch"),
        (("resnet50", "--batch", "4"), "there is no machine"),
        (("resnet50", "--on", "mesh:4x4", "--batch", "64"), "says nothing of its chips"),
        (("resnet50", "--on", "tpu-v3-pod:4x4", "--batch", "1"), "fits no layout of tpu-v3-pod:4x4"),
        (("bert", "--on", "tpu-v3-pod:2x2", "--batch", "4096"), "would fit so"),
        (("ssd", "--on", "tpu-v3-pod", "--batch", "64", "--scale", "4-8"), "is no range"),
        (("compare", "a.json"), "compare takes two plans"),
        (("compare", "a.json", "b.json"), "a.json: No such file or directory"),
        (("ssd", "--on", "here:none", "--batch", "64"), "write here, or the number of devices"),
    ],
)
def test_refusals(run, words, message):
    with pytest.raises((MultipodError, Exception)) as refused:
        run(*words)
    assert message in str(getattr(refused.value, "message", refused.value))


def test_plans_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "plan.json"
    machine = find("tpu-v3-pod:4x4")
    layout = on_machine(Layout(split=ModelSplit(model=4), sync=Sync("torus-2d", "zero1")), machine)
    plan = SavedPlan("bert", "tpu-v3-pod:4x4", layout, 64, {"step_s": 1.0})
    write_plan(plan, file)
    assert read_plan(file) == plan
    assert plan.layout.mesh == (4, 2)
    assert set(plan.changes()) == {
        "layout.gradient_sum=torus-2d", "layout.shard_update=true", "batch=64", "layout.model=4", "layout.tile=1x4",
        "layout.mesh=4x2",
    }  # fmt: skip
    split = {"spatial": 1, "model": 4, "expert": 1, "stage": 1}
    choice = {"batch": 64, "split": split, "schedule": "torus-2d", "shard_update": True, "norm_group": 1}
    choice |= {"pipeline": "1f1b", "micro_batches": 0, "chunks": 2, "dtype": ""}
    former = {"format": "multipod-plan-1", "name": "bert", "machine": "tpu-v3-pod:4x4", "choice": choice}
    file.write_text(json.dumps(former | {"mesh": [4, 2], "prediction": {"step_s": 1.0}, "precision": []}))
    assert read_plan(file) == plan
    broken = {"{}": "is no plan", "[": "is no JSON", '{"format": "multipod-plan-1"}': "no whole plan"}
    for text, message in broken.items():
        file.write_text(text)
        with pytest.raises(PlanError, match=message):
            read_plan(file)


def test_the_largest_batch_is_the_largest():
    machine = find("tpu-v3-pod:2x2")
    most = largest_batch(MODELS["bert"], predict_step(MODELS["bert"], SHARDED, 64, machine), machine)
    assert predict_step(MODELS["bert"], SHARDED, most, machine).fits
    assert not predict_step(MODELS["bert"], SHARDED, most + machine.devices, machine).fits


def test_a_search_puts_the_quickest_first():
    found = search(MODELS["transformer"], find("tpu-v3-pod:4x4"), 512)
    steps = [step.step_s for step in found.predictions if step.fits and step.layout.sync.gradient_sum != "xla"]
    assert steps == sorted(steps)
    assert found.tried == len(found.predictions) + len(found.refused)
    assert of_size("tpu-v3-pod", 32).topology.shape == (8, 4)
    assert of_size("tpu-v4-cube", 64).topology.shape == (4, 4, 4)


@pytest.mark.slow
@pytest.mark.skipif(not compiled.has_libtpu(), reason="needs the extra tpu")
def test_xla_beside_the_prediction(run):
    """The real step of a recipe, compiled for a TPU that is not here; and what cannot be compiled."""
    recipe = f"{Path(__file__).parent / 'tiny_recipe.py'}:tiny"
    text = run(recipe, "--on", "tpu-v3-pod:2x2", "--compile", "--top", "1")
    assert "XLA, on a device:" in text
    assert "all-reduce over y, x" in text
    with pytest.raises(PlanError, match="bert is a table of layers, and XLA compiles programs"):
        run("bert", "--on", "tpu-v3-pod:2x2", "--batch", "16", "--compile")
    with pytest.raises(PlanError, match="only TPUs can be compiled for"):
        run(recipe, "--on", "dgx-h100", "--compile")
    with pytest.raises(PlanError, match="XLA compiles for whole machines only"):
        run(recipe, "--on", "tpu-v3-pod:4x4", "--fail", "1,1", "--batch", "120", "--compile")


@pytest.mark.slow
def test_training_by_a_plan_shows_predicted_beside_measured(multipod, tmp_path):
    """A plan for this host, trained for some updates; and a plan that does not belong to the recipe."""
    recipe = f"{Path(__file__).parent / 'tiny_recipe.py'}:tiny"
    changes = ("--set", "updates=4", "--set", "evaluate_every=0")
    done = multipod("plan", recipe, "--on", "here:8", "--save", "p.json", "--cache", "off", *changes)
    assert done.returncode == 0, done.stderr
    words = ("--set", "checkpoint_every=0", "--quiet")
    done = multipod("train", recipe, "--layout", "p.json", *words, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "predicted" in (tmp_path / "run" / "report.html").read_text()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plan"]["machine"] == "here:8"
    with pytest.raises(PlanError, match=r"p\.json is a plan of .*tiny, not of digits"):
        planned(tmp_path / "p.json", "digits", SimpleNamespace(mesh=None))
