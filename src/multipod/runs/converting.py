"""A run that goes on, in a folder of its own, from a checkpoint of one that lay otherwise: other stages, or none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from multipod.errors import LayoutError, RecipeError, RunFolderError
from multipod.layout.layout import Layout
from multipod.layout.mesh import abstract_mesh, make_mesh, replicated
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import differences, to_text
from multipod.runs.options import RuntimeOptions
from multipod.runs.recipes import configure_recipe, recorded_changes, recorded_recipe
from multipod.runs.request import ANOTHER_RUN, TrainRequest
from multipod.step.convert import convert
from multipod.step.program import Program, program_of
from multipod.step.state import State
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.run_folder import LENGTH, RunFolder, check_same, open_folder

FREE = ("layout.", "pipemare.", "accumulate:", LENGTH)
"""What may differ from the run before; `accumulate` and the micro-batches decide about draws and sums, no more."""


def start_from(request: TrainRequest, run: Path, options: RuntimeOptions) -> TrainRequest:
    """Returns the request of a run that takes over recipe, changes and state of the run in the folder `run`.

    Raises:
      RecipeError: the request names another recipe.
      RunFolderError, LayoutError: see `check_convertible`.
    """
    folder, facts = open_folder(run)
    if isinstance(request.recipe, str) and request.recipe not in ("", facts["recipe"]):
        raise RecipeError(f"{run} is a run of {facts['recipe']}, not of {request.recipe}. Leave the name out.")
    recipe = request.recipe or recorded_recipe(folder, facts)
    before = configure_recipe(recipe, recorded_changes(folder, facts), replace(options, mesh=None, fail=()))
    check_same(folder, before)
    changes = [*recorded_changes(folder, facts), *request.all_changes]
    check_convertible(folder, facts, before, configure_recipe(recipe, changes, options))

    def begin(program: Program) -> State:
        return convert_checkpoint(program, folder, facts, before, request.at)

    return replace(request, recipe=recipe, changes=changes, begin=begin, origin=ANOTHER_RUN)


def check_convertible(folder: RunFolder, facts: dict[str, Any], before: Recipe, after: Recipe) -> None:
    """Refuses what cannot go on from the run in `folder`, of the recipe `before`, as `after`.

    Raises:
      RunFolderError: the recipes differ in more than their layout.
      LayoutError: micro-batches are under way on more devices than there are.
    """
    changed = [line for line in differences(folder.recipe.read_text(), to_text(after)) if not line.startswith(FREE)]
    if changed:
        raise RunFolderError(
            f"--from {folder.path}: the new run would differ in more than how it lies:\n  "
            + "\n  ".join(changed)
            + "\n"
            "Undo these changes, or start a new run without --from."
        )
    layout = _former_layout(facts, before)
    needed = layout.replica_devices * layout.mesh[0] * layout.mesh[1]
    pipeline = layout.pipeline
    if pipeline and pipeline.asynchronous and needed > jax.device_count():
        raise LayoutError(
            f"--from {folder.path}: micro-batches are under way in its {pipeline.schedule} pipeline on {needed} "
            f"devices, and there are {jax.device_count()} to finish them on. Give it {needed} (on a CPU: --cpu-devices "
            f"{needed}); once the new run has a checkpoint, it needs its own devices only."
        )


def convert_checkpoint(
    program: Program, folder: RunFolder, facts: dict[str, Any], before: Recipe, at: int | None
) -> State:
    """The state of the run in `folder`, of the recipe `before`, after `at` updates (the newest), as one of `program`.

    A synchronous run's is carried over number by number. An asynchronous pipeline is drained first, on as many devices
    as it had: what was under way comes to its end, and the new run begins with an empty pipe. Each process reads the
    whole state. See `check_convertible`.

    Raises:
      LayoutError: the state is Adasum's.
      CheckpointError: see `Checkpoints.restore`.
    """
    if before.layout.asynchronous:
        old, state = _restore_drained(folder, facts, before, at)
    else:
        layout = replace(
            before.layout, mesh=(1, 1), failed=(), replica_shape=()
        )  # such a state has no trace of the mesh
        old = program_of(replace(before, layout=layout), abstract_mesh(layout))
        state = _restore(folder, _replicated_shapes(old.shapes, program), at)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.shapes)
    made = jax.jit(lambda given: convert(old, given, program), out_shardings=shardings)(state)
    return jax.block_until_ready(made)  # never two programs in flight: docs/design/runtime.md


def _restore_drained(folder: RunFolder, facts: dict[str, Any], before: Recipe, at: int | None) -> tuple[Program, Any]:
    """The program of a run in an asynchronous pipeline, and its drained state as arrays of the host."""
    layout = _former_layout(facts, before)
    needed = layout.replica_devices * layout.mesh[0] * layout.mesh[1]
    old = program_of(replace(before, layout=layout), make_mesh(layout, jax.devices()[:needed]))
    drain = jax.jit(old.conversion.drain, out_shardings=replicated(old.mesh))
    return old, jax.tree.map(np.asarray, jax.device_get(drain(_restore(folder, old.shapes, at))))


def _restore(folder: RunFolder, shapes: State, at: int | None) -> State:
    checkpoints = Checkpoints(folder.checkpoints, 1, read_only=True)
    try:
        return checkpoints.restore(shapes, at)
    finally:
        checkpoints.close()


def _replicated_shapes(shapes: State, program: Program) -> State:
    """`shapes` whole on every device of another program's mesh."""
    whole = replicated(program.mesh)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes)


def _former_layout(facts: dict[str, Any], before: Recipe) -> Layout:
    return replace(before.layout, mesh=(facts["mesh"]["y"], facts["mesh"]["x"]), failed=())
