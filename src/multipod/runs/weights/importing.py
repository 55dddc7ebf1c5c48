"""New runs that begin with the weights of another library, and such weights as a run that was never trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from multipod.errors import WeightsError
from multipod.interop.weights.checkpoints import by_own_names, is_checkpoint, read_checkpoint
from multipod.interop.weights.convert import to_ours
from multipod.interop.weights.families import family_of
from multipod.interop.weights.files import read_weights
from multipod.models.pixels import behind_pixels
from multipod.pytrees import Params, Pytree, Statistics
from multipod.recipe.recipe import Recipe
from multipod.runs.options import RuntimeOptions
from multipod.runs.request import TrainRequest, requested_recipe
from multipod.runs.stages import prepare_folder, prepare_program
from multipod.step.agreement import init_model
from multipod.step.program import Program
from multipod.step.state import PortableState, State, begin_with, fresh_state, optimizer_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.hooks import no_faults


@dataclass(frozen=True)
class ForeignStart:
    """Weights of another library to begin with.

    Attributes:
      source: a file, a folder, or `hf:org/name` (`multipod.interop.weights.files.read_weights`); or an Orbax checkpoint
        of any program (`multipod.interop.weights.checkpoints.read_checkpoint`).
      fresh: patterns of names of ours, as `head/*`, that begin as the recipe draws them.
      without: patterns of names of theirs that are left out.
      library: whose they are, as `timm`; empty: told by their names.
    """

    source: str | Path
    fresh: Sequence[str] = ()
    without: Sequence[str] = ()
    library: str = ""


def begin_from(
    request: TrainRequest, weights: str | Path | ForeignStart, options: RuntimeOptions | None = None
) -> TrainRequest:
    """The request of a run that begins with these weights. They are read and held against the model at once.

    Raises:
      WeightsError: they cannot be read, or do not fit the model; all that does not fit is listed.
      RecipeError: no such recipe.
    """
    start = weights if isinstance(weights, ForeignStart) else ForeignStart(weights)
    recipe = requested_recipe(request, options or RuntimeOptions())
    given = read_start(recipe, start)

    def begin(program: Program) -> State:
        return state_with(program, given.params, given.statistics)

    return replace(request, begin=begin, origin=str(start.source), drawn=given.drawn)


def import_run(
    recipe: str | Recipe,
    weights: str | Path | ForeignStart,
    *,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    options: RuntimeOptions | None = None,
) -> Path:
    """Writes a run folder with another library's weights as its checkpoint after 0 updates; returns the folder.

    It is evaluated, exported, fine-tuned and gone on with as any run.

    Raises:
      WeightsError, RecipeError: see `begin_from`.
      RunFolderError: something is at `out` already.
    """
    options = options or RuntimeOptions()
    request = TrainRequest(recipe=recipe, changes=changes, out=None if out is None else Path(out))
    request = begin_from(request, weights, options)
    program = prepare_program(request, options, no_faults)
    folder = prepare_folder(request, options, program)
    assert request.begin is not None
    checkpoints = Checkpoints(folder.checkpoints, 1)
    try:
        checkpoints.save(request.begin(program), 0)
        checkpoints.wait()
    finally:
        checkpoints.close()
    return folder.path


class Given(NamedTuple):
    """What a run begins with.

    Attributes:
      params: host arrays of the model's parameters, but for those that begin fresh.
      statistics: likewise.
      drawn: names of the parameters that begin fresh.
    """

    params: Params
    statistics: Statistics
    drawn: list[str]


def read_start(recipe: Recipe, start: ForeignStart) -> Given:
    """Host arrays for all of the model's parameters and statistics but those that begin fresh.

    Raises:
      WeightsError: see `begin_from`.
    """
    model = behind_pixels(recipe.model)
    shapes = jax.eval_shape(lambda: init_model(recipe, jax.random.key(0)))
    if is_checkpoint(start.source) and not start.library:
        weights, family = read_checkpoint(start.source, *shapes), by_own_names(*shapes)
    else:
        weights = read_weights(start.source)
        family = family_of(model, library=start.library, names=weights.tensors)
    objections = family.objections(model, weights.config)
    if objections:
        listed = "\n  ".join(objections)
        raise WeightsError(
            f"{start.source}: its config.json says of a model that computes otherwise:\n  {listed}\nSet these fields "
            "of the recipe's model (--set model.NAME=VALUE), or take other weights."
        )
    fits = to_ours(family, model, weights.tensors, *shapes, fresh=start.fresh, without=start.without)
    params, statistics = ({k: v for k, v in part.items() if isinstance(v, np.ndarray)} for part in fits)
    return Given(params, statistics, [name for name in shapes[0] if name not in params])


def state_with(program: Program, params: Params, statistics: Statistics, update: int = 0) -> State:
    """The state of a run on its mesh that begins with these weights; what dictionaries of them lack is drawn.

    Args:
      program: of the run.
      params: whole tensors: all of the model's, or some of a flat dictionary.
      statistics: likewise.
      update: the number of updates done that the state tells.
    """
    recipe = program.recipe
    optimizer = optimizer_of(recipe)

    def make(params: Params, statistics: Statistics) -> State:
        drawn = fresh_state(recipe, optimizer)
        whole = _filled(drawn.params, params), _filled(drawn.statistics, statistics)
        state = begin_with(optimizer, *whole, drawn.key)
        aside = state.key, state.update + update, state.position + update
        portable = PortableState(state.params, state.optimizer, {}, state.statistics, *aside)
        return program.conversion.from_portable(portable)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.shapes)
    return jax.block_until_ready(jax.jit(make, out_shardings=shardings)(params, statistics))


def _filled(drawn: Pytree, given: Pytree) -> Pytree:
    return {**drawn, **given} if isinstance(drawn, dict) and isinstance(given, dict) else given
