"""Runs that begin with other libraries' weights and give them theirs, on the hub, and read by Orbax alone."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from processes import clean_environment

from multipod import runs
from multipod.cli.main import cli
from multipod.data.clicks.synthetic import Synthetic
from multipod.errors import WeightsError
from multipod.interop.weights.convert import to_theirs
from multipod.interop.weights.families import family_of
from multipod.interop.weights.files import read_weights, write_weights
from multipod.models.dlrm import Dlrm
from multipod.models.pixels import Normalized, behind_pixels
from multipod.models.resnet import ResNet
from multipod.optim.ema import Ema
from multipod.recipes.digits import digits
from multipod.recipes.dlrm_small import dlrm_small
from multipod.recipes.find import find
from multipod.runs.options import RuntimeOptions

pytest.importorskip("safetensors")
DATA = Synthetic(rows=(40, 8, 5), examples=256, tests=64)
MODEL = Dlrm(DATA.rows, features=4, bottom=(8,), top=(6,))


def clicks():
    """A DLRM of three small tables on a few generated clicks."""
    return replace(
        dlrm_small(), name="clicks", model=MODEL, data=DATA, batch=32, updates=4, evaluate_every=4, checkpoint_every=4,
        evaluation_batch=64,
    )  # fmt: skip


@cache
def theirs():
    """A state dict as DLRM's authors have it."""
    return to_theirs(family_of(MODEL), MODEL, *MODEL.init(jax.random.key(7)))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("theirs") / "dlrm.safetensors", theirs(), {})[0]


@pytest.fixture(scope="module")
def imported(file, tmp_path_factory):
    return runs.import_run(clicks(), file, out=tmp_path_factory.mktemp("runs") / "imported")


def same(path, tensors):
    found = read_weights(path).tensors
    return {*found} == {*tensors} and all(np.array_equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.slow
def test_an_imported_run_gives_back_what_came_in(imported, file, tmp_path):
    assert json.loads((imported / "run.json").read_text())["weights_from"] == str(file)
    (out,) = runs.export_weights(imported, tmp_path / "back.safetensors")
    assert same(out, theirs())
    assert "loss" in runs.evaluate(imported).values
    done = CliRunner().invoke(cli, ["export", str(imported), "--to", "torchvision"])
    assert str(done.exception).startswith("torchvision has no Dlrm. Known: dlrm.")


def digits_of_bytes():
    """A ResNet behind `Normalized`, as all recipes of images have it."""
    model = Normalized(ResNet(18, channels=1, classes=10, width=4), mean=(0.5,), std=(0.5,))
    return replace(digits(), model=model, batch=32, updates=1, evaluate_every=0, checkpoint_every=0)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_weights_are_those_of_the_model_behind_the_pixels(library, tmp_path):
    """What stands before a model, as `Normalized`, has no weights: `train resnet50 --start-from` is about ResNet."""
    model = digits_of_bytes().model.model
    sent = to_theirs(family_of(model, library=library), model, *model.init(jax.random.key(7)))
    file = write_weights(tmp_path / "resnet.safetensors", sent, {})[0]
    imported = runs.import_run(digits_of_bytes(), file, out=tmp_path / "imported")
    (out,) = runs.export_weights(imported, tmp_path / "back.safetensors", library=library)
    assert same(out, sent)
    fresh = runs.ForeignStart(str(file), fresh=("head/*",), without=("fc.*",))
    runs.train(digits_of_bytes(), out=tmp_path / "begun", weights=fresh)


@pytest.mark.parametrize(
    "name", ["resnet50", "efficientnet-b0", "ssd", "mask-rcnn", "bert-large", "dlrm-mlperf", "st-moe-small"]
)
def test_published_recipes_begin_with_published_weights(name):
    model = behind_pixels(find(name)().model)
    assert family_of(model).places(model)


@pytest.mark.parametrize(
    "changes",
    [[], ["layout.shard_weights=true"], ["layout.mesh=2x2", "layout.expert=2"], ["layout.gradient_sum=adasum"]],
    ids=lambda changes: changes[-1] if changes else "whole",
)
def test_a_run_begins_with_the_weights_whatever_its_layout(changes, file, tmp_path):
    recipe = clicks()
    if "layout.expert=2" in changes:
        recipe = replace(recipe, model=replace(MODEL, tables=replace(MODEL.tables, place="row", parts=2)))
    imported = runs.import_run(recipe, file, out=tmp_path / "run", changes=changes)
    assert same(runs.export_weights(imported, tmp_path / "back")[0], theirs())


@pytest.mark.slow
def test_averages_begin_with_the_weights_and_what_is_fresh_does_not(file, tmp_path):
    start = runs.ForeignStart(file, fresh=["top/*"], without=["top_l.*"])
    request = runs.TrainRequest(recipe=replace(clicks(), ema=Ema(0.9)), out=tmp_path / "run")
    program = runs.train_request(runs.start_from(request, start), RuntimeOptions()).state
    assert program.update == 4
    run = runs.open(tmp_path / "run")
    given, fresh = theirs()["bot_l.0.weight"].T, MODEL.init(jax.random.key(7))[0]["top/0/kernel"]
    assert 0 < np.abs(run.params["bottom/0/kernel"] - given).max() < 0.5
    assert np.abs(run.params["top/0/kernel"] - fresh).max() > 0.5
    with pytest.raises(WeightsError, match=r"Dlrm: 4 tensors .*has no place|no place for it"):
        runs.start_from(request, runs.ForeignStart(file, fresh=["top/*"]))


def test_the_commands_begin_with_weights_and_refuse_two_beginnings(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("from test_weights_runs import clicks\n")
    words = ["train", "my.py:clicks", "--start-from", str(file), "--quiet"]
    done = CliRunner().invoke(cli, [*words, "--out", "run"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["weights_from"] == str(file)
    refused = CliRunner().invoke(cli, [*words, "--resume", "run"])
    assert refused.exit_code == 2
    assert "--start-from begins a new run" in refused.output
    refused = CliRunner().invoke(cli, ["export", "run", "--to", "dlrm", "--int8"])
    assert "--to writes float32 weights" in refused.output
    done = CliRunner().invoke(cli, ["export", "run", "--to", "dlrm", "-o", "out"], catch_exceptions=False)
    assert {*read_weights(tmp_path / "out").tensors} == {*theirs()}


@pytest.mark.slow
def test_a_run_goes_to_the_hub_and_comes_back(imported, tmp_path):
    trained = runs.train(clicks(), out=tmp_path / "run").folder
    folder = runs.hub_save(trained, tmp_path / "hub")
    values = runs.evaluate(trained).values
    card = (folder / "README.md").read_text()
    assert f"| loss | {values['loss']:.6g} |" in card
    assert "library_name: multipod" in card
    assert str(tmp_path) not in card + (folder / "config.json").read_text()
    again = runs.hub_load(folder, tmp_path / "again")
    assert runs.evaluate(again).values == values
    assert int(runs.open(again).state.update) == 4
    (plain,) = write_weights(tmp_path / "plain", theirs(), {})
    with pytest.raises(WeightsError, match="is there already"):
        runs.hub_save(trained, folder)
    with pytest.raises(WeightsError, match="was not written by `multipod hub save`"):
        runs.hub_load(plain.parent, tmp_path / "x")
    with pytest.raises(WeightsError, match="was not written by"):
        runs.hub_push(tmp_path, "our/model")


READER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "multipod":
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import jax
import numpy as np
import orbax.checkpoint as ocp

mesh = jax.make_mesh((jax.device_count(),), ("x",))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
checkpointer = ocp.PyTreeCheckpointer()
shapes = checkpointer.metadata(sys.argv[1]).item_metadata.tree
args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=whole), shapes)
state = checkpointer.restore(sys.argv[1], restore_args=args)
np.savez(sys.argv[2], **{k: np.asarray(v) for k, v in state["params"].items()})
print(jax.device_count(), len(state["params"]["bottom/0/kernel"].sharding.device_set))
"""


def test_a_checkpoint_is_read_by_orbax_alone_on_other_devices(imported, tmp_path):
    environment = clean_environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    checkpoint = (imported / "checkpoints" / "0" / "default").absolute()
    done = subprocess.run(
        [sys.executable, "-c", READER, str(checkpoint), str(tmp_path / "params.npz")],
        env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["3", "3"], done.stderr
    found, params = np.load(tmp_path / "params.npz"), MODEL.init(jax.random.key(7))[0]
    assert {*found} == {*params}
    assert all(np.array_equal(found[name], params[name]) for name in params)
