"""One writer for a run folder: a second process is told who holds it. Nothing is left behind by a process that dies.

Two signs, neither of them a time of day, so that clocks may jump. The kernel's lock on the file (`flock`) ends with
its process, however that dies, and is seen by other hosts where the file system carries it there (NFS 4, Lustre with
`flock`). Where it does not, the file itself is touched each second, and a second host looks whether that goes on.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from multipod.errors import RunFolderError

LOCK = "owner.json"
BEAT_S = 1.0
WATCH_S = 3.5
"""How long a second host watches the file of an owner elsewhere; longer than a few beats."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """A run folder that this process alone writes, until `release` or its death."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._released = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._beats.start()

    def release(self) -> None:
        """Lets others in; later calls do nothing."""
        if self._released.is_set():
            return
        self._released.set()
        self._beats.join()
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with suppress(OSError):  # a disk that is gone for a while is not this thread's business
                os.utime(self._descriptor)


def hold(folder: Path, command: str, sleep: Callable[[float], None] = time.sleep) -> RunLock:
    """Takes the folder for this process. A file that a dead owner left is taken over.

    Raises:
      RunFolderError: a run that is alive holds it, with its host, process and command; or it cannot be written.
    """
    path = folder / LOCK
    try:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _take(path, descriptor, sleep)
                current = _same_file(path, descriptor)
                if current:
                    _write(descriptor, command)
                    return RunLock(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its owner removed it between our opening and our locking
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}. Make the folder writable.") from error


def _take(path: Path, descriptor: int, sleep: Callable[[float], None]) -> None:
    owner = _owner(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        raise _taken(path, _owner(descriptor)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        locked = False
    here = owner.get("host") == socket.gethostname()
    if not owner or (locked and here):
        return
    if here:
        if _lives(owner):
            raise _taken(path, owner)
        return
    before = os.fstat(descriptor).st_mtime_ns
    sleep(WATCH_S)
    if os.stat(path).st_mtime_ns != before:
        raise _taken(path, owner)


def _owner(descriptor: int) -> dict[str, object]:
    with suppress(ValueError):
        read = json.loads(os.pread(descriptor, 65536, 0) or b"{}")
        return read if isinstance(read, dict) else {}
    return {}


def _taken(path: Path, owner: dict[str, object]) -> RunFolderError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    return RunFolderError(
        f"{path.parent} is held by a run that is alive: {who}, `{owner.get('command', '?')}`. "
        "Stop that one first (it saves when it gets SIGTERM), or start a new run with another --out."
    )


def _write(descriptor: int, command: str) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid()), "command": command}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)


def _lives(owner: dict[str, object]) -> bool:
    """Whether the owner's process is there and is not another one of the same number."""
    pid = owner.get("pid")
    return isinstance(pid, int) and _began(pid) is not None and _began(pid) == owner.get("began")


def _began(pid: int) -> int | None:
    """When a process began, in ticks since the machine did: field 22 of /proc/PID/stat; None if it is not there."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
