"""Averages the last checkpoints of a run into a run folder of its own, as Transformers are judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from multipod.errors import CheckpointError, RecipeError
from multipod.optim.ema import EmaState
from multipod.pytrees import Pytree
from multipod.runs.opening import OpenedRun, open_run
from multipod.runs.options import RuntimeOptions
from multipod.step.state import State
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.multihost import broadcast_from_0
from multipod.train.run_folder import RunFolder, create


@dataclass(frozen=True)
class AveragedRun:
    """A folder with the mean of several checkpoints of a run, which is opened, evaluated and exported as a run is.

    Attributes:
      folder: where it is.
      updates: of the checkpoints that it is the mean of, increasing; its own number is the last of them.
    """

    folder: Path
    updates: tuple[int, ...]


def average_run(
    run: str | Path, *, last: int = 5, out: str | Path, options: RuntimeOptions | None = None
) -> AveragedRun:
    """Writes a run folder `out` whose one checkpoint has the mean weights of the `last` newest ones of `run`.

    Statistics and the averages of `ema` are averaged likewise; counts, the optimizer and the place in the data are the
    newest checkpoint's. The mean is a running one in float32, so memory holds two states.

    Source: Vaswani et al., 2017, arXiv:1706.03762, section 6.1: the last 5 checkpoints, or 20 of the big model.

    Raises:
      RunFolderError: there is no run, or something is at `out` already.
      CheckpointError: the run has fewer checkpoints.
      RecipeError: a run in an asynchronous pipeline, whose stages have other updates under way.
    """
    options = options or RuntimeOptions()
    newest = open_run(run, options=options)
    if newest.recipe.layout.asynchronous:
        raise RecipeError(
            f"{run}: the stages of an asynchronous pipeline hold weights of several updates. Take it over into another "
            "layout first: multipod train --from RUN --layout stage=1."
        )
    updates = _newest_updates(newest.folder, last)
    mean = _averaged_parts(newest.state)
    for number, update in enumerate(reversed(updates[:-1]), 2):
        before = _averaged_parts(open_run(run, at=update, options=options).state)
        mean = jax.jit(_running_mean, out_shardings=_shardings(mean))(mean, before, number)
    folder = _make_folder(newest, Path(out), updates)
    checkpoints = Checkpoints(folder.checkpoints, 1)
    try:
        checkpoints.save(_with_parts(newest.state, mean), updates[-1])
        checkpoints.wait()
    finally:
        checkpoints.close()
    return AveragedRun(folder.path, updates)


def _newest_updates(folder: RunFolder, last: int) -> tuple[int, ...]:
    checkpoints = Checkpoints(folder.checkpoints, 1, read_only=True)
    known = checkpoints.updates()
    checkpoints.close()
    if not 1 <= last <= len(known):
        numbers = ", ".join(map(str, known))
        raise CheckpointError(
            f"{folder.path} has {len(known)} checkpoints, after {numbers} updates, and {last} are to "
            f"be averaged. Take --last {len(known)} or fewer, or train with a larger keep_checkpoints."
        )
    return tuple(known[len(known) - last :])


def _make_folder(run: OpenedRun, out: Path, updates: Sequence[int]) -> RunFolder:
    def make() -> str:
        facts = run.facts | {"averaged": {"run": str(run.folder.path), "updates": list(updates)}}
        folder = create(out, run.recipe, {name: value for name, value in facts.items() if name != "format"})
        folder.recipe.write_text(run.folder.recipe.read_text())
        return str(folder.path)

    return RunFolder(Path(broadcast_from_0(make)))


def _averaged_parts(state: State) -> Pytree:
    """What is averaged: parameters, statistics, and the averages of `ema`."""
    average = state.optimizer
    kept = (average.params, average.statistics) if isinstance(average, EmaState) else ()
    return state.params, state.statistics, kept


def _with_parts(state: State, parts: Pytree) -> State:
    params, statistics, kept = parts
    optimizer: Any = state.optimizer
    if kept:
        optimizer = optimizer._replace(params=kept[0], statistics=kept[1])
    return state._replace(params=params, statistics=statistics, optimizer=optimizer)


def _running_mean(mean: Pytree, before: Pytree, number: jax.Array) -> Pytree:
    def step(m: jax.Array, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(m.dtype, jnp.floating):
            return m
        return (m.astype(jnp.float32) + (x.astype(jnp.float32) - m.astype(jnp.float32)) / number).astype(m.dtype)

    return jax.tree.map(step, mean, before)


def _shardings(tree: Pytree) -> Pytree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
