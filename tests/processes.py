"""What tests need to run the command line in processes of its own."""

import os
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from multipod import runtime

CACHE = Path(tempfile.gettempdir()) / f"multipod-tests-{os.getuid()}"


def clean_environment() -> dict[str, str]:
    """The environment without what `runtime.prepare` wrote for this process; the tests' cache is shared."""
    ours = runtime.settings(8, runtime.Timeouts(), CACHE)
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"XDG_CACHE_HOME": str(CACHE), "COLUMNS": "100"}


@contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in `folder`, of which stderr is kept; killed at the end if it is still there."""
    process = subprocess.Popen(
        command, cwd=folder, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen[str], patience_s: float) -> str:
    """Asks it to stop, as Ctrl-C does, and waits for its end; returns what it said on stderr."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=patience_s)[1]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writing more into any file of this process is refused (EFBIG), as by a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disturb_with_garbage(pid: int) -> set[str]:
    """Sends nonsense to whatever the children of a process listen on; returns the addresses."""
    heard = set()
    try:
        listening = [c for p in psutil.Process(pid).children() for c in p.net_connections() if c.status == "LISTEN"]
    except psutil.Error:
        return heard
    for connection in listening:
        heard.add(connection.laddr.ip)
        for junk in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(999)):
            try:
                with socket.create_connection(tuple(connection.laddr), timeout=5) as stranger:
                    stranger.sendall(junk)
            except OSError:
                pass
    return heard
