"""Faults that are made to happen inside a training process, at given updates: the inner half of `multipod chaos`.

A folder joins the two halves: `faults.json` says what is to happen; each process writes what it let happen, before it
does, into `fired-RANK.jsonl`, and into `seen-RANK.jsonl` the examples that it gives to each update, before it begins,
and that the update is done. What has fired does not fire again in the process that takes over. Times there are of the
machine's monotonic clock, which all its processes share.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

Kind = Literal["kill", "stop", "slow", "cut", "fill-disk", "corrupt", "flip"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SMALL_FILE = 2000
"""Bytes of the largest file that a full disk takes: events a few, no checkpoint."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that goes wrong once.

    Attributes:
      kind: `kill` (SIGKILL), `stop` (SIGSTOP for `seconds`), `slow` (`seconds` more in each of 5 updates), `cut` (its
        network for `seconds`: its connections are shut, or, in a network namespace of its own, its link is taken
        down), `fill-disk` (files cannot grow for `seconds`; of all ranks), `corrupt` (flips a bit in the newest
        checkpoint, then as `kill`), `flip` (flips `bit` of a gradient's number).
      at: happens when so many updates are done.
      rank: to whom.
      seconds: how long.
      bit: of a float32: 31 the sign, 30 to 23 the exponent.
      sticky: the bit flips again when the update is done again, as a bad chip would have it.
    """

    kind: Kind
    at: int
    rank: int = 0
    seconds: float = 1.0
    bit: int = 30
    sticky: bool = False


class Injector:
    """The `Faults` of process `rank`, as `folder` says."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.sticky = False
        self._folder, self._rank, self._checkpoints = folder, rank, folder
        record = json.loads((folder / "faults.json").read_text())
        self.flips = any(fault["kind"] == "flip" for fault in record["faults"])
        self._link: str = record.get("link", "")
        self._attempt: int = record.get("attempt", 0)
        self._world = [self._attempt, 0]
        fired = {firing["fault"] for firing in records(folder / f"fired-{rank}.jsonl")}
        due = [(number, Fault(**fault)) for number, fault in enumerate(record["faults"]) if number not in fired]
        self._due = [(number, fault) for number, fault in due if fault.rank == rank or fault.kind == "fill-disk"]
        self._slow: list[float] = []

    def of_run(self, checkpoints: Path, world: int = 0) -> "Injector":
        """Notes where the run saves, and its world: there a bit may flip."""
        self._checkpoints, self._world = checkpoints, [self._attempt, world]
        return self

    def before(self, update: int, given: Callable[[], list[int]]) -> int:
        """Lets happen what is due, see `multipod.train.hooks.Faults`. Does not return where that ends the process."""
        self.sticky = False
        flip = 0
        for number, fault in [one for one in self._due if one[1].at <= update]:
            self._due.remove((number, fault))
            if fault.kind == "flip" and fault.at < update:
                continue  # the update that it was for is done
            note(
                self._folder / f"fired-{self._rank}.jsonl",
                {"fault": number, "update": update, **msgspec.to_builtins(fault)},
            )
            if fault.kind == "flip":
                flip, self.sticky = 1 + fault.bit, fault.sticky
            else:
                self._happen(fault)
        if self._slow:
            time.sleep(self._slow.pop())
        self._saw({"update": update + 1, "numbers": given()})
        return flip

    def after(self, update: int) -> None:
        """Notes that `update` updates are done."""
        self._saw({"update": update})

    def _saw(self, record: dict[str, Any]) -> None:
        note(self._folder / f"seen-{self._rank}.jsonl", {**record, "world": self._world})

    def _happen(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "corrupt":
                flip_newest(self._checkpoints)
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", wake], close_fds=True)  # of this group: it goes when the group is ended
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                self._slow = [fault.seconds] * 5
            case "fill-disk":
                fill_disk(fault.seconds)
            case "cut":
                cut(self._link, fault.seconds)


_DISK = threading.Lock()
"""Held while the limit on files is changed, and while a record is written in spite of it."""


def note(path: Path, record: dict[str, Any]) -> None:
    """Appends a line, in the kernel's hands when this returns: a SIGKILL loses nothing of it, nor does a full disk."""
    line = json.dumps({"t": time.monotonic(), **record}).encode() + b"\n"
    with _DISK:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        try:
            with open(path, "ab", buffering=0) as file:
                file.write(line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without one that was cut short; none of a file that is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def flip_newest(checkpoints: Path) -> Path | None:
    """Flips a bit in the middle of the largest file of the newest checkpoint; returns the file, None if there is none.

    A checkpoint that is not sealed yet is waited for, half a minute at most.
    """
    committed = sorted((int(path.name) for path in checkpoints.glob("*") if path.name.isdigit()), reverse=True)
    if not committed:
        return None
    folder, until_s = checkpoints / str(committed[0]), time.monotonic() + 30
    while not (folder / "checksums.json").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("checksums")]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    return largest


def fill_disk(seconds: float) -> None:
    """No file of this process grows beyond `SMALL_FILE` bytes for so long, as if the disk were full."""

    def limit(size: int) -> None:
        with _DISK:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit(SMALL_FILE)
    timer = threading.Timer(seconds, limit, (before,))
    timer.daemon = True
    timer.start()


def cut(link: str, seconds: float) -> None:
    """Takes the link down for so long; without a link of its own, shuts all of this process's network connections."""
    if link and shutil.which("ip"):
        subprocess.run(["ip", "link", "set", "dev", link, "down"], check=True)
        up = ["sh", "-c", f"sleep {seconds}; ip link set dev {link} up"]
        subprocess.Popen(up, stdout=subprocess.DEVNULL, start_new_session=True)  # also when this process is ended
        return
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
