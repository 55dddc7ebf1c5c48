"""A run's copy in an object store: its records and its newest checkpoints, put there behind the updates.

The run itself stays in a folder: it is locked, appended to and renamed in, none of which an object store can do.
Objects are put whole or not at all, so a checkpoint is there when the last of its objects is, its checksums. A store
that is gone for a while is tried again until it is back; what lies in it already is only removed after something newer
is complete. Any store that `fsspec` knows will do.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import fsspec
import jax

from multipod.data.files.addresses import address_of
from multipod.errors import ClusterError, RunFolderError, first_line
from multipod.runs.request import TrainRequest
from multipod.train.checkpoints import checksums
from multipod.train.multihost import broadcast_from_0
from multipod.train.run_folder import RUNS, RunFolder, next_free

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Between two tries; the last one again and again."""

POLL_S = 0.05

LAST_S = 60.0
"""How long the end of a run waits for its copy."""

RECORDS = "recipe.toml", "metrics.jsonl", "metrics.csv", "report.html", "run.json"
"""Files of a run beside its checkpoints; `run.json` last, as in the folder itself."""


class StoredRun:
    """A run in an object store, at an address like `s3://bucket/runs/digits-001`.

    Raises:
      RunFolderError: nothing knows how to reach such an address.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._store, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise RunFolderError(f"{url}: {error}. Install multipod[remote], or see the address.") from error

    def updates(self) -> list[int]:
        """The numbers of the checkpoints that are complete here, increasing."""
        marks = self._store.glob(f"{self._root}/checkpoints/*/{checksums.name(0)}")
        return sorted(int(mark.split("/")[-2]) for mark in marks)

    def refuse_taken(self) -> None:
        """Refuses to put a new run where one is.

        Raises:
          RunFolderError: there is one, or the store cannot be reached.
        """
        try:
            taken = self._store.exists(f"{self._root}/run.json")
        except Exception as error:  # each store has errors of its own
            raise RunFolderError(f"{self.url} cannot be reached: {first_line(error)}. See the address.") from error
        if taken:
            raise RunFolderError(
                f"{self.url} holds a run already. Go on with it by --resume {self.url}, or choose another --copy-to."
            )

    def put_records(self, folder: RunFolder) -> None:
        """Copies the records of the run as they are now."""
        for name in RECORDS:
            if (folder.path / name).is_file():
                self._put(folder.path / name, name)

    def put_checkpoint(self, folder: RunFolder, update: int) -> None:
        """Copies a checkpoint that is sealed; its checksums last."""
        source, mark = folder.checkpoints / str(update), checksums.name(0)
        files = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
        for name in [name for name in files if name != mark] + [mark]:
            self._put(source / name, f"checkpoints/{update}/{name}")

    def drop_checkpoint(self, update: int) -> None:
        """Removes a checkpoint, its checksums first: so it is never half there."""
        place = f"{self._root}/checkpoints/{update}"
        self._store.rm_file(f"{place}/{checksums.name(0)}")
        for path in self._store.find(place):
            self._store.rm_file(path)

    def fetch(self, path: Path, at: int | None = None) -> None:
        """Copies the records, and the newest checkpoint or the one after `at` updates, into a new folder.

        Raises:
          RunFolderError: there is no run here, it has no such checkpoint, or the store cannot be reached.
        """
        try:
            known = self.updates()
            if not self._store.isfile(f"{self._root}/run.json") or not known:
                raise RunFolderError(f"there is no run with a checkpoint at {self.url}. See the address.")
            if at is not None and at not in known:
                raise RunFolderError(f"{self.url} has no checkpoint {at}. It has: {', '.join(map(str, known))}.")
            self._get(path, known[-1] if at is None else at)
        except RunFolderError:
            raise
        except Exception as error:  # each store has errors of its own
            shutil.rmtree(path, ignore_errors=True)
            raise RunFolderError(f"{self.url} cannot be read: {first_line(error)}. Try again.") from error

    def _get(self, path: Path, update: int) -> None:
        checkpoint = self._store.find(f"{self._root}/checkpoints/{update}")
        records = [f"{self._root}/{name}" for name in RECORDS]
        for remote in [*checkpoint, *filter(self._store.isfile, records)]:
            local = path / remote.removeprefix(self._root).lstrip("/")
            local.parent.mkdir(parents=True, exist_ok=True)
            self._store.get_file(remote, str(local))

    def _put(self, file: Path, name: str) -> None:
        self._store.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
        self._store.put_file(str(file), f"{self._root}/{name}")


class RunCopier:
    """Copies a run into a store from a thread of its own, the newest checkpoint first, while training goes on.

    A context: at its end all is copied that there is.

    Args:
      folder: of the run.
      stored: where to.
      keep: checkpoints that stay there.
      tell: given a line when the store fails, and when it is back.
      last_s: how long the end waits.
    """

    def __init__(
        self,
        folder: RunFolder,
        stored: StoredRun,
        keep: int,
        tell: Callable[[str], None],
        last_s: float = LAST_S,
    ) -> None:
        self._folder, self._stored, self._keep, self._tell = folder, stored, keep, tell
        self._last_s = last_s
        self._change = threading.Condition()
        self._due: tuple[int, int] | None = None
        self._ended = False
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="copy-run", daemon=True)

    def committed(self, update: int, parts: int) -> None:
        """Notes that a checkpoint is committed in the folder; it is complete when so many processes have sealed it."""
        with self._change:
            self._due = update, parts
            self._change.notify_all()

    def __enter__(self) -> Self:
        """Begins."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until all is copied.

        Raises:
          RunFolderError: it could not be in time; where something else goes wrong already, that is only told.
        """
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._thread.join(self._last_s)
        if not self._thread.is_alive() and not self._error:
            return
        line = (
            f"{self._stored.url} lacks the end of this run: {self._error or 'it took too long'}. What it had is still "
            f"there. Copy the rest by --resume {self._folder.path} --copy-to {self._stored.url}."
        )
        if kind is None:
            raise RunFolderError(line)
        self._tell(line)

    def _run(self) -> None:
        failures, done = 0, False
        while not done:
            with self._change:
                if not failures:
                    self._change.wait_for(lambda: self._due is not None or self._ended)
                due, last = self._due, self._ended
            try:
                self._copy(due)
            except Exception as error:  # each store has errors of its own
                self._note(first_line(error), failures)
                self._pause(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
                failures += 1
                continue
            if failures:
                self._tell(f"{self._stored.url} is back: copied")
            failures, self._error = 0, ""
            with self._change:
                if self._due == due:
                    self._due = None
                done = last and self._due is None

    def _note(self, reason: str, failures: int) -> None:
        self._error = reason
        if not failures:
            self._tell(f"NOT COPIED to {self._stored.url}: {reason}. Training goes on, and it is tried again")

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(POLL_S)
            if self._ended:
                until_s = min(until_s, time.monotonic() + PAUSES_S[1])

    def _copy(self, due: tuple[int, int] | None) -> None:
        """Copies the records, and a checkpoint if one is due; then removes what is one too many."""
        self._stored.put_records(self._folder)
        if due is None:
            return
        update, parts = due
        folder = self._folder.checkpoints / str(update)
        if not folder.is_dir():
            return  # a newer one has taken its place meanwhile
        if not all((folder / checksums.name(part)).is_file() for part in range(parts)):
            raise OSError(f"checkpoint {update} waits for another process")
        self._stored.put_checkpoint(self._folder, update)
        for old in self._stored.updates()[: -self._keep]:
            with suppress(FileNotFoundError):
                self._stored.drop_checkpoint(old)


@contextmanager
def copied(
    folder: RunFolder, request: TrainRequest, keep: int, tell: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Copies a run, if the request says where; gives what is told the number of each checkpoint that is complete.

    Raises:
      RunFolderError: the store was away too long at the end.
    """

    if not request.copy_to or jax.process_index() > 0:
        yield lambda update: None
        return

    with RunCopier(folder, StoredRun(request.copy_to), keep, tell) as copier:
        yield lambda update: copier.committed(update, jax.process_count())


class LeaderCopies:
    """Copies a run that survives: the first process of each world copies what is saved in it.

    A context, of a process: at its end all is copied that this process had to copy.

    Args:
      url: where to; empty copies nothing.
      keep: checkpoints that stay there.
      tell: as of `RunCopier`.
    """

    def __init__(self, url: str, keep: int, tell: Callable[[str], None]) -> None:
        self._stored = StoredRun(url) if url else None
        self._keep, self._tell = keep, tell
        self._open = ExitStack()
        self._copier: RunCopier | None = None

    def begin(self, new: bool) -> None:
        """Refuses to put a new run where one is.

        Raises:
          RunFolderError: there is one, or the store cannot be reached.
        """
        if self._stored is not None and new and jax.process_index() == 0:
            self._stored.refuse_taken()

    def of_world(self, folder: RunFolder) -> Callable[[int], None]:
        """What is told, in the world that this process is in now, of each checkpoint that is committed."""
        if self._stored is None or jax.process_index() > 0:
            return lambda update: None
        if self._copier is None:
            self._copier = self._open.enter_context(RunCopier(folder, self._stored, self._keep, self._tell))
        copier, parts = self._copier, jax.process_count()
        return lambda update: copier.committed(update, parts)

    def __enter__(self) -> Self:
        """Begins."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until all is copied; as of `RunCopier`."""
        self._open.__exit__(kind, error, trace)


def refuse_fetching(request: TrainRequest) -> None:
    """Refuses what a run that survives has no way for: its processes have no world yet in which one of them fetches.

    Raises:
      ClusterError: it is to go on from a copy in an object store.
    """
    url = "" if request.resume is None else address_of(str(request.resume))
    if url:
        raise ClusterError(
            f"launch --survive goes on with a run in a folder, not with {url}. A copy has the form of a folder: "
            f"bring it near (aws s3 sync {url} FOLDER), and give --resume FOLDER --copy-to {url}."
        )


def fetched(request: TrainRequest) -> TrainRequest:
    """A request to go on with a run in an object store as one to go on with it in a new folder, and to copy it back.

    Raises:
      RunFolderError: it cannot be read; or a new run is to be copied where one is, or where nothing can be.
    """
    url = "" if request.resume is None else address_of(str(request.resume))

    def reach() -> str:
        StoredRun(request.copy_to).refuse_taken()
        return ""

    if not url:
        if request.copy_to and request.resume is None:
            broadcast_from_0(reach)
        return request

    def fetch() -> str:
        path = next_free(RUNS, url.rstrip("/").rpartition("/")[2])
        StoredRun(url).fetch(path, request.at)
        return str(path)

    return replace(request, resume=Path(broadcast_from_0(fetch)), copy_to=request.copy_to or url)
