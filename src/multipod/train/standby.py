"""How the launcher starts a process, and processes that wait, with all imported, for the place of one that ended.

Most of a restart is the start of Python: `import jax`, Orbax, the recipe's own packages, seconds on a busy machine. A
`Warm` process has that behind it. It has made no devices, so it may join any world; what it is to run it hears as one
JSON line on the socket that later carries its beats. It costs the memory of a process that computes nothing.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from multipod.errors import ClusterError
from multipod.train.heartbeat import CONTROL_FD

WAITS = "MULTIPOD_STANDBY"
"""In the environment of a process that is to wait until it is told what to run."""


def spawned(
    number: int, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen, socket.socket]:
    """Starts the process of a rank in a session of its own; returns it, and our end of the socket that it inherits.

    Rank 0 inherits stdout and stderr; those of the others are one pipe.

    Raises:
      OSError: it could not be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                list(command),
                env={**environment, CONTROL_FD: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if number else None,
                stderr=subprocess.STDOUT if number else None,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


@dataclass(frozen=True)
class Warm:
    """A process that waits: what it was started with, and the socket on which it hears."""

    process: subprocess.Popen
    socket: socket.socket
    environment: Mapping[str, str]

    def begins(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Tells it to run `python -m multipod ...` in this environment; False if it is there no more."""
        changed = {name: value for name, value in environment.items() if self.environment.get(name) != value}
        line = json.dumps({"arguments": list(command[3:]), "environment": changed})
        try:
            self.socket.sendall(line.encode() + b"\n")
        except OSError:
            return False
        return self.process.poll() is None

    def end(self) -> None:
        """Ends it, and what it started."""
        if self.process.poll() is None:  # else its number may be another's by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Reserve:
    """Warm processes, one for each rank. Leaving its context ends those that were not needed."""

    def __init__(self) -> None:
        self._waiting: dict[int, Warm] = {}

    def __enter__(self) -> "Reserve":
        return self

    def __exit__(self, *error: object) -> None:
        for warm in self._waiting.values():
            warm.end()

    def fill(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
        """Starts a process for every rank that has none, with the command and the environment that it has now.

        Raises:
          ClusterError: one could not be started.
        """
        for number, (command, environment) in enumerate(commands):
            if number in self._waiting:
                continue
            waits = {**environment, WAITS: "1"}
            try:
                process, ours = spawned(number, command, waits)
            except OSError as error:
                raise ClusterError(
                    f"a standby for rank {number} could not be started: {error}. See ulimit -a."
                ) from error
            self._waiting[number] = Warm(process, ours, waits)

    def take(self, number: int) -> Warm | None:
        """The process that waits for this rank's place, if there is one; it is the caller's now."""
        return self._waiting.pop(number, None)


def told(descriptor: int) -> tuple[list[str], dict[str, str]] | None:
    """The process's side: waits for what it is to run, arguments and environment; None if the launcher has ended."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)  # no more than the line: what follows is for the heartbeat
        if not byte:
            return None
        line += byte
    said = json.loads(line)
    return said["arguments"], said["environment"]
