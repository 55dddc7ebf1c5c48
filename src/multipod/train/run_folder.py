"""The folder of a run: what lies where, made once, read by `eval`, `report` and `--resume`."""

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multipod.data.files.addresses import address_of
from multipod.errors import RunFolderError
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import differences, to_text

FORMAT = "multipod-run-1"

RUNS = Path("runs")
"""Where new runs have their folders, unless they are told another."""

LENGTH = "updates:"
"""How the difference in length begins, which a run may have when it goes on."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. `run.json` is written last, so a folder without it was never complete."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe as TOML."""
        return self.path / "recipe.toml"

    @property
    def facts(self) -> Path:
        """How, where and with what the run began, as JSON."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """Every event, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Orbax checkpoints, one folder each, named by the number of updates."""
        return self.path / "checkpoints"


def next_free(base: Path, name: str) -> Path:
    """The first of `base/name-001`, `base/name-002`, ... that is not there."""
    number = 1
    while (base / f"{name}-{number:03d}").exists():
        number += 1
    return base / f"{name}-{number:03d}"


def create(path: Path, recipe: Recipe, facts: dict[str, Any]) -> RunFolder:
    """A new run folder at `path`.

    Raises:
      RunFolderError: something is there already, or it cannot be written.
    """
    refuse_remote(path)
    folder = RunFolder(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        go_on = f"Go on with the run in it by --resume {path}, or choose another --out."
        fresh = f"It is no run's: choose a folder that is not there yet, as --out {path / recipe.name}."
        raise RunFolderError(f"{path} is there already. {go_on if folder.facts.is_file() else fresh}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder.recipe.write_text(to_text(recipe))
        beside = folder.facts.with_suffix(".json.part")
        beside.write_text(json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")
        os.replace(beside, folder.facts)
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written: {error.strerror}. Choose another folder with --out."
        ) from error
    return folder


def open_folder(path: Path) -> tuple[RunFolder, dict[str, Any]]:
    """An existing run folder and its facts.

    Raises:
      RunFolderError: it is missing, is no run folder, or was never completed.
    """
    refuse_remote(path)
    folder = RunFolder(path)
    if not path.is_dir():
        raise RunFolderError(f"there is no run folder {path}.{_neighbours(path)}")
    missing = [file.name for file in (folder.recipe, folder.facts) if not file.is_file()]
    if missing:
        raise RunFolderError(
            f"{path} is no complete run folder: it has no {' and no '.join(missing)}. "
            "A run writes these before its first update; start a new run instead."
        )
    try:
        facts = json.loads(folder.facts.read_text())
        if facts["format"] != FORMAT:
            raise ValueError(f"its format is {facts['format']!r}, not {FORMAT!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder.facts} is damaged: {error}. Start a new run, or put the file back.") from error
    return folder, facts


def refuse_remote(path: Path) -> None:
    """Refuses a place in an object store: a run's folder is locked, appended to and renamed in, and these cannot be.

    Raises:
      RunFolderError: with the next move.
    """
    url = address_of(str(path))
    if url:
        raise RunFolderError(
            f"{url} is in an object store, and a run's folder must be in a file system: it is locked while the run "
            f"lives, and appended to. Choose a local folder with --out, and have it copied by --copy-to {url}; go on "
            "with such a copy by --resume."
        )


def check_same(folder: RunFolder, recipe: Recipe, *, learning: bool = True) -> None:
    """Refuses to go on with a run under another recipe; with `learning=False`, to look at it under another.

    The run may be made longer or shorter: see `multipod.runs.lengthening`.

    Raises:
      RunFolderError: with every difference.
    """
    try:
        changed = differences(folder.recipe.read_text(), to_text(recipe), learning=learning)
    except ValueError as error:
        raise RunFolderError(f"{folder.recipe} is damaged: {error}. Put the file back, or start a new run.") from error
    changed = [line for line in changed if not line.startswith(LENGTH)]
    if changed:
        raise RunFolderError(
            f"{folder.path} is a run of another recipe:\n  " + "\n  ".join(changed) + "\n"
            "Undo these changes to go on with it, or start a new run without --resume. What may change is its length, "
            "--set updates=N, and where it lies."
            + (f" Another layout goes on in a new folder: multipod train --from {folder.path}." * _only_lies(changed))
        )


def _only_lies(changed: list[str]) -> bool:
    return all(line.startswith(("layout.", "pipemare.", "accumulate:")) for line in changed)


def check_data(folder: RunFolder, facts: dict[str, Any], data: dict[str, str]) -> None:
    """Refuses to go on with a run on other data: its place in them would be another place.

    Raises:
      RunFolderError: with what the data were and what they are.
    """
    before = facts.get("data", {})
    changed = [
        f"{part}: {before[part]}, now {data[part]}" for part in data if before.get(part, data[part]) != data[part]
    ]
    if changed:
        raise RunFolderError(
            f"{folder.path} began on other data:\n  " + "\n  ".join(changed) + "\n"
            "Its checkpoints are whole. Put the data back to go on with it, or start a new run without --resume."
        )


def check_pipe(folder: RunFolder, facts: dict[str, Any], recipe: Recipe, mesh: dict[str, int]) -> None:
    """Refuses to go on with an asynchronous pipeline on another mesh: what is under way in it lies on its devices.

    Raises:
      RunFolderError: with the mesh that it needs; or of stages that are split otherwise.
    """
    before, pipeline = facts["mesh"], recipe.layout.pipeline
    if pipeline and pipeline.asynchronous and before != mesh:
        spelled = " ".join(f"{axis}={size}" for axis, size in before.items())
        raise RunFolderError(
            f"{folder.path}: micro-batches are under way in its {pipeline.schedule} pipeline, on a mesh of "
            f"{spelled}. Go on with --mesh {before['y']}x{before['x']} on as many devices as that."
        )
    if pipeline:
        split, layout = recipe.layout.split, tomllib.loads(folder.recipe.read_text())["layout"]
        if (layout.get("model", 1), layout.get("rules", [])) != (split.model, list(split.rules)):
            raise RunFolderError(
                f"{folder.path}: its stages were split by model={layout.get('model', 1)} and rules "
                f"{layout.get('rules', [])}, and its checkpoints are arranged so. Leave them as they are, or go on in "
                f"a new folder: multipod train --from {folder.path} --layout ..."
            )


def _neighbours(path: Path) -> str:
    """The newest runs beside `path`, or else in the folder where runs are by default."""
    for base in dict.fromkeys((path.parent, RUNS)):
        runs = sorted(p.parent for p in base.glob("*/run.json")) if base.is_dir() else []
        if runs:
            return f" Runs in {base}: {', '.join(run.name for run in runs[-8:])}."
    return " `multipod train RECIPE` makes one."
