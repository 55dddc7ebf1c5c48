"""Saves and restores the state of a run with Orbax: in the background, sharded, committed by rename."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from multipod.errors import CheckpointError
from multipod.step.state import State


class Checkpoints:
    """The checkpoints of one run folder. All processes of a run call the same methods in the same order."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        read_only: bool = False,
        committed: Callable[[int], None] = lambda update: None,
    ) -> None:
        self._folder, self._committed = folder, committed
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
                    seal(self._folder / str(update))
                self._committed(update)
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, shapes: State, update: int | None = None) -> State:
        """The state after `update` updates (the newest if None), laid on the mesh as `shapes` says.

        Raises:
          CheckpointError: there is none, it is damaged, or it is of another model.
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
        try:
            restored = self._manager.restore(wanted, args=ocp.args.StandardRestore(shapes._asdict()))
        except Exception as error:
            raise CheckpointError(self._damaged(wanted, known, error)) from error
        state = State(**restored)
        if int(state.update) != wanted:
            raise CheckpointError(self._damaged(wanted, known, ValueError(f"it says update {int(state.update)}")))
        return state

    def close(self) -> None:
        """Frees the threads. Call `wait` first, to hear of errors."""
        self._manager.close()

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


CHECKSUMS = "checksums.json"


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
