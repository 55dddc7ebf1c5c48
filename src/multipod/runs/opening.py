"""Opens a run that was trained before: its recipe, its program on the devices that are here, and its state."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multipod.layout.mesh import make_mesh
from multipod.recipe.recipe import Recipe
from multipod.runs.options import RuntimeOptions
from multipod.runs.recipes import configure_recipe, recorded_changes, recorded_recipe
from multipod.step.program import Program, program_of
from multipod.step.state import State
from multipod.train.checkpoint import Checkpoints
from multipod.train.run_folder import RunFolder, check_same, open_folder


@dataclass(frozen=True)
class OpenedRun:
    """A run to look at: nothing is written to its folder.

    Attributes:
      folder: where it is.
      facts: what `run.json` says of how it began.
      recipe: with the mesh that is here.
      program: of the recipe on that mesh.
      state: of the checkpoint that was asked for. It has no optimizer state where that belongs to single chips.
    """

    folder: RunFolder
    facts: dict[str, Any]
    recipe: Recipe
    program: Program
    state: State

    @property
    def params(self) -> Any:
        """The parameters as the model takes them, whole on every device."""
        return self.program.full_params(self.state)


def open_run(path: str | Path, *, at: int | None = None, options: RuntimeOptions | None = None) -> OpenedRun:
    """Opens the run in the folder `path` at its newest checkpoint, or at the one after `at` updates.

    Raises:
      RunFolderError: there is no run, or its recipe has changed since.
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    options = options or RuntimeOptions()
    folder, facts = open_folder(Path(path))
    recipe = configure_recipe(recorded_recipe(folder, facts), recorded_changes(folder, facts), options)
    check_same(folder, recipe, learning=False)
    program = program_of(recipe, make_mesh(recipe.layout))
    # States that are of single chips are of no use here, and the chips may be others.
    state = restore_state(folder, program.shapes, at, weights_only=recipe.layout.sync.local_state)
    return OpenedRun(folder, facts, recipe, program, state)


def restore_state(folder: RunFolder, shapes: State, at: int | None, *, weights_only: bool = False) -> State:
    """Reads a checkpoint of the run in `folder` as `shapes` say; the newest, where `at` is None.

    Raises:
      CheckpointError: see `multipod.train.checkpoint.Checkpoints.restore`.
    """
    checkpoints = Checkpoints(folder.checkpoints, 1, read_only=True)
    try:
        return checkpoints.restore(shapes, at, weights_only=weights_only)
    finally:
        checkpoints.close()
