"""Saves and restores the state of a run with Orbax: in the background, sharded, committed by rename."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from multipod.errors import CheckpointError
from multipod.step.state import State


class Checkpoints:
    """The checkpoints of one run folder. All processes of a run call the same methods in the same order.

    Args:
      folder: of all checkpoints.
      keep: how many stay.
      read_only: nothing is ever written.
      committed: told the number of each checkpoint that is complete.
      chips: where every device has an optimizer state of its own (`layout.local_state`), the number of each device's
        chip. It is saved with the states, so that a run may go on without some of the chips.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        read_only: bool = False,
        committed: Callable[[int], None] = lambda update: None,
        chips: Sequence[int] = (),
    ) -> None:
        self._folder, self._committed, self._chips = folder, committed, tuple(chips)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=not read_only,
            read_only=read_only,
            enable_async_checkpointing=not read_only,
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._unsealed: list[int] = []

    def updates(self) -> list[int]:
        """The numbers of updates of which there is a checkpoint, increasing."""
        return sorted(self._manager.all_steps())

    def save(self, state: State, update: int) -> None:
        """Begins to save the state after `update` updates; returns when the arrays are copied from the devices.

        Raises:
          CheckpointError: this save, or the one before it, could not be written.
        """
        if update in self._manager.all_steps():
            return
        self.wait()
        self._require_room(state)
        try:
            self._manager.save(update, args=ocp.args.StandardSave(state._asdict()), force=True)
        except Exception as error:
            raise self._failed(error) from error
        self._unsealed.append(update)

    def wait(self) -> None:
        """Returns when all saves are committed, and their checksums beside them.

        Raises:
          CheckpointError: one could not be written.
        """
        try:
            self._manager.wait_until_finished()
            while self._unsealed:
                update = self._unsealed.pop()
                if jax.process_index() == 0:
                    if self._chips:
                        (self._folder / str(update) / CHIPS).write_text(json.dumps(self._chips))
                    seal(self._folder / str(update))
                self._committed(update)
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, shapes: State, update: int | None = None) -> State:
        """The state after `update` updates (the newest if None), laid on the mesh as `shapes` says.

        Optimizer states that are local go to the devices of the chips that they are of; those of chips that
        are no more are left behind. Each process then reads all of them.

        Raises:
          CheckpointError: there is none, it is damaged, it is of another model, or a device's chip has no state in it.
        """
        known = self.updates()
        if not known:
            raise CheckpointError(
                f"{self._folder} holds no checkpoint: the run ended before its first. Start it again."
            )
        wanted = known[-1] if update is None else update
        if wanted not in known:
            raise CheckpointError(f"{self._folder} has no checkpoint {wanted}. It has: {', '.join(map(str, known))}.")
        broken = damaged_files(self._folder / str(wanted))
        if broken:
            raise CheckpointError(self._damaged(wanted, known, ValueError("; ".join(broken[:3]))))
        rows = self._rows(wanted)
        try:
            asked = shapes if rows is None else shapes._replace(optimizer=_whole(shapes.optimizer, len(rows[1])))
            restored = self._manager.restore(wanted, args=ocp.args.StandardRestore(asked._asdict()))
        except Exception as error:
            raise CheckpointError(self._damaged(wanted, known, error)) from error
        state = State(**restored)
        if rows is not None:
            state = state._replace(optimizer=_taken(state.optimizer, shapes.optimizer, rows[0]))
        if int(state.update) != wanted:
            raise CheckpointError(self._damaged(wanted, known, ValueError(f"it says update {int(state.update)}")))
        return state

    def close(self) -> None:
        """Frees the threads. Call `wait` first, to hear of errors."""
        self._manager.close()

    def _rows(self, update: int) -> tuple[list[int], list[int]] | None:
        """Which of the saved states each device goes on with, and whose all of them are; None if each keeps its own."""
        path = self._folder / str(update) / CHIPS
        if not self._chips or not path.is_file():
            return None
        saved = json.loads(path.read_text())
        if saved == list(self._chips):
            return None
        strangers = sorted(set(self._chips) - set(saved))
        if strangers:
            raise CheckpointError(
                f"{path.parent}: chips {', '.join(map(str, strangers[:8]))} have no optimizer state in it: it was "
                f"saved by chips {', '.join(map(str, saved))}. Go on without them (--fail), or with a sum that keeps "
                "one state for all."
            )
        return [saved.index(chip) for chip in self._chips], saved

    def _require_room(self, state: State) -> None:
        """Refuses a save that cannot fit, before anything is written."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + (1 << 16)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise self._failed(OSError(f"it needs up to {needed / 1e6:.1f} MB"))

    def _damaged(self, update: int, known: list[int], error: Exception) -> str:
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        others = [other for other in known if other != update]
        way = f"Try --at {others[-1]}" if others else "There is no other: start the run again"
        return f"checkpoint {self._folder / str(update)} cannot be restored: {first}\n{way}. Nothing was changed."

    def _failed(self, error: Exception) -> CheckpointError:
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        free = shutil.disk_usage(self._folder).free if self._folder.exists() else 0
        kept = ", ".join(map(str, self.updates())) or "none"
        return CheckpointError(
            f"a checkpoint could not be written to {self._folder} ({free / 1e6:.1f} MB free): {first}\n"
            f"Saved before and still good: {kept}. Make room, then go on with --resume {self._folder.parent}."
        )


def _whole(shapes: Any, devices: int) -> Any:
    """Arrays of this host for all saved states."""
    return jax.tree.map(lambda leaf: np.empty((devices, *leaf.shape[1:]), leaf.dtype), shapes)


def _taken(states: Any, shapes: Any, rows: list[int]) -> Any:
    """Those of some devices, on the devices that go on with them."""

    def laid(states: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
        chosen = np.asarray(states)[rows]
        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: chosen[index])

    return jax.tree.map(laid, states, shapes)


CHECKSUMS = "checksums.json"
CHIPS = "chips.json"
"""In a checkpoint with local states: the numbers of the chips that they are of, in the order of their rows."""


def seal(folder: Path) -> None:
    """Writes the size and the CRC-32 of every file of a committed checkpoint beside them.

    Orbax reads only the files it needs and notices no change of their bytes; a checkpoint that was
    copied, cut or flipped on the way must not be trained on. A checkpoint without this file (the
    process was killed between the two) is taken as it is.
    """
    part = folder / f"{CHECKSUMS}.part"
    part.write_text(json.dumps(_checksums(folder), indent=0))
    os.replace(part, folder / CHECKSUMS)


def damaged_files(folder: Path) -> list[str]:
    """What is wrong with the files of a sealed checkpoint: one line a file, nothing if all is well."""
    if not (folder / CHECKSUMS).is_file():
        return []
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
    except ValueError:
        return [f"{CHECKSUMS} is damaged"]
    found = _checksums(folder)
    return [
        f"{name} is missing" if name not in found else f"{name} has {found[name][0]} bytes that are not those saved"
        for name in expected
        if found.get(name) != expected[name]
    ]


def _checksums(folder: Path) -> dict[str, list[int]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(CHECKSUMS))
    return {str(file.relative_to(folder)): [file.stat().st_size, _crc(file)] for file in files}


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
