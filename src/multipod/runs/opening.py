"""Opens a run that was trained before: its recipe, its program on the devices that are here, and its state."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multipod import notebook
from multipod.errors import RecipeError
from multipod.layout.mesh import make_mesh
from multipod.recipe.recipe import Recipe
from multipod.runs.converting import convert_checkpoint
from multipod.runs.learnt import learnt
from multipod.runs.options import RuntimeOptions
from multipod.runs.recipes import configure_recipe, recorded_changes, recorded_recipe
from multipod.step.program import Program, program_of
from multipod.step.state import State, parameter_count
from multipod.train.checkpoints.checkpoint import Checkpoints
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

    def _repr_html_(self) -> str:
        """Where it stands and what it has learnt, in a notebook."""
        update, mesh = int(self.state.update), dict(self.program.mesh.shape)
        tested, loss = learnt(self.folder, update)
        rows = [
            ("after", f"{update:,} of {self.recipe.updates:,} updates"),
            *tested,
            ("parameters", f"{parameter_count(self.recipe):,}"),
            ("on", " ".join(f"{axis}={size}" for axis, size in mesh.items())),
            ("began", self.facts.get("started")),
            ("by", self.facts.get("command")),
        ]
        return notebook.card("run", str(self.folder.path), rows, loss)

    @property
    def judged(self) -> State:
        """The state as an evaluation takes it, without the optimizer's: under `ema` it holds the averages."""
        return self.program.evaluation.prepare(self.state)

    @property
    def params(self) -> Any:
        """The parameters as the model takes them, whole on every device; under `ema` the averages.

        The weights that training goes on from are `program.full_params(state)`.
        """
        return self.program.full_params(self.state if self.recipe.ema is None else self.judged)


def open_run(
    path: str | Path, *, at: int | None = None, changes: Sequence[str] = (), options: RuntimeOptions | None = None
) -> OpenedRun:
    """Opens the run in the folder `path` at its newest checkpoint, or at the one after `at` updates.

    `changes` lay it otherwise than it was trained, each a `layout.name=value`: a run in four stages or with a model
    split over four devices is opened whole on one with `layout.stage=1` or `layout.model=1`.

    Raises:
      RunFolderError: there is no run, or its recipe has changed since.
      CheckpointError: there is no such checkpoint, or it is damaged.
      RecipeError: a change of something else than the layout.
    """
    others = [change for change in changes if not change.startswith("layout.")]
    if others:
        raise RecipeError(f"{', '.join(others)}: a run is opened as it was trained. Change its layout only.")
    options = options or RuntimeOptions()
    folder, facts = open_folder(Path(path))
    recorded, began_with = recorded_recipe(folder, facts), recorded_changes(folder, facts)
    before = configure_recipe(recorded, began_with, options)
    check_same(folder, before, learning=False)
    recipe = configure_recipe(recorded, [*began_with, *changes], options) if changes else before
    program = program_of(recipe, make_mesh(recipe.layout))
    if recipe.layout.pipeline != before.layout.pipeline:
        state = convert_checkpoint(program, folder, facts, before, at)
    else:
        # States that are of single chips are of no use here, and the chips may be others.
        state = restore_state(folder, program.shapes, at, weights_only=before.layout.sync.local_state)
    return OpenedRun(folder, facts, recipe, program, state)


def restore_state(folder: RunFolder, shapes: State, at: int | None, *, weights_only: bool = False) -> State:
    """Reads a checkpoint of the run in `folder` as `shapes` say; the newest, where `at` is None.

    Raises:
      CheckpointError: see `multipod.train.checkpoints.checkpoint.Checkpoints.restore`.
    """
    checkpoints = Checkpoints(folder.checkpoints, 1, read_only=True)
    try:
        return checkpoints.restore(shapes, at, weights_only=weights_only)
    finally:
        checkpoints.close()
