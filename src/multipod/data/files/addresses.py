"""Files behind an address such as `s3://bucket/train-*`: brought near once, into the user's cache, and read from there.

Examples are read in any order, by their places in files that are mapped into memory, which a store cannot do. What is
near is known by the store's own mark of the content: what changed there is another file here.
"""

import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from multipod import runtime
from multipod.data.files.kept import made_once
from multipod.data.source import fingerprint
from multipod.errors import DataError, first_line

_ADDRESS = re.compile(r"(?!hub:)([a-z][a-z0-9+.-]+):/+")  # one slash is left where it has been a Path
AT_ONCE = 8
"""Files that are fetched side by side."""
PAUSES_S = (0.5, 2.0)
"""Between two tries of a file."""


_MARKS = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "updated", "mtime")
"""What stores call the mark of a file's content, or else the time when it was written."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store.

    Attributes:
      path: where it is there.
      size: in bytes; None if the store does not say.
      near: where it is kept here.
    """

    store: Any
    path: str
    size: int | None
    near: Path


def address_of(where: str) -> str:
    """The address that a text stands for, `s3:/b` (which is what a `Path` makes of one) too; empty if it is a path."""
    scheme = _ADDRESS.match(where)
    return f"{scheme[1]}://{where[scheme.end() :]}" if scheme else ""


def refuse_address(where: str) -> None:
    """Refuses an address where a folder is wanted, of which nobody knows which files will be read.

    Raises:
      DataError: says how to bring the files near.
    """
    address = address_of(where)
    if address:
        scheme = address.partition(":")[0]
        copy = {"s3": "aws s3 sync", "gs": "gcloud storage rsync -r"}.get(scheme, "rclone copy")
        raise DataError(
            f"{where}: a folder is read from disks, file by file, and this is an address. Copy it near ({copy} ...), "
            "or mount the store (mountpoint-s3, gcsfuse), and name that folder."
        )


def find_files(address: str) -> list[RemoteFile]:
    """The files behind an address, or a pattern of addresses, in the order of their names; none if there are none.

    Raises:
      DataError: the store cannot be reached.
    """
    try:
        store, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
        there = store.glob(path, detail=True)
    except (ImportError, ValueError) as error:
        raise DataError(f"{address}: {error}. Install multipod[remote], or see the address.") from error
    except Exception as error:  # each store has errors of its own
        raise DataError(f"{address} cannot be reached: {first_line(error)}. See it, and who you are.") from error
    return [_remote_file(store, one, facts) for one, facts in sorted(there.items()) if facts["type"] == "file"]


def bring_near(files: Sequence[RemoteFile]) -> list[Path]:
    """Fetches the files that are not in the cache, each by one process of a host; says on stderr what it brings.

    Raises:
      DataError: a file came in part or not at all, or the disk has no room for them.
    """
    wanted = [file for file in files if not file.near.exists()]
    if wanted:
        _announce(wanted)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda file: made_once(file.near, partial(_fetch, file)), files))


def _remote_file(store: Any, path: str, facts: Mapping[str, Any]) -> RemoteFile:
    mark = next((str(facts[name]) for name in _MARKS if facts.get(name)), "")
    key = fingerprint([text.encode() for text in (store.unstrip_protocol(path), str(facts.get("size")), mark)])
    near = runtime.index_cache().with_name("fetched") / key / path.rpartition("/")[2]
    return RemoteFile(store, path, facts.get("size"), near)


def _announce(wanted: Sequence[RemoteFile]) -> None:
    """Says what is brought, if there is room for it."""
    size, cache = sum(file.size or 0 for file in wanted), wanted[0].near.parent.parent
    named = wanted[0].path + (f" and {len(wanted) - 1:,} more" if wanted[1:] else "")
    near = cache
    while not near.exists():
        near = near.parent
    free = shutil.disk_usage(near).free
    if size > free:
        raise DataError(
            f"{named}: {size:,} bytes are to be kept in {cache}, which has room for {free:,}. Set XDG_CACHE_HOME to "
            "a folder with room, or mount the store (mountpoint-s3, gcsfuse) and name that folder."
        )
    print(f"{named}: bringing {size:,} bytes into {cache}", file=sys.stderr, flush=True)


def _fetch(file: RemoteFile, part: Path) -> None:
    """Writes a file of the store to `part`, whole; tries again where it comes in part or not at all."""
    for pause_s in (*PAUSES_S, None):
        try:
            file.store.get_file(file.path, str(part))
            came = part.stat().st_size
            if file.size is not None and came != file.size:
                raise OSError(f"{came:,} of {file.size:,} bytes came")
        except Exception as error:  # each store has errors of its own
            if pause_s is None:
                raise DataError(f"{file.path} cannot be fetched: {first_line(error)}. Try again.") from error
            time.sleep(pause_s)
        else:
            return
