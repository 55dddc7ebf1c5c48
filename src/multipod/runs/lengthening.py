"""Runs that are complete when they are resumed: told so, or made longer."""

import json
import re
import tomllib
from pathlib import Path

from multipod.errors import RunFolderError
from multipod.step.state import State
from multipod.train.events import Ended
from multipod.train.observers import jsonl
from multipod.train.run_folder import RunFolder, open_folder

UPDATES = re.compile(r"^updates = (\d+)$", re.MULTILINE)
"""The length in a recipe's text, whose own fields stand before those of its parts."""


def change_length(folder: RunFolder, updates: int, at: int | None = None) -> str:
    """Writes a new number of `updates` into the run's recipe and `run.json`; does nothing if it is the old one.

    The rate follows the new length from the checkpoint on, so a run that is made longer is not the run that would have
    been as long from the start. Returns nothing of interest: an empty text.

    Args:
      folder: of the run.
      updates: of the whole run.
      at: the checkpoint that it goes on from; None takes the newest.

    Raises:
      RunFolderError: more updates are done already.
    """
    recipe, (_, facts) = folder.recipe.read_text(), open_folder(folder.path)
    known = UPDATES.search(recipe)
    if known is None or int(known[1]) == updates:
        return ""
    done = newest_update(folder) if at is None else at
    if updates < done:
        raise RunFolderError(
            f"{folder.path} has done {done:,} updates, more than updates={updates}. Give at least {done}, or go on "
            "from an earlier checkpoint with --at."
        )
    overrides = [change for change in facts["overrides"] if not change.startswith("updates=")]
    _replace(folder.recipe, UPDATES.sub(f"updates = {updates}", recipe, count=1))
    _replace(folder.facts, json.dumps(facts | {"overrides": [*overrides, f"updates={updates}"]}, indent=1) + "\n")
    return ""


def newest_update(folder: RunFolder) -> int:
    """The number of updates of the newest checkpoint; 0 if there is none."""
    names = folder.checkpoints.iterdir() if folder.checkpoints.is_dir() else ()
    return max((int(path.name) for path in names if path.name.isdecimal()), default=0)


def complete_end(folder: RunFolder, state: State | None, target: str) -> Ended | None:
    """The end of a run that is complete and that `state` is the last of, after its last update or at its target.

    None if the run is to go on, also to another `target`.
    """
    if state is None or not folder.metrics.exists():
        return None
    records = jsonl.read(folder.metrics)
    last = jsonl.decode(records[-1]) if records else None
    if not isinstance(last, Ended) or last.interrupted or last.update != int(state.update):
        return None
    recipe = tomllib.loads(folder.recipe.read_text())
    told = [record["updates"] for record in records if record["event"] == "started"]
    longer = told[-1:] != [recipe["updates"]]
    further = last.update < recipe["updates"] and target != recipe.get("target", "")
    return None if longer or further else last


def complete_notice(folder: RunFolder, ended: Ended) -> str:
    """What to say of a complete run that was resumed."""
    return (
        f"{folder.path} is complete: all of its {ended.update:,} updates are done, and nothing was changed. "
        f"Train longer by: multipod train --resume {folder.path} --set updates={2 * ended.update}"
    )


def _replace(path: Path, text: str) -> None:
    """Writes a file in one move."""
    jsonl.replace_file(path, text.encode())
