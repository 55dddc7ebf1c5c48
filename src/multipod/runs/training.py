"""Trains a recipe into a run folder: what `multipod train` does, as one call."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from multipod.errors import RecipeError, RunFolderError
from multipod.recipe.recipe import Recipe
from multipod.runs.alone import run_alone
from multipod.runs.converting import start_from as take_over
from multipod.runs.elastic import run_elastic
from multipod.runs.object_store import fetched, refuse_fetching
from multipod.runs.options import RuntimeOptions, parse_profiled
from multipod.runs.request import RunResult, TrainRequest
from multipod.runs.stages import translate_lost_peers
from multipod.runs.weights.importing import ForeignStart, begin_from
from multipod.train.events import EventSink
from multipod.train.run_folder import RunFolder


def train_run(
    recipe: str | Recipe = "",
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    start_from: str | Path | None = None,
    weights: str | Path | ForeignStart | None = None,
    at: int | None = None,
    copy_to: str = "",
    changes: Sequence[str] = (),
    stop_after: int = 0,
    run_ahead: int | None = None,
    steps_per_call: int = 1,
    profile: str = "",
    log: str | Sequence[str] = (),
    observers: Sequence[EventSink] = (),
    options: RuntimeOptions | None = None,
) -> RunResult:
    """Trains a recipe to its end, or goes on with a run, as `multipod train` does.

    The folder gets `recipe.toml`, `run.json`, `metrics.jsonl`, TensorBoard events, checkpoints and a report. Ctrl-C
    stops after the update that is running and saves; `RunResult.ended.interrupted` says so.

    Args:
      recipe: a recipe, the name of one (`multipod list`), or FILE.py:FUNCTION; left out with `resume`.
      out: the folder of a new run; None takes the next free one under runs/.
      resume: the folder of a run to go on with.
      start_from: the folder of a run whose recipe and state a new run takes over, laid out otherwise.
      weights: the file, folder or `hf:org/name` with weights of another library that a new run begins with; or a
        `ForeignStart`, which also says what stays fresh.
      at: with `resume` or `start_from`, the checkpoint to go on from; None takes the newest.
      copy_to: an address in an object store, as `s3://bucket/run`, at which a copy of the run is kept.
      changes: typed changes to the recipe, each `name=value`, as `optimizer.rate=0.2`.
      stop_after: stop and save after this update; 0 never does.
      run_ahead: how many updates are given to the devices ahead of the one waited for; None: as many as are safe.
      steps_per_call: how many updates are one program, which the host calls once; refused where it cannot be.
      profile: the updates to profile, as `10:13`; empty profiles none.
      log: names of loggers beside the run's own files (`multipod.train.observers.table.OBSERVERS`), as `csv`, or
        `wandb,csv`.
      observers: called with each event (`multipod.train.events`), on process 0.
      options: mesh, devices, time-outs and cache; None is this process on all of JAX's devices.

    Raises:
      MultipodError: what was asked for cannot be; the message says where, what, and the next move.
    """
    if resume is not None and out is not None:
        raise RunFolderError("resume goes on in the run's own folder: leave out `out`.")
    if not recipe and resume is None and start_from is None:
        raise RecipeError("say which recipe to train, or which run to go on with: runs.train('digits').")

    def tell(folder: RunFolder, first: bool) -> Sequence[EventSink]:
        return observers

    request = TrainRequest(
        recipe=recipe,
        changes=changes,
        out=None if out is None else Path(out),
        resume=None if resume is None else Path(resume),
        at=at,
        copy_to=copy_to,
        stop_after=stop_after,
        run_ahead=run_ahead,
        steps_per_call=steps_per_call,
        profile=parse_profiled(profile) if profile else None,
        loggers=(log,) if isinstance(log, str) else log,
        observers=tell,
    )
    if isinstance(weights, str | Path):
        weights = ForeignStart(weights)
    return train_request(request, options, start_from=start_from, weights=weights)


def train_request(
    request: TrainRequest,
    options: RuntimeOptions | None = None,
    *,
    start_from: str | Path | None = None,
    weights: ForeignStart | None = None,
) -> RunResult:
    """Trains what `request` asks for, alone or in processes that come and go.

    With `start_from`, a new run takes over the recipe and the state of the run in that folder; with `weights` it begins
    with another library's.

    Raises:
      MultipodError: it cannot be.
    """
    options = options or RuntimeOptions()
    with translate_lost_peers(options):
        if start_from is not None:
            request = take_over(request, Path(start_from), options)
            request = replace(request, at=None)
        if weights is not None:
            request = begin_from(request, weights, options)
        if options.cluster.survives:
            refuse_fetching(request)
        else:
            request = fetched(request)
        return (run_elastic if options.cluster.survives else run_alone)(request, options)
