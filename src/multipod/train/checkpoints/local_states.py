"""Optimizer states that every device has of its own, in a checkpoint: whose they are, and who goes on with them."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from multipod.errors import CheckpointError
from multipod.pytrees import OptState

CHIPS = "chips.json"
"""In a checkpoint with local states: the numbers of the chips that they are of, in the order of their rows."""


@dataclass(frozen=True)
class SavedRows:
    """The rows of the saved states that the devices of this run go on with, of `saved` in all."""

    rows: tuple[int, ...]
    saved: int

    def to_restore(self, shapes: OptState) -> OptState:
        """Arrays of this host for all saved states."""
        return jax.tree.map(lambda leaf: np.empty((self.saved, *leaf.shape[1:]), leaf.dtype), shapes)

    def pick(self, states: OptState, shapes: OptState) -> OptState:
        """The states of these rows, on the devices that go on with them."""

        def place(leaf: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
            picked = np.asarray(leaf)[list(self.rows)]
            return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: picked[index])

        return jax.tree.map(place, states, shapes)


def write_chips(folder: Path, chips: tuple[int, ...]) -> None:
    """Notes in a checkpoint the chips whose states it holds."""
    (folder / CHIPS).write_text(json.dumps(chips))


def find_rows(folder: Path, chips: tuple[int, ...]) -> SavedRows | None:
    """Which of the saved states the devices of these chips go on with; None if each keeps its own.

    Raises:
      CheckpointError: a chip has no state in the checkpoint.
    """
    path = folder / CHIPS
    if not chips or not path.is_file():
        return None
    saved = json.loads(path.read_text())
    if saved == list(chips):
        return None
    missing = sorted(set(chips) - set(saved))
    if missing:
        raise CheckpointError(
            f"{folder}: chips {', '.join(map(str, missing[:8]))} have no optimizer state in it: it was "
            f"saved by chips {', '.join(map(str, saved))}. Go on without them (--fail), or with a sum that keeps "
            "one state for all."
        )
    return SavedRows(tuple(saved.index(chip) for chip in chips), len(saved))
