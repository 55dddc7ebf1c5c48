"""Runs as a library: what the command line does is one call from Python, on the same folders."""

import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from processes import clean_environment
from tiny_recipe import tiny

from multipod import runs
from multipod.errors import CheckpointError, RecipeError, RunFolderError
from multipod.models.mlp import Mlp
from multipod.recipes.mlp_small import mlp_small
from multipod.runs.options import RuntimeOptions
from multipod.train.events import Ended, Updated


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["update"]: record["values"]["loss"] for record in records if record["event"] == "updated"}


def same(one, two):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 30 updates that was stopped after 20 and gone on with, and one that was not stopped."""
    base, recipe = tmp_path_factory.mktemp("runs"), replace(tiny(), updates=30, checkpoint_every=10)
    whole = runs.train(recipe, out=base / "whole")
    first = runs.train(recipe, out=base / "halves", stop_after=20)
    return whole, first, runs.train(resume=base / "halves")


def test_a_run_is_stopped_and_gone_on_with_bit_for_bit(stopped):
    whole, first, second = stopped
    assert (first.ended.interrupted, first.ended.update) == (True, 20)
    assert (second.ended.interrupted, second.ended.update) == (False, 30)
    assert first.ended.resume == f"multipod train --resume {first.folder}"
    assert losses(whole.folder) == losses(second.folder)
    assert same(whole.state.params, second.state.params)
    assert whole.values == second.values


def test_a_complete_run_is_told_so_and_nothing_is_touched(stopped, capsys):
    folder = stopped[2].folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again = runs.train(resume=folder)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert (again.ended.update, again.ended.interrupted, int(again.state.update)) == (30, False, 30)
    assert f"{folder} is complete: all of its 30 updates are done" in capsys.readouterr().err


def test_a_complete_run_is_made_longer(stopped, tmp_path):
    folder = tmp_path / "longer"
    shutil.copytree(stopped[0].folder, folder)
    with pytest.raises(RunFolderError, match=r"has done 30 updates, more than updates=12\. Give at least 30"):
        runs.train(resume=folder, changes=["updates=12"])
    result = runs.train(resume=folder, changes=["updates=34"])
    assert (result.ended.update, int(result.state.update)) == (34, 34)
    assert {update: loss for update, loss in losses(folder).items() if update <= 30} == losses(stopped[0].folder)
    assert runs.open(folder).recipe.updates == 34  # so its folder says what it is


def test_a_run_is_opened_at_any_checkpoint_and_evaluated(stopped):
    whole = stopped[0]
    run = runs.open(whole.folder)
    assert same(run.state.params, whole.state.params)
    evaluation = runs.evaluate(run)
    assert (evaluation.update, evaluation.count) == (30, 360)
    assert evaluation.values == pytest.approx(whole.values, rel=1e-6)
    assert runs.evaluate(whole.folder, at=20).update == 20
    assert run.recipe.name == "tiny"
    with pytest.raises(CheckpointError, match=r"has no checkpoint 7. It has: "):
        runs.open(whole.folder, at=7)


@pytest.mark.slow
def test_a_run_is_evaluated_in_any_layout(tmp_path):
    recipe = replace(mlp_small(), model=Mlp(features=8, layers=2), batch=24, updates=3)
    staged = runs.train(recipe, changes=["layout.stage=2"], out=tmp_path / "run")
    whole = runs.open(staged.folder, changes=["layout.stage=1"], options=RuntimeOptions(mesh=(1, 1)))
    assert whole.program.mesh.size == 1
    split = runs.open(staged.folder, changes=["layout.stage=4"])
    assert split.program.mesh.shape["stage"] == 4
    for run in (whole, split):
        assert runs.evaluate(run).values == pytest.approx(staged.values, rel=1e-5)
    assert same(whole.params, split.params)
    with pytest.raises(RecipeError, match=r"batch=5: a run is opened as it was trained"):
        runs.open(staged.folder, changes=["layout.stage=1", "batch=5"])


@pytest.mark.slow
def test_a_recipe_given_as_a_value_is_read_back_from_its_folder(stopped):
    whole = stopped[0]
    facts = json.loads((whole.folder / "run.json").read_text())
    assert facts["recipe_is_value"]
    assert runs.open(whole.folder).recipe.model == tiny().model
    command = [sys.executable, "-m", "multipod", "eval", str(whole.folder)]
    environment = clean_environment() | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert "test examples" in done.stdout, done.stderr


def test_observers_are_told_and_closed_and_no_recipe_is_an_error(tmp_path):
    class Remember(list):
        closed = 0

        def __call__(self, event):
            self.append(event)

        def close(self):
            self.closed += 1

    told = Remember()
    changes = ["updates=3", "evaluate_every=0", "checkpoint_every=0"]
    result = runs.train(
        tiny(), out=tmp_path / "run", changes=changes, log=["csv"], observers=[told, lambda event: None]
    )
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) > 3
    assert [event.update for event in told if isinstance(event, Updated)] == [1, 2, 3]
    assert told[-1] == result.ended
    assert isinstance(told[-1], Ended)
    assert told.closed == 1
    with pytest.raises(RunFolderError, match="is there already"):
        runs.train(tiny(), out=tmp_path / "run")
    with pytest.raises(RunFolderError, match="Did you mean csv"):
        runs.train(tiny(), out=tmp_path / "other", log=["cvs"])
    with pytest.raises(RunFolderError, match="leave out `out`"):
        runs.train(resume=tmp_path / "run", out=tmp_path / "other")
    with pytest.raises(RecipeError, match="no recipe 'digit'"):
        runs.train("digit", out=tmp_path / "other")
    with pytest.raises(RecipeError, match="say which recipe"):
        runs.train(out=tmp_path / "other")
    with pytest.raises(RunFolderError, match="there is no run folder"):
        runs.train(resume=tmp_path / "nothing")


def test_a_run_in_a_thread_handles_no_signals(tmp_path):
    results = []

    def train():
        changes = ["updates=2", "evaluate_every=0", "checkpoint_every=0"]
        results.append(runs.train(tiny(), out=tmp_path / "run", changes=changes))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(200)
    assert results[0].ended.update == 2


def test_a_model_is_exported_and_written(stopped, tmp_path):
    exported = runs.export(stopped[0].folder)
    assert exported.after == pytest.approx(exported.before, abs=1e-5)
    assert exported.same_predictions == 360
    exported.write(tmp_path / "tiny.tflite", examples=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.0.npy", "tiny.tflite"]


def test_names_that_are_not_there_are_refused():
    assert set(runs.__all__) <= {*dir(runs), *runs._PUBLIC}
    assert all(getattr(runs, name) is not None for name in runs.__all__)
    with pytest.raises(AttributeError, match=r"has no 'tran'. It has: .*train"):
        _ = runs.tran
