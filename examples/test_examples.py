"""Every recipe trains: its loss falls within a few updates on a mesh of 2 x 4 devices. The scripts run."""

import re
import runpy
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.sync import Sync
from multipod.recipe.text import to_text
from multipod.recipes.find import load
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.events import Updated
from multipod.train.loop import train

HERE = Path(__file__).parent
SCRIPTS = {
    HERE / "adasum_in_optax.py": r"update 100: loss [0-9]\.",
    HERE / "around_a_hole.py": "tree-packing: ",
    HERE / "batch_norm_span.py": "largest difference: [0-9.]*e-0[67]",
    HERE / "experts_in_modules.py": r"NNX: loss .*, after 60 updates 0\.[0-2]",
    HERE / "grain_order.py": "1,437 examples, 1,437 of them different\nafter a stop the rest is the same: True",
    HERE / "halo_exchange.py": "the whole image: (0.0e.00|[0-9.]*e-0[67])",
    HERE / "tensor_train_table.py": r"2573 times fewer\nloss 1\..*, after 100 updates 0\.[0-4]",
    HERE / "torch_table.py": r"in place of 640,000,000\nloss .*, after 100 updates 0\.[0-6]",
}
"""Each script, and what it must print."""
EXAMPLES = sorted({*HERE.glob("*.py")} - {*SCRIPTS, HERE / "conftest.py", HERE / "test_examples.py"})
NEEDED = {"equinox_model": "equinox", "keras_model": "keras", "torch_table": "torch"}


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Path:
    """An example, skipped where the library that it is written in is not installed."""
    pytest.importorskip(NEEDED.get(request.param.stem, "multipod"))
    return request.param


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem, indirect=True)
@pytest.mark.parametrize("shard_update", [False, True], ids=["whole", "sharded"])
def test_the_loss_falls(path: Path, shard_update: bool) -> None:
    layout = Layout(mesh=(2, 4), sync=Sync(sharding="zero1" if shard_update else "none"))
    recipe = replace(load(f"{path}:recipe"), updates=20, layout=layout)
    events = []
    _, ended = train(program_of(recipe, make_mesh(recipe.layout)), RunContext(observers=[events.append]))
    losses = [event.values["loss"] for event in events if isinstance(event, Updated)]
    assert len(losses) == ended.update == 20
    assert sum(losses[-3:]) / 3 < 0.8 * losses[0]
    assert ended.accuracy is not None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem, indirect=True)
def test_the_recipe_as_text_names_the_model_and_its_numbers(path: Path) -> None:
    model = tomllib.loads(to_text(load(f"{path}:recipe")))["model"]
    assert f"{path.stem}:" in model.get("build", model["kind"])
    assert len(model) > 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(NEEDED.get(path.stem, "multipod"))
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(SCRIPTS[path], capsys.readouterr().out)
