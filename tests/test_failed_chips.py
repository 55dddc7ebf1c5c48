"""Training on a mesh with failed chips: the batch is split anew, and what is learnt stays the same."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from processes import clean_environment

from multipod.data.batches import TrainBatches
from multipod.errors import LayoutError, ScheduleError, TopologyError
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_spec, make_mesh, topology_of
from multipod.layout.sync import Sync
from multipod.models.resnet import SmallResNet
from multipod.nn.padding import example_mask, padding_mask
from multipod.recipes.digits import digits
from multipod.runs.request import TrainRequest, relocation_arguments
from multipod.step.program import program_of
from multipod.step.specs import over_data
from multipod.step.sync.reduction import vector_sum
from multipod.train.context import RunContext
from multipod.train.events import Ended, Evaluated, Updated
from multipod.train.loop import train

TINY = f"{Path(__file__).with_name('tiny_recipe.py')}:tiny"
ONE_FAILED = Layout((2, 4), sync=Sync("detour-ring"), failed=((0, 1),))


def short(layout, **fields):
    """A narrow residual network for 30 updates of 128 digits: a batch that does not divide over 7 devices."""
    model = SmallResNet(width=8, blocks=(1,), activation="silu")
    every = {"updates": 30, "evaluate_every": 0, "checkpoint_every": 0}
    return replace(digits(), model=model, layout=layout, **{**every, **fields})


def curve(recipe):
    """The values of each update, those of the evaluation, and the last state."""
    events = []
    state, _ = train(program_of(recipe, make_mesh(recipe.layout)), RunContext(observers=[events.append]))
    updates = [event.values for event in events if isinstance(event, Updated)]
    assert any(isinstance(event, Ended) for event in events)
    return updates, next(event for event in events if isinstance(event, Evaluated)), state


@pytest.fixture(scope="module")
def whole():
    return curve(short(Layout((2, 4), sync=Sync("ordered"))))


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "layout",
    [
        ONE_FAILED,
        Layout((2, 4), sync=Sync("double-tree", sharding="zero1"), failed=((1, 0), (1, 3), (1, 3))),
        Layout((2, 4), sync=Sync("xla"), failed=((0, 0), (1, 0), (0, 1))),
    ],
    ids=["one chip", "two chips, split update", "three chips, no schedule"],
)
def test_the_loss_curve_is_that_of_the_whole_mesh(whole, layout):
    updates, evaluated, state = curve(short(layout))
    assert len(updates) == 30
    for ours, theirs in zip(updates, whole[0], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1 / 128)
    assert evaluated.count == 360
    assert evaluated.values["loss"] == pytest.approx(whole[1].values["loss"], abs=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state.statistics), jax.tree.leaves(whole[2].statistics), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_devices_of_failed_chips_are_no_part_of_the_mesh():
    mesh = make_mesh(ONE_FAILED)
    whole = make_mesh(Layout((2, 4))).devices.ravel().tolist()
    assert dict(mesh.shape) == {"y": 1, "x": 7}
    assert mesh.devices.ravel().tolist() == whole[:1] + whole[2:]
    for layout in (ONE_FAILED, Layout((), sync=Sync("ring"), failed=((0, 1),))):
        chips = topology_of(layout, make_mesh(layout))
        assert (chips.shape, chips.failed_chips, chips.wrap) == ((2, 4), {1}, (False, False))


def test_padding_repeats_the_last_example_and_is_masked():
    source = digits().data.train()
    plain = TrainBatches(source, 128, 3, np.arange(128))[5]
    padded = TrainBatches(source, 128, 3, np.arange(100, 133), padded=True)[5]
    np.testing.assert_array_equal(padded["mask"], np.arange(100, 133) < 128)
    for name, array in plain.items():
        np.testing.assert_array_equal(padded[name][:28], array[100:])
        np.testing.assert_array_equal(padded[name][28:], np.broadcast_to(array[-1], (5, *array.shape[1:])))


def test_a_batch_that_divides_is_not_padded():
    program = program_of(short(ONE_FAILED, batch=126), make_mesh(ONE_FAILED))
    assert (program.rows, program.padded) == (126, False)
    program = program_of(short(ONE_FAILED), make_mesh(ONE_FAILED))
    assert (program.rows, program.padded) == (133, True)


def test_no_row_is_padding_outside_the_mask():
    mask = np.array([True, False])
    with padding_mask(mask):
        assert example_mask() is mask
        with padding_mask(None):
            assert example_mask() is None
    assert example_mask() is None


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (Layout((2, 4), failed=((2, 0),)), TopologyError, r"mesh:2x4 has no chip \(2, 0\)"),
        (Layout((2, 4), failed=((0, 1), (1, 1))), TopologyError, "is cut into 2 parts that cannot reach each other"),
        (Layout((1, 2), failed=((0, 0), (0, 1))), TopologyError, "all 2 chips have failed"),
        (Layout((3, 4), failed=((0, 0),)), LayoutError, "mesh 3x4 needs 12 devices, and there are 8"),
    ],
    ids=["no such chip", "cut", "all", "too large"],
)
def test_a_mesh_that_cannot_be_is_refused(layout, error, message):
    with pytest.raises(error, match=message):
        make_mesh(layout)


def test_an_algorithm_that_needs_every_chip_is_refused_with_those_that_do_not():
    recipe = short(replace(ONE_FAILED, sync=Sync("row-column")))
    with pytest.raises(ScheduleError, match=r"row-column needs every chip .* Use one that does not: detour-ring"):
        _ = program_of(recipe, make_mesh(recipe.layout)).lowered


def test_an_unknown_sum_is_refused_with_the_nearest():
    with pytest.raises(LayoutError, match=r"no sum is called 'double-trees'. Nearest: double-tree"):
        Layout(sync=Sync("double-trees"))


@pytest.mark.parametrize("name", ["detour-ring", "double-tree", "ordered"])
def test_a_layout_sums_over_the_live_chips(name):
    layout = replace(ONE_FAILED, sync=Sync(name))
    mesh = make_mesh(layout)
    values = np.arange(7 * 10, dtype=np.int32).reshape(7, 10)
    total = partial(vector_sum(layout, mesh).all_reduce)
    summed = jax.jit(over_data(lambda v: total(v[0]), mesh, (batch_spec(mesh),), PartitionSpec()))(values)
    np.testing.assert_array_equal(summed, values.sum(0))
    assert set(mesh.axis_names) == set(DATA_AXES)


def run(folder, *words):
    command = [sys.executable, "-m", "multipod", *words]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 130), done.stderr
    return done.stdout


def losses(folder):
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {e["update"]: e["values"]["loss"] for e in events if e["event"] == "updated"}


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_without_a_chip_train_bit_for_bit_like_one_and_a_run_survives_losing_another(tmp_path):
    what = ("--gradient-sum", "tree-packing", "--mesh", "2x4", "--fail", "0,1", "--quiet")
    run(tmp_path, "train", TINY, *what, "--out", "one")
    run(tmp_path, "launch", "--processes", "2", "--", "train", TINY, *what, "--out", "two")
    assert len(losses(tmp_path / "one")) == 60
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    facts = json.loads((tmp_path / "two" / "run.json").read_text())
    assert (facts["chips"], facts["failed"], facts["mesh"]) == ([2, 4], [[0, 1]], {"y": 1, "x": 7})

    run(tmp_path, "train", TINY, *what, "--out", "hurt", "--stop-after", "20")
    run(tmp_path, "train", "--resume", "hurt", "--fail", "0,2", "--gradient-sum", "ring", "--quiet")
    assert json.loads((tmp_path / "hurt" / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "ended"
    hurt, one = losses(tmp_path / "hurt"), losses(tmp_path / "one")
    assert list(hurt) == list(one)
    assert max(abs(hurt[update] - one[update]) for update in one) < 1e-4


def resumed(facts, layout, tmp_path, monkeypatch):
    """What is added to the command that goes on with a run that began as `facts` say."""
    monkeypatch.setattr("multipod.runs.request.open_folder", lambda path: (None, facts))
    return relocation_arguments(TrainRequest(resume=tmp_path), layout)


@pytest.mark.parametrize(
    ("mesh", "failed", "options"),
    [
        ((2, 4), ((0, 1),), ""),
        ((2, 4), ((0, 1), (1, 3)), " --fail 1,3"),
        ((2, 4), (), " --mesh 2x4"),
        ((1, 8), ((0, 1),), " --mesh 1x8 --fail 0,1"),
        ((1, 4), (), " --mesh 1x4"),
    ],
)
def test_the_command_that_goes_on_names_the_chips_that_failed_since(mesh, failed, options, tmp_path, monkeypatch):
    facts = {"chips": [2, 4], "failed": [[0, 1]], "mesh": {"y": 1, "x": 7}}
    assert resumed(facts, Layout(mesh, failed=failed), tmp_path, monkeypatch) == options
