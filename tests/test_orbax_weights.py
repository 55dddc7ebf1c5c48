"""Runs that begin with checkpoints that plain Flax and Orbax programs wrote, in processes without multipod."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flax.linen
import jax
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx
from processes import clean_environment

from multipod import runs
from multipod.cli.main import cli
from multipod.errors import WeightsError
from multipod.interop.inputs import Input
from multipod.interop.linen import from_linen
from multipod.interop.weights.checkpoints import is_checkpoint
from multipod.nn.model import FlaxModel
from multipod.recipes.digits import digits

WRITER = '''
import sys
sys.modules["multipod"] = None  # a program that has never heard of it
import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState

OUT = sys.argv[1] + "/"
split = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec("x"))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True, name="norm")(nn.Dense(16, name="hidden")(x.reshape(len(x), -1)))
        return nn.Dense(16, name="head")(nn.relu(x))


class Module(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.List([nnx.Linear(64, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def laid_out(tree):
    """The tree with every array split over the eight devices that can be, and numbers of its own in each."""
    key = iter(range(1000))
    fill = lambda x: jax.numpy.asarray(np.random.default_rng(next(key)).random(x.shape, np.float32))
    place = lambda x: jax.device_put(fill(x), split) if x.ndim and x.shape[0] % 8 == 0 else fill(x)
    return jax.tree.map(lambda x: place(x) if x.dtype == np.float32 else x, tree)


saver = ocp.StandardCheckpointer()
state = laid_out(nnx.state(Module(nnx.Rngs(0))))
saver.save(OUT + "nnx", state)
saver.save(OUT + "nnx_pure", {"model": nnx.to_pure_dict(state), "optimizer": {"step": 3}})
variables = laid_out(Linen().init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32)))
params = variables["params"]
ocp.PyTreeCheckpointer().save(OUT + "linen", variables)
ocp.PyTreeCheckpointer(use_ocdbt=False).save(OUT + "zarr", variables)
train = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3)).replace(step=7)
train = {"params": train.params, "opt_state": train.opt_state, "step": train.step}
train["batch_stats"] = variables["batch_stats"]
saver.save(OUT + "train_state", train)
saver.save(OUT + "whole_variables", {"params": variables, "ema_params": jax.tree.map(lambda x: x + 1, variables)})
saver.wait_until_finished()
for name, args in {
    "manager": lambda tree: ocp.args.StandardSave(tree),
    "items": lambda tree: ocp.args.Composite(
        state=ocp.args.StandardSave(tree), iterator=ocp.args.StandardSave({"position": 3})
    ),
}.items():
    options = ocp.CheckpointManagerOptions(step_prefix="step" if name == "items" else None)
    with ocp.CheckpointManager(OUT + name, options=options) as manager:
        manager.save(9, args=args({**train, "params": jax.tree.map(jax.numpy.zeros_like, params)}))
        manager.save(10, args=args(train))
try:
    from orbax.checkpoint import v1
except ImportError:
    from orbax.checkpoint.experimental import v1
v1.save_pytree(OUT + "v1", train)
with v1.training.Checkpointer(OUT + "v1_steps") as checkpointer:
    checkpointer.save_pytree(2, variables)
named = lambda tree: {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
                      for path, x in jax.tree.leaves_with_path(tree)}
np.savez(OUT + "linen.npz", **named(variables))
state = nnx.to_pure_dict(state)
state.pop("dropout")
np.savez(OUT + "nnx.npz", **named(state))
'''


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A folder of checkpoints by a program on eight devices."""
    folder = tmp_path_factory.mktemp("theirs")
    environment = clean_environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(folder)],
        env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


class Network(flax.linen.Module):
    """What the other program has too."""

    @flax.linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = flax.linen.Dense(16, name="hidden")(x.reshape(len(x), -1))
        x = flax.linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return flax.linen.Dense(16, name="head")(flax.linen.relu(x))


class _Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.List([nnx.Linear(64, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)


@dataclass(frozen=True)
class Layers(FlaxModel):
    """A model of ours by NNX."""

    classes: int = 16

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        return _Layers(rngs)

    def forward(self, module: Any, batch: Any) -> jax.Array:
        x = batch["image"].reshape(len(batch["image"]), -1)
        return module.hidden[1](nnx.relu(module.norm(module.hidden[0](x))))


def recipe_of(model):
    return replace(digits(), model=model, batch=32, updates=1, evaluate_every=0, checkpoint_every=0)


LINEN = from_linen(Network(), Input("image", (8, 8, 1)))
FROM_LINEN = ["linen", "zarr", "train_state", "whole_variables", "manager", "items", "v1", "v1_steps"]


def weights_of(run) -> dict[str, np.ndarray]:
    opened = runs.open(run)
    return {name: np.asarray(x) for name, x in {**opened.params, **opened.state.statistics}.items()}


def expected(file: Path) -> dict[str, np.ndarray]:
    return {name.removeprefix("params/"): x for name, x in np.load(file).items()}


def same(found, wanted) -> bool:
    return {*found} == {*wanted} and all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", FROM_LINEN)
def test_a_run_begins_with_what_a_linen_program_saved(name, written, tmp_path):
    run = runs.import_run(recipe_of(LINEN), written / name, out=tmp_path / "run")
    assert same(weights_of(run), expected(written / "linen.npz"))
    assert json.loads((run / "run.json").read_text())["weights_from"] == str(written / name)


@pytest.mark.parametrize("name", ["nnx", "nnx_pure"])
def test_a_run_begins_with_the_state_of_an_nnx_module(name, written, tmp_path):
    run = runs.import_run(recipe_of(Layers()), written / name, out=tmp_path / "run")
    assert same(weights_of(run), expected(written / "nnx.npz"))


@pytest.mark.parametrize("changes", [["layout.mesh=1x1"], ["layout.mesh=2x2", "layout.shard_weights=true"]])
def test_what_eight_devices_saved_begins_on_one_and_on_four(changes, written, tmp_path):
    run = runs.import_run(recipe_of(LINEN), written / "train_state", out=tmp_path / "run", changes=changes)
    assert same(weights_of(run), expected(written / "linen.npz"))
    done = runs.train(recipe_of(LINEN), changes=changes, weights=written / "manager", out=tmp_path / "trained")
    assert int(done.state.update) == 1


def test_the_devices_that_saved_a_checkpoint_need_not_be_there(written, tmp_path):
    """The sharding file, as a program on one GPU leaves it."""
    (file,) = (written / "linen").glob("_sharding")
    before = file.read_text()
    gpu = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": "cuda:0"})
    file.write_text(json.dumps(dict.fromkeys(json.loads(before), gpu)))
    try:
        run = runs.import_run(recipe_of(LINEN), written / "linen", out=tmp_path / "run")
    finally:
        file.write_text(before)
    assert same(weights_of(run), expected(written / "linen.npz"))


def test_a_checkpoint_of_orbax_before_metadata_is_read(written, tmp_path):
    """Structure in a msgpack file `checkpoint`, each array in a folder by Zarr."""
    msgpack = pytest.importorskip("msgpack")
    for array in (written / "zarr").iterdir():
        if (array / ".zarray").is_file():
            (tmp_path / "old" / array.name).mkdir(parents=True)
            for part in array.iterdir():
                (tmp_path / "old" / array.name / part.name).write_bytes(part.read_bytes())
    tree: dict[str, Any] = {}
    for name in np.load(written / "linen.npz"):
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = f"PLACEHOLDER://{'.'.join([*path, leaf])}"
    (tmp_path / "old" / "checkpoint").write_bytes(msgpack.packb(tree))
    run = runs.import_run(recipe_of(LINEN), tmp_path / "old", out=tmp_path / "run")
    assert same(weights_of(run), expected(written / "linen.npz"))


def test_all_that_does_not_fit_is_said_with_the_nearest(written, tmp_path):
    class Other(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = flax.linen.Dense(24, name="hidden")(x.reshape(len(x), -1))
            return flax.linen.Dense(16, name="heads")(x)

    other = recipe_of(from_linen(Other(), Input("image", (8, 8, 1))))
    with pytest.raises(WeightsError) as refused:
        runs.start_from(runs.TrainRequest(recipe=other), written / "manager")
    for line in (
        "heads/kernel: missing, for our heads/kernel (nearest: head/kernel)",
        "hidden/kernel: (64, 16), and the model needs (64, 24)",
        "norm/scale: the model has no place for it",
    ):
        assert line in str(refused.value)
    begun = runs.ForeignStart(
        written / "manager", fresh=["head*", "hidden/*"], without=["head/*", "norm/*", "hidden/*"]
    )
    request = runs.start_from(runs.TrainRequest(recipe=other), begun)
    assert request.drawn == ["heads/bias", "heads/kernel", "hidden/bias", "hidden/kernel"]


def test_a_run_begins_with_a_checkpoint_of_multipods_own(written, tmp_path):
    run = runs.import_run(recipe_of(LINEN), written / "linen", out=tmp_path / "run")
    again = runs.import_run(recipe_of(LINEN), run / "checkpoints", out=tmp_path / "again")
    assert same(weights_of(again), expected(written / "linen.npz"))


def test_folders_are_told_apart(written, tmp_path, monkeypatch):
    assert all(is_checkpoint(written / name) for name in ["nnx", *FROM_LINEN])
    assert not is_checkpoint(tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "_METADATA").write_text("{")
    with pytest.raises(WeightsError, match="damaged cannot be read by Orbax"):
        runs.start_from(runs.TrainRequest(recipe=recipe_of(LINEN)), tmp_path / "damaged")
    for name in ("left", "right"):
        (tmp_path / "two" / name).mkdir(parents=True)
        (tmp_path / "two" / name / "_METADATA").write_text("{}")
    with pytest.raises(WeightsError, match="two holds several trees: left, right"):
        runs.start_from(runs.TrainRequest(recipe=recipe_of(LINEN)), tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(
        "from test_orbax_weights import LINEN, recipe_of\n\n\ndef theirs():\n    return recipe_of(LINEN)\n"
    )
    words = ["import", "my.py:theirs", str(written / "manager" / "10"), "--out", "run"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
