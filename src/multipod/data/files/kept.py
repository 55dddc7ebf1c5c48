"""Files made once from other files and kept in the user's cache: unpacked archives, tokens of texts."""

import fcntl
import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from multipod import runtime
from multipod.data.source import fingerprint
from multipod.errors import DataError

COMPRESSED = (".gz", ".tgz")
"""How the names of files end that are unpacked before they are read."""


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, a file or a folder, written by `make` if it is not there.

    `make` writes beside it, and what is whole is renamed, so nobody ever sees a part of it. Of several processes of a
    host one makes it, and the others wait for that; where the file system knows no locks each makes its own.

    Raises:
      DataError: the folder of the cache cannot be written, or the disk is full.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                _make(target, make)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written: {error.strerror or error}. Make room there, or set XDG_CACHE_HOME to a "
            "folder with room."
        ) from error
    return target


def unpacked(path: Path) -> Path:
    """A file that can be read by place: the file itself, or, if it is compressed by gzip, its content in the cache.

    Raises:
      DataError: it is not whole, or there is no room for its content.
    """
    if not path.name.endswith(COMPRESSED):
        return path
    facts = path.stat()
    key = fingerprint([str(path.resolve()).encode(), f"{facts.st_size} {facts.st_mtime_ns}".encode()])
    stem = path.name.removesuffix(".gz").removesuffix(".tgz")
    return made_once(runtime.index_cache().with_name("unpacked") / f"{key}-{stem}", lambda part: _unpack(path, part))


def _make(target: Path, make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
        part = Path(folder) / target.name
        make(part)
        os.replace(part, target)


def _unpack(path: Path, part: Path) -> None:
    with path.open("rb") as packed, part.open("wb") as out:
        try:
            with gzip.open(packed) as content:
                shutil.copyfileobj(content, out, 2**20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} cannot be unpacked: {error}. Copy it again, or leave it out.") from error


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Lets one process of this host in at a time."""
    with lock.open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
