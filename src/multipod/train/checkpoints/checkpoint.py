"""Saves and restores the state of a run with Orbax: in the background, sharded, committed by rename."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from multipod.errors import CheckpointError, first_line
from multipod.layout.shares import Share
from multipod.step.specs import arrays_of
from multipod.step.state import State
from multipod.train import multihost
from multipod.train.barriers import Barriers
from multipod.train.checkpoints.checksums import damaged_files, is_sealed, seal
from multipod.train.checkpoints.flat_tensors import SavedShares, read_shares, shares_of, write_shares
from multipod.train.checkpoints.handlers import make_handlers
from multipod.train.checkpoints.local_states import find_rows, write_chips


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
        self._manager = self._open()
        self._sealing: _Sealing | None = None

    def _open(self) -> ocp.CheckpointManager:
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
        return ocp.CheckpointManager(self._folder.absolute(), options=options, handler_registry=make_handlers())

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
        self._raise_on_all(_check_room(self._folder, state))
        problem: Exception | None = None
        try:
            self._manager.save(update, args=ocp.args.PyTreeSave(arrays_of(state._asdict())), force=True)
        except Exception as error:
            problem = error
            self._barriers.fail()
        self._raise_on_all(problem)
        shares = shares_of(state._asdict())
        self._sealing = _Sealing(lambda: self._commit(update, shares))

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
        self._raise_on_all(sealing.error)

    def _commit(self, update: int, shares: Mapping[str, Share]) -> None:
        """Waits for the commit, and writes the checksums of this process's share of the files; in a thread."""
        self._manager.wait_until_finished()
        folder, until_s = self._folder / str(update), time.monotonic() + COMMIT_S
        while not folder.is_dir() and time.monotonic() < until_s:
            time.sleep(0.05)
        process, processes = jax.process_index(), jax.process_count()
        if self._chips and process == 0:
            write_chips(folder, self._chips)
        if process == 0:
            write_shares(folder, shares)
        seal(folder, process, processes)
        self._committed(update)

    def _raise_on_all(self, error: Exception | None) -> None:
        """Raises on all processes, if there is an error on one."""
        reasons = multihost.gather_lines("" if error is None else first_line(error))
        if reasons:
            self._renew()
            raise CheckpointError(
                _describe_failure(self._folder, self.updates(), error or OSError(reasons[0]))
            ) from error

    def _renew(self) -> None:
        """A manager whose save has failed raises the same error ever after."""
        self._barriers.fail()
        with suppress(Exception):
            self._manager.close()
        self._manager = self._open()

    def restore(
        self,
        shapes: State,
        update: int | None = None,
        on_damage: Callable[[str], None] | None = None,
        *,
        weights_only: bool = False,
    ) -> State:
        """The state after `update` updates (the newest if None), laid on the mesh as `shapes` says.

        With `on_damage`, a newest one that is damaged is put aside into the folder `damaged`, `on_damage` is told why,
        and the one before it is taken.

        Tensors that were kept in another way than `shapes` keeps them (whole, or flat for other devices) pass through
        the memory of each process. Optimizer states that are local go to the devices of the chips that they are of;
        those of chips that are no more are left behind. Each process then reads all of them. With `weights_only` no
        optimizer state is read, and the state has None in its place: so any number of devices can evaluate what others
        trained.

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
            return self._restore(shapes, wanted, known, weights_only)
        except _Damaged as error:
            if on_damage is None or update is not None or len(known) == 1:
                raise CheckpointError(str(error)) from error
            first = str(error).splitlines()[0]
            on_damage(f"{first}\nGoing on from the one before it, {known[-2]}; {self._put_aside(wanted)}.")
            return self.restore(shapes, None, on_damage, weights_only=weights_only)

    def _restore(self, shapes: State, wanted: int, known: list[int], weights_only: bool) -> State:
        """Reads the state of one checkpoint.

        Raises:
          _Damaged: its files are not those that were saved, or it has no checksums and cannot be read.
          CheckpointError: see `restore`.
        """
        folder = self._folder / str(wanted)
        broken = multihost.gather_lines("; ".join(damaged_files(folder, jax.process_index(), jax.process_count())[:3]))
        if broken:
            raise _Damaged(_describe_damage(self._folder, wanted, known, ValueError("; ".join(broken))))
        rows = None if weights_only else find_rows(folder, self._chips)
        try:
            asked = shapes if rows is None else shapes._replace(optimizer=rows.to_restore(shapes.optimizer))
            parts = {name: part for name, part in asked._asdict().items() if not weights_only or name != "optimizer"}
            saved = SavedShares(read_shares(folder), parts)
            how = _restore_some if weights_only else ocp.args.StandardRestore
            restored = saved.place(self._manager.restore(wanted, args=how(saved.to_restore())))
        except Exception as error:
            kind = CheckpointError if is_sealed(folder) else _Damaged
            raise kind(_describe_damage(self._folder, wanted, known, error)) from error
        state = State(**{"optimizer": None} | restored)
        if rows is not None:
            state = state._replace(optimizer=rows.pick(state.optimizer, shapes.optimizer))
        if int(state.update) != wanted:
            raise CheckpointError(
                _describe_damage(self._folder, wanted, known, ValueError(f"it says update {int(state.update)}"))
            )
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


def _check_room(folder: Path, state: State) -> OSError | None:
    """What is wrong with the disk, before anything is written: a save that cannot fit."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + (1 << 16)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error
    return OSError(f"it needs up to {needed / 1e6:.1f} MB") if free < needed else None


def _describe_damage(folder: Path, update: int, known: list[int], error: Exception) -> str:
    """Why a checkpoint of `folder` cannot be restored, and the next move."""
    others = [other for other in known if other != update]
    way = f"Try --at {others[-1]}" if others else "There is no other: start the run again"
    return f"checkpoint {folder / str(update)} cannot be restored: {first_line(error)}\n{way}. Nothing was changed."


def _describe_failure(folder: Path, saved: list[int], error: Exception) -> str:
    """Why a checkpoint could not be written to `folder`, and the next move."""
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return (
        f"a checkpoint could not be written to {folder} ({free / 1e6:.1f} MB free): {first_line(error)}\n"
        f"Saved before and still good: {', '.join(map(str, saved)) or 'none'}. "
        f"Make room, then go on with --resume {folder.parent}."
    )


def _restore_some(asked: dict[str, Any]) -> Any:
    """Restores these parts of a state; the others may have any shapes."""
    how = ocp.checkpoint_utils.construct_restore_args(asked)
    return ocp.args.PyTreeRestore(item=asked, restore_args=how, partial_restore=True)


ASIDE = "damaged"
"""Beside the folder of checkpoints: where those go that were found damaged."""

COMMIT_S = 60.0
"""How long a process looks for the folder that another one commits, on a shared file system."""
