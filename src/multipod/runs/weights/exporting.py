"""A run's weights in the form in which another library loads them."""

from pathlib import Path

import jax

from multipod.interop.weights.convert import to_theirs
from multipod.interop.weights.families import family_of
from multipod.interop.weights.files import write_weights
from multipod.models.pixels import behind_pixels
from multipod.runs.opening import OpenedRun, open_run
from multipod.runs.options import RuntimeOptions


def export_weights(
    run: str | Path | OpenedRun,
    out: str | Path,
    *,
    library: str = "",
    at: int | None = None,
    options: RuntimeOptions | None = None,
) -> list[Path]:
    """Writes the weights of a run, opened or in this folder, as safetensors; under `ema` the averages.

    Args:
      run: whose.
      out: a file ending in .safetensors, or a folder, which also gets a `config.json` where the library has one.
      library: `torchvision`, `timm`, `transformers` or `dlrm`; empty takes the first that has the model.
      at: the checkpoint; None takes the newest.
      options: devices and time-outs.

    Returns:
      The files that were written.

    Raises:
      WeightsError: the library has no such model.
      MissingPackageError: safetensors is not installed.
    """
    opened = run if isinstance(run, OpenedRun) else open_run(run, at=at, options=options)
    model = behind_pixels(opened.recipe.model)
    family = family_of(model, library=library)
    params, statistics = jax.device_get((opened.params, opened.judged.statistics))
    return write_weights(Path(out), to_theirs(family, model, params, statistics), family.config(model))
