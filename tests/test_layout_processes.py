"""Layouts over four real processes: equal to the unsplit model in one, and restored into other layouts."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from layout_recipes import pictures, words
from processes import clean_environment
from test_cli import losses
from test_layouts import trained

from multipod.errors import CheckpointError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.sync import Sync
from multipod.step.program import program_of
from multipod.train.checkpoints.checkpoint import Checkpoints

HERE = Path(__file__).with_name("layout_recipes.py")
RUNS = [
    ("words", "data=2x2,model=2,update,buckets=4KB"),
    ("pictures", "data=1x2,spatial=4,weights"),
]


def restored(folder, recipe):
    program = program_of(recipe, make_mesh(recipe.layout))
    checkpoints = Checkpoints(folder / "checkpoints", 1, read_only=True)
    try:
        return checkpoints.restore(program.shapes)
    finally:
        checkpoints.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_four_processes_learn_what_the_unsplit_model_learns_and_their_checkpoint_fits_any_layout(
    name, layout, tmp_path
):
    command = [sys.executable, "-m", "multipod", "launch", "--processes", "4", "--", "train", f"{HERE}:{name}"]
    done = subprocess.run(
        [*command, "--layout", layout, "--out", "four"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, _, alone, state, _ = trained(name, Layout((1, 1)))
    four = losses(tmp_path / "four")
    np.testing.assert_allclose([four[update] * 16 for update in sorted(four)], alone, rtol=1e-4)
    make = {"words": words, "pictures": pictures}[name]
    for other in (
        Layout((1, 1)),
        Layout((2, 4), sync=Sync(sharding="fsdp")),
        Layout((4, 2), sync=Sync(sharding="zero1")),
    ):
        found = restored(tmp_path / "four", make(other))
        for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(jax.device_get(one), jax.device_get(wanted), rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restored(tmp_path / "four", {"words": pictures, "pictures": words}[name]())
