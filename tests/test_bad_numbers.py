"""Numbers that are not finite: a run stops, says whose fault it is, and keeps its good checkpoints."""

import json
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import one_bad_image
import pytest
from one_bad_image import BAD
from processes import clean_environment
from tiny_recipe import Perceptron, tiny

from multipod.data.batches import TrainBatches
from multipod.errors import PoisonedError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.sync import Sync
from multipod.recipe.bad_updates import BadUpdateRules
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.step.program import program_of
from multipod.train.bad_numbers.culprit import BatchEvidence, judge
from multipod.train.bad_numbers.poisoned import means_of_training
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.checkpoints.fitness import FiniteCheck
from multipod.train.context import RunContext, RunInfo
from multipod.train.events import BadUpdate, Ended, SaveFailed
from multipod.train.loop import train


@dataclass(frozen=True)
class Unbounded(Perceptron):
    """The perceptron without its tanh: large weights make larger outputs."""

    def apply(self, params, statistics, batch, *, train, key):
        x = batch["image"].reshape(-1, 64) @ params["in"]
        return x * params["scale"] @ params["out"] + params["bias"], statistics


def poisoned(layout: Layout) -> Recipe:
    return replace(one_bad_image.poisoned(), layout=layout)


def run(recipe: Recipe, folder) -> tuple[Exception | None, list, list[int]]:
    """Trains; returns the error, what observers were told, and which checkpoints are there, all of them finite."""
    told: list = []
    program, error = program_of(recipe, make_mesh(recipe.layout)), None
    with closing(Checkpoints(folder / "checkpoints", recipe.keep_checkpoints)) as store:
        try:
            train(program, RunContext(store, [told.append], info=RunInfo("runs/x")))
        except PoisonedError as caught:
            error = caught
        store.wait()
        saved = store.updates()
        for update in saved:
            state = store.restore(program.shapes, update)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))
    return error, told, saved


def update_with(example: int, recipe: Recipe) -> int:
    """The number of the update that first uses an example."""
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, np.arange(recipe.batch), False)
    return 1 + next(position for position in range(recipe.updates) if example in batches.numbers(position))


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_stop_at_the_update_of_an_image_that_one_of_them_reads(tmp_path):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [
        "train",
        f"{one_bad_image.__file__}:poisoned",
        "--mesh",
        "1x2",
        "--cpu-devices",
        "1",
        "--out",
        "run",
        "--quiet",
    ]
    world = clean_environment() | {"JAX_COORDINATOR_ADDRESS": address, "MULTIPOD_PROCESSES": "2"}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "multipod", *words],
            cwd=tmp_path, env=world | {"MULTIPOD_PROCESS_ID": number}, stderr=subprocess.PIPE, text=True,
        )
        for number in "01"
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[1] for process in both]
    recipe = replace(one_bad_image.poisoned(), layout=Layout((1, 2)))
    bad = update_with(BAD, recipe)
    assert [process.returncode for process in both] == [2, 2], said
    for text in said:
        assert (
            f"multipod: update {bad}: not finite (loss nan, gradient_norm nan). bad batch: example {BAD} (image" in text
        )
        assert "Traceback" not in text
    events = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (event,) = [event for event in events if event["event"] == "troubled"]
    assert (event["update"], event["examples"], event["action"]) == (bad, [BAD], "stop")
    assert (tmp_path / "run" / "checkpoints" / str(bad) / "checksums.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_an_image_that_is_not_finite_ends_the_run_and_is_named(sharding, tmp_path):
    recipe = poisoned(Layout((2, 4), sync=Sync(sharding=sharding)))
    bad = update_with(BAD, recipe)
    error, told, saved = run(recipe, tmp_path)
    (event,) = [event for event in told if isinstance(event, BadUpdate)]
    assert (event.update, event.kind, event.fault, event.examples) == (bad, "not finite", "batch", [BAD])
    assert set(event.tensors) == {"bias", "in", "out", "scale"}
    text = str(error)
    assert text.startswith(f"update {bad}: not finite (loss nan, gradient_norm nan). bad batch: example {BAD} (image")
    assert f"the gradient of {event.tensors[0]} is not finite, and of 3 other tensors. The weights before it" in text
    assert saved[-1] == bad  # the state before it
    assert len(saved) > 1


def test_a_rate_that_is_too_high_is_told_from_a_bad_batch(tmp_path):
    model = replace(tiny(), model=Unbounded(), updates=30, evaluate_every=0, checkpoint_every=1)
    recipe = override(model, ["optimizer=sgd", "optimizer.rate=1e12"])
    error, told, saved = run(recipe, tmp_path)
    (event,) = [event for event in told if isinstance(event, BadUpdate)]
    assert event.fault == "weights"
    assert event.examples == []
    assert "rate too high: " in str(error)
    assert "Its weights are not saved; saved before: " in str(error)
    assert event.update not in saved


@pytest.mark.slow
def test_a_run_may_be_told_to_ignore_it_and_then_saves_nothing_that_is_not_finite(tmp_path):
    recipe = replace(poisoned(Layout((2, 4))), bad_updates=BadUpdateRules("ignore"))
    error, told, saved = run(recipe, tmp_path)
    assert error is None
    assert isinstance(told[-1], Ended)
    bad = update_with(BAD, recipe)
    assert saved == list(range(4, bad, 4))[-recipe.keep_checkpoints :]
    (first, *_) = [event for event in told if isinstance(event, SaveFailed)]
    assert first.reason.startswith(f"not finite after update {first.update}: params/bias, params/in, params/out")


def seen(losses, first, inputs=(), gradients=None) -> BatchEvidence:
    n = len(losses)
    return BatchEvidence(
        np.arange(100, 100 + n),
        np.array(losses, float),
        np.array(first, float),
        {"image": np.isin(np.arange(n), inputs)},
        gradients or {"in": True, "out": False},
        {"in": 3.0, "out": 5e9},
    )


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("evidence", "fault", "examples", "text"),
    [
        (seen([1, 2, NAN, 1], [3, 3, NAN, 3], [2]), "batch", (102,), "bad batch: example 102 (image not finite) of 4"),
        (seen([1, 2, NAN, 1], [3, 3, NAN, 3]), "batch", (102,), "bad batch: example 102 (loss not finite) of 4"),
        (seen([1, NAN, 2, 1], [3, 3, 3, 3]), "batch", (101,), "loss not finite, at these weights alone"),
        (seen([NAN] * 4, [3, 2, 3, 3]), "weights", (), "rate too high: 4 of 4 examples have a higher loss"),
        (seen([9, 8, 9, 1], [2, 2, 2, 2]), "weights", (), "the largest weight is 5e+09, in out"),
        (seen([NAN] * 4, [NAN] * 4), "batch", (100, 101, 102, 103), "bad batch: examples 100 (loss not finite), 101"),
        (seen([1, 1, 1.5, 1], [2, 2, 2, 2]), "batch", (102, 100, 101), "each example's own loss is finite"),
    ],
)
def test_whose_fault_it_is_follows_from_what_was_seen(evidence, fault, examples, text):
    culprit = judge(evidence)
    assert (culprit.fault, culprit.tensors) == (fault, ("out",))
    assert sorted(culprit.examples) == sorted(examples)
    assert text in culprit.text
    assert culprit.text.endswith("; the gradient of out is not finite")


def test_a_program_that_cannot_undo_updates_stops_at_its_loss():
    context = RunContext(SimpleNamespace(wait=lambda: None, updates=lambda: [3, 6, 8]), info=RunInfo("runs/x"))
    sums = {"loss": np.float32(NAN), "count": np.int32(4)}
    with pytest.raises(PoisonedError, match=r"update 9: the loss is not finite: .* --resume runs/x --at 6"):
        means_of_training(context, tiny(), sums, 9)
    ignoring = replace(tiny(), bad_updates=BadUpdateRules("ignore"))
    assert np.isnan(means_of_training(context, ignoring, sums, 9)["loss"])


def test_the_tensors_of_a_state_that_are_not_finite_are_named():
    program = program_of(tiny(), make_mesh(Layout((2, 4))))
    check, state = FiniteCheck(program), program.init()
    assert check(state) == []
    state.params["scale"] = state.params["scale"].at[3].set(np.inf)
    assert check(state) == ["params/scale"]
