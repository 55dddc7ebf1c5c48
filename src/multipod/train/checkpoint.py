"""Saves and restores the state of a run with Orbax: in the background, sharded, committed by rename."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from multipod.errors import CheckpointError
from multipod.step.state import State
from multipod.train import multihost
from multipod.train.barriers import Barriers
from multipod.train.checksums import damaged_files, is_sealed, seal


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
        self._keep, self._read_only = keep, read_only
        self._number = 0
        self._manager = self._made()
        self._sealing: _Sealing | None = None

    def _made(self) -> ocp.CheckpointManager:
        self._number += 1
        self._barriers = Barriers(self._folder, self._number)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=not self._read_only,
            read_only=self._read_only,
            enable_async_checkpointing=not self._read_only,
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._barriers),
            cleanup_tmp_directories=not self._read_only,  # what a save that failed has left takes room
        )
        return ocp.CheckpointManager(self._folder.absolute(), options=options)

    def updates(self) -> list[int]:
        """The numbers of updates of which there is a checkpoint, increasing."""
        return sorted(self._manager.all_steps())

    def save(self, state: State, update: int) -> None:
        """Begins to save the state after `update` updates; returns when the arrays are copied from the devices.

        Raises:
          CheckpointError: on all processes, if this save, or the one before it, could not be written on one of them.
            A later one may be tried.
        """
        if update in self._manager.all_steps():
            return
        self.wait()
        self._agreed(self._no_room(state))
        problem: Exception | None = None
        try:
            self._manager.save(update, args=ocp.args.StandardSave(state._asdict()), force=True)
        except Exception as error:
            problem = error
            self._barriers.fail()
        self._agreed(problem)
        self._sealing = _Sealing(lambda: self._sealed(update))

    @property
    def has_failed(self) -> bool:
        """Whether it is known by now that the last save failed; does not wait. Each process knows only of itself."""
        return self._sealing is not None and self._sealing.error is not None

    def wait(self) -> None:
        """Returns when all saves are committed, and their checksums beside them.

        Raises:
          CheckpointError: on all processes, if one could not be written on one of them.
        """
        sealing, self._sealing = self._sealing, None
        if sealing is None:
            return
        sealing.join()
        self._agreed(sealing.error)

    def _sealed(self, update: int) -> None:
        """Waits for the commit, and writes the checksums of this process's share of the files; in a thread."""
        self._manager.wait_until_finished()
        folder, until_s = self._folder / str(update), time.monotonic() + COMMIT_S
        while not folder.is_dir() and time.monotonic() < until_s:
            time.sleep(0.05)
        process, processes = jax.process_index(), jax.process_count()
        if self._chips and process == 0:
            (folder / CHIPS).write_text(json.dumps(self._chips))
        seal(folder, process, processes)
        self._committed(update)

    def _agreed(self, error: Exception | None) -> None:
        """Raises on all processes, if there is an error on one."""
        told = multihost.gather_lines("" if error is None else _first_line(error))
        if told:
            self._renew()
            raise self._failed(error or OSError(told[0])) from error

    def _renew(self) -> None:
        """A manager whose save has failed raises the same error ever after."""
        self._barriers.fail()
        with suppress(Exception):
            self._manager.close()
        self._manager = self._made()

    def restore(
        self,
        shapes: State,
        update: int | None = None,
        instead: Callable[[str], None] | None = None,
        *,
        weights_only: bool = False,
    ) -> State:
        """The state after `update` updates (the newest if None), laid on the mesh as `shapes` says.

        With `instead`, a newest one that is damaged is put aside into the folder `damaged`, `instead` is told why,
        and the one before it is taken.

        Optimizer states that are local go to the devices of the chips that they are of; those of chips that
        are no more are left behind. Each process then reads all of them. With `weights_only` no optimizer state is
        read, and the state has None in its place: so any number of devices can evaluate what others trained.

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
        try:
            return self._restored(shapes, wanted, known, weights_only)
        except _Damaged as error:
            if instead is None or update is not None or len(known) == 1:
                raise CheckpointError(str(error)) from error
            first = str(error).splitlines()[0]
            instead(f"{first}\nGoing on from the one before it, {known[-2]}; {self._put_aside(wanted)}.")
            return self.restore(shapes, None, instead, weights_only=weights_only)

    def _restored(self, shapes: State, wanted: int, known: list[int], weights_only: bool) -> State:
        """The state of one checkpoint.

        Raises:
          _Damaged: its files are not those that were saved, or it has no checksums and cannot be read.
          CheckpointError: as of `restore`.
        """
        folder = self._folder / str(wanted)
        broken = multihost.gather_lines("; ".join(damaged_files(folder, jax.process_index(), jax.process_count())[:3]))
        if broken:
            raise _Damaged(self._damaged(wanted, known, ValueError("; ".join(broken))))
        rows = None if weights_only else self._rows(wanted)
        try:
            asked = shapes if rows is None else shapes._replace(optimizer=_whole(shapes.optimizer, len(rows[1])))
            restored = self._manager.restore(wanted, args=(_weights_of if weights_only else _all_of)(asked))
        except Exception as error:
            kind = CheckpointError if is_sealed(folder) else _Damaged
            raise kind(self._damaged(wanted, known, error)) from error
        state = State(**{"optimizer": None} | restored)
        if rows is not None:
            state = state._replace(optimizer=_taken(state.optimizer, shapes.optimizer, rows[0]))
        if int(state.update) != wanted:
            raise CheckpointError(self._damaged(wanted, known, ValueError(f"it says update {int(state.update)}")))
        return state

    def _put_aside(self, update: int) -> str:
        """Moves a checkpoint out of the way of a later save of the same number; returns where it lies."""
        aside = self._folder.parent / ASIDE
        if jax.process_index() == 0:
            aside.mkdir(exist_ok=True)
            number = sum(1 for _ in aside.glob(f"{update}*"))
            (self._folder / str(update)).rename(aside / (f"{update}-{number}" if number else str(update)))
        multihost.gather_lines("")  # nobody looks before it is moved
        self._manager.reload()
        return f"the damaged one lies in {aside}"

    def abandon(self) -> None:
        """Ends what is being written: the processes that it was begun with are no more."""
        self._barriers.leave()

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

    def _no_room(self, state: State) -> OSError | None:
        """What is wrong with the disk, before anything is written: a save that cannot fit."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + (1 << 16)
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            return error
        return OSError(f"it needs up to {needed / 1e6:.1f} MB") if free < needed else None

    def _damaged(self, update: int, known: list[int], error: Exception) -> str:
        first = _first_line(error)
        others = [other for other in known if other != update]
        way = f"Try --at {others[-1]}" if others else "There is no other: start the run again"
        return f"checkpoint {self._folder / str(update)} cannot be restored: {first}\n{way}. Nothing was changed."

    def _failed(self, error: Exception) -> CheckpointError:
        first = _first_line(error)
        free = shutil.disk_usage(self._folder).free if self._folder.exists() else 0
        kept = ", ".join(map(str, self.updates())) or "none"
        return CheckpointError(
            f"a checkpoint could not be written to {self._folder} ({free / 1e6:.1f} MB free): {first}\n"
            f"Saved before and still good: {kept}. Make room, then go on with --resume {self._folder.parent}."
        )


class _Damaged(CheckpointError):
    """A checkpoint whose files are not those that were saved; an older one may do."""


class _Sealing:
    """A thread that waits for a commit and seals it; its error is kept for the thread that trains."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="seal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # told by `Checkpoints.wait`
            self.error = error

    def join(self) -> None:
        """Returns when the work is done."""
        self._thread.join()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _all_of(shapes: State) -> Any:
    return ocp.args.StandardRestore(shapes._asdict())


def _weights_of(shapes: State) -> Any:
    """All but the optimizer's state, which may have any shapes."""
    asked = {name: part for name, part in shapes._asdict().items() if name != "optimizer"}
    how = ocp.checkpoint_utils.construct_restore_args(asked)
    return ocp.args.PyTreeRestore(item=asked, restore_args=how, partial_restore=True)


def _whole(shapes: Any, devices: int) -> Any:
    """Arrays of this host for all saved states."""
    return jax.tree.map(lambda leaf: np.empty((devices, *leaf.shape[1:]), leaf.dtype), shapes)


def _taken(states: Any, shapes: Any, rows: list[int]) -> Any:
    """Those of some devices, on the devices that go on with them."""

    def laid(states: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
        chosen = np.asarray(states)[rows]
        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: chosen[index])

    return jax.tree.map(laid, states, shapes)


CHIPS = "chips.json"
"""In a checkpoint with local states: the numbers of the chips that they are of, in the order of their rows."""

ASIDE = "damaged"
"""Beside the folder of checkpoints: where those go that were found damaged."""

COMMIT_S = 60.0
"""How long a process looks for the folder that another one commits, on a shared file system."""
