"""Every recipe trains: its loss falls within a few updates on a mesh of 2 x 4 devices. The scripts run."""

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
SCRIPTS = [HERE / "around_a_hole.py"]
EXAMPLES = sorted({*HERE.glob("*.py")} - {*SCRIPTS, HERE / "conftest.py", HERE / "test_examples.py"})
NEEDED = {"equinox_model": "equinox", "keras_model": "keras"}


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
    runpy.run_path(str(path), run_name="__main__")
    assert "tree-packing: " in capsys.readouterr().out
