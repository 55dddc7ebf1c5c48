"""Starts processes, and processes that wait, with all imported, for the place of one that ended.

Most of a restart is the start of Python, `import jax`, Orbax, the recipe's own packages, and then compiling: many
seconds on a busy machine. A `StandbyProcess` has that behind it, and has met the others that wait. It receives what it
is to run as one JSON line on the socket that later carries its beats. It costs the memory of a process that computes
nothing, and once the work of compiling.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from multipod.elastic.heartbeat import CONTROL_FD
from multipod.errors import ClusterError

STANDBY_VARIABLE = "MULTIPOD_STANDBY"
"""In the environment of a process that is to wait for what to run."""


def spawn_rank(
    number: int, command: Sequence[str], environment: Mapping[str, str], folder: str | None = None
) -> tuple[subprocess.Popen, socket.socket]:
    """Starts the process of a rank in a session of its own; returns it, and our end of the socket that it inherits.

    Rank 0 inherits stdout and stderr; those of the others are one pipe. It runs in `folder`, or where we are.

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
                cwd=folder,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


@dataclass(frozen=True)
class StandbyProcess:
    """A process that waits: what it was started with, and the socket over which its command comes."""

    process: subprocess.Popen
    socket: socket.socket
    environment: Mapping[str, str]

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Has it run `python -m multipod ...` in this environment; returns False if it has ended."""
        changed = {name: value for name, value in environment.items() if self.environment.get(name) != value}
        line = json.dumps({"arguments": list(command[3:]), "environment": changed})
        try:
            self.socket.sendall(line.encode() + b"\n")
        except OSError:
            return False
        return self.process.poll() is None

    @property
    def run_environment(self) -> dict[str, str]:
        """The environment of the process once it waits no more."""
        return {name: value for name, value in self.environment.items() if name != STANDBY_VARIABLE}

    def end(self) -> None:
        """Ends it, and what it started."""
        if self.process.poll() is None:  # else its number may be another's by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


class StandbyPool:
    """Standby processes, one for each rank. Leaving its context ends those that were not needed."""

    def __init__(self) -> None:
        self._waiting: list[StandbyProcess] = []

    def __enter__(self) -> "StandbyPool":
        return self

    def __exit__(self, *error: object) -> None:
        for standby in self._waiting:
            standby.end()

    def fill(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
        """Starts a process for every rank, with the command and the environment that it has now; once, until `take`.

        Raises:
          ClusterError: one could not be started.
        """
        if self._waiting:
            return
        for number, (command, environment) in enumerate(commands):
            waits = {**environment, STANDBY_VARIABLE: "1"}
            try:
                process, ours = spawn_rank(number, command, waits)
            except OSError as error:
                raise ClusterError(
                    f"a standby for rank {number} could not be started: {error}. See ulimit -a."
                ) from error
            self._waiting.append(StandbyProcess(process, ours, waits))

    def take(self) -> list[StandbyProcess] | None:
        """The processes that wait, in the order of their ranks; they are the caller's now.

        None if there are none, or if one of them has ended: they are joined, and the others are of no use without it.
        """
        waiting, self._waiting = self._waiting, []
        if waiting and all(standby.process.poll() is None for standby in waiting):
            return waiting
        for standby in waiting:
            standby.end()
        return None


def wait_for_command(descriptor: int) -> tuple[list[str], dict[str, str]] | None:
    """Waits, in the process itself, for the arguments and environment to run; None if the launcher has ended."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)  # no more than the line: what follows is for the heartbeat
        if not byte:
            return None
        line += byte
    command = json.loads(line)
    return command["arguments"], command["environment"]
