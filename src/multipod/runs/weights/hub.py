"""A run as a folder for the Hugging Face hub: weights, recipe, and a model card with the run's own numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from multipod.errors import WeightsError
from multipod.extras import import_optional
from multipod.interop.weights.files import HUB, read_weights, write_weights
from multipod.pytrees import Pytree
from multipod.recipe.text import from_text
from multipod.runs.opening import OpenedRun, open_run
from multipod.runs.options import RuntimeOptions
from multipod.runs.request import TrainRequest
from multipod.runs.stages import prepare_folder, prepare_program, read_events
from multipod.runs.weights.importing import state_with
from multipod.step.agreement import init_model
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.events import Evaluated
from multipod.train.hooks import no_faults

FORMAT = "multipod-model-1"
CONFIG = "config.json"
TOLD = ("recipe", "started", "platform", "versions", "data", "parameters", "weights_from")
"""Facts of `run.json` that go along; those of hosts, paths and commands do not."""


def save_run(
    run: str | Path | OpenedRun, folder: str | Path, *, at: int | None = None, options: RuntimeOptions | None = None
) -> Path:
    """Writes a run, opened or in its folder, as it lies on the hub; returns the folder.

    That is `config.json` with the recipe, safetensors with parameters and statistics by our names (under `ema`
    the averages), and `README.md`, the model card. No optimizer state.

    Raises:
      WeightsError: there is something in the folder.
      MissingPackageError: safetensors is not installed.
    """
    opened = run if isinstance(run, OpenedRun) else open_run(run, at=at, options=options)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} is there already. Name an empty or a new folder.")
    update = int(opened.state.update)
    tensors = _named({"params": opened.params, "statistics": opened.judged.statistics})
    facts = {name: opened.facts[name] for name in TOLD if name in opened.facts}
    config = {
        "format": FORMAT,
        "library_name": "multipod",
        "update": update,
        "recipe": opened.folder.recipe.read_text(),
        "facts": facts,
        "values": _values(opened, update),
    }
    write_weights(folder, tensors, config)
    (folder / "README.md").write_text(model_card(opened.recipe.name, config), encoding="utf-8")
    return folder


def load_run(source: str | Path, out: str | Path, *, options: RuntimeOptions | None = None) -> Path:
    """Makes a run folder of what `save_run` wrote, in a folder or as `hf:org/name`; returns it.

    It is evaluated, exported and fine-tuned as any run; one that goes on has a fresh optimizer.

    Raises:
      WeightsError: it is no such folder, or its tensors are not those of its recipe.
    """
    options = options or RuntimeOptions()
    saved = read_weights(source)
    if saved.config.get("format") != FORMAT:
        raise WeightsError(
            f"{source} was not written by `multipod hub save`. Weights of other libraries begin a run with "
            "`multipod import`."
        )
    recipe = from_text(saved.config["recipe"])
    recipe = replace(recipe, layout=replace(recipe.layout, mesh=(), failed=()))
    request = TrainRequest(recipe=recipe, out=Path(out), origin=str(source))
    program = prepare_program(request, options, no_faults)
    params, statistics = jax.eval_shape(lambda: init_model(recipe, jax.random.key(0)))
    parts = {"params": params, "statistics": statistics}
    found = _unnamed(parts, saved.tensors, str(source))
    folder, update = prepare_folder(request, options, program), int(saved.config["update"])
    checkpoints = Checkpoints(folder.checkpoints, 1)
    try:
        checkpoints.save(state_with(program, found["params"], found["statistics"], update), update)
        checkpoints.wait()
    finally:
        checkpoints.close()
    return folder.path


def push_run(folder: str | Path, name: str, *, private: bool = True) -> str:
    """Uploads a folder that `save_run` wrote as `org/name`, with the token of `hf auth login`; returns its address.

    Raises:
      WeightsError: it is no such folder, or the hub refuses it or cannot be reached.
    """
    if not (Path(folder) / CONFIG).is_file():
        raise WeightsError(f"{folder} was not written by `multipod hub save`. Save the run first.")
    hub = import_optional("the hub", "huggingface_hub").HfApi()
    try:
        address = hub.create_repo(name.removeprefix(HUB), private=private, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=str(folder))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"{name} cannot be pushed: {first} Log in by `hf auth login`, or check the network."
        ) from error
    return str(address)


def model_card(name: str, config: Mapping[str, Any]) -> str:
    """The page of a model, Markdown: what it is, what its run measured, and how it is taken."""
    facts, values = config["facts"], config["values"]
    rows = "\n".join(f"| {value} | {number:.6g} |" for value, number in values.items())
    measured = f"| value | on the test data |\n|---|---|\n{rows}\n" if rows else "The run was not evaluated.\n"
    told = {
        "recipe": facts.get("recipe", name),
        "updates": config["update"],
        "parameters": f"{facts['parameters']:,}" if "parameters" in facts else "",
        "began with": facts.get("weights_from", "random weights"),
        "data": ", ".join(f"{part}: {what}" for part, what in facts.get("data", {}).items()),
        "started": facts.get("started", ""),
        "versions": ", ".join(f"{part} {number}" for part, number in facts.get("versions", {}).items()),
    }
    lines = "\n".join(f"- {what}: {value}" for what, value in told.items() if value != "")
    return (
        f"---\nlibrary_name: multipod\ntags:\n- multipod\n---\n\n# {name}\n\n{lines}\n\n{measured}\n"
        "```\nmultipod hub load hf:ORG/NAME runs/it\nmultipod eval runs/it\n```\n\n"
        "The recipe is in `config.json`, and weights lie in `model.safetensors` under the model's own names.\n"
    )


def _values(opened: OpenedRun, update: int) -> dict[str, float]:
    """The values of the run's last evaluation of this update; empty if there was none."""
    if not opened.folder.metrics.is_file():
        return {}
    events = [event for event in read_events(opened.folder) if isinstance(event, Evaluated) and event.update == update]
    return dict(events[-1].values) if events else {}


def _named(parts: Mapping[str, Pytree]) -> dict[str, np.ndarray]:
    """Host arrays by their paths, `params/...` and `statistics/...`."""
    flat = jax.tree_util.tree_leaves_with_path(jax.device_get(dict(parts)))
    return {_path(path): np.ascontiguousarray(leaf) for path, leaf in flat}


def _unnamed(parts: Mapping[str, Pytree], tensors: Mapping[str, np.ndarray], source: str) -> dict[str, Any]:
    """The tensors in the structure of `parts`, which has their shapes."""
    flat = jax.tree_util.tree_leaves_with_path(dict(parts))
    wanted = {_path(path): leaf for path, leaf in flat}
    wrong = [
        *(f"{name} is missing" for name in wanted if name not in tensors),
        *(f"{name} has no place" for name in tensors if name not in wanted),
        *(
            f"{name} is {tensors[name].shape}, not {leaf.shape}"
            for name, leaf in wanted.items()
            if name in tensors and tensors[name].shape != leaf.shape
        ),
    ]
    if wrong:
        raise WeightsError(f"{source}: its tensors are not those of its recipe: {'; '.join(wrong)}. Save it again.")
    return jax.tree_util.tree_map_with_path(lambda path, _: tensors[_path(path)], dict(parts))


def _path(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")
