"""Starts the ranks of a run as processes, reads their beats, and ends what is left of them.

Every rank is in a session of its own, so that it can be ended with all the processes it started, and sends beats
(`multipod.elastic.heartbeat`) over an inherited socket. When the launcher itself dies, even by SIGKILL, that socket
closes and the ranks end by themselves.

What this cannot reach: a grandchild that moved to another session, and a rank that is stopped (SIGSTOP) while the
launcher is killed.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from multipod.elastic.heartbeat import Beat
from multipod.elastic.launcher.standby import StandbyProcess, spawn_rank
from multipod.errors import ClusterError

POLL_S = 0.05
KILL_S = 5.0  # after SIGKILL; longer only while the kernel itself holds a process
KEPT_LINES = 20
LONGEST_LINE = 1 << 16
LOST_PEER_NOISE = re.compile(
    r"[IWEF]\d{4} .* (coordination_service\w*|preemption_sync_manager)\.cc:\d+\]"
    r"|Additional GRPC error information from remote target coordination_service|:UNKNOWN:Error received from peer"
)
"""What JAX's C++ says in a process whose peer is gone. The launcher says it better: who, and why."""
LOST_PEER_LINE = "Terminating process because the JAX distributed service detected fatal errors"
"""What follows is the stack of a process that a peer's end ends."""

LineSink = Callable[[str], None]
"""Given each line that the launcher shows, without its line end."""


def print_to_stderr(line: str) -> None:
    """Writes the line to this process's stderr at once."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class WorkerCommand:
    """How to start one rank: its command and its whole environment; `standby` is a process that waits to run it.

    `place` says where it will be, as in `World.places`; empty on this host.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    standby: StandbyProcess | None = None
    place: str = ""


@dataclass(frozen=True)
class Rank:
    """One rank, as far as it is known. Times are seconds on the launcher's clock, which starts at 0.

    Attributes:
      number: its rank.
      pid: its process, which leads a group of the same number.
      last_beat_s: when the last beat came; before the first, when the rank was started.
      beat: the last one.
      code: how it ended, None while it runs: its exit code, or minus the signal.
      ended_s: when that was seen.
    """

    number: int
    pid: int
    last_beat_s: float = 0.0
    beat: Beat | None = None
    code: int | None = None
    ended_s: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.pid})"

    @property
    def activity(self) -> str:
        """What the rank was doing at its last beat; a dead rank may have gone on for `beat_s` after that."""
        if self.beat is None:
            return "starting"
        done = self.beat.update
        activities = {
            "updating": f"in update {done + 1}",
            "evaluating": f"evaluating after update {done}",
            "saving": f"saving after update {done}",
        }
        return activities.get(self.beat.phase, self.beat.phase)


@dataclass
class Channel:
    """Lines that arrive on a descriptor, which it owns and closes."""

    descriptor: int
    take: Callable[[str], None]
    rest: bytes = b""
    open: bool = True

    def __post_init__(self) -> None:
        os.set_blocking(self.descriptor, False)

    def read(self, most: int = 1) -> None:
        """Takes what has arrived, at most `most` times 64 KiB. `open` is False once the other end closed."""
        for _ in range(most):
            try:
                data = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:  # killed before it had read what was sent to it
                data = b""
            self.open = bool(data)
            *lines, self.rest = (self.rest + data).split(b"\n")
            if len(self.rest) > LONGEST_LINE or (self.rest and not data):
                lines, self.rest = [*lines, self.rest], b""
            for line in lines:
                self.take(line.decode(errors="replace"))
            if not data:
                return

    def close(self) -> None:
        """Takes what is left, and closes the descriptor."""
        if self.open:
            self.read(most=64)
        os.close(self.descriptor)


@dataclass
class ChildProcess:
    """A started rank: what is known of it, and what must be closed."""

    rank: Rank
    process: subprocess.Popen[bytes]
    started_s: float = 0.0
    channels: list[Channel] = field(default_factory=list)
    lost_peer: bool = False
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class WorkerProcesses:
    """The started ranks. Leaving its context ends them, however that happens.

    Invariant: no rank is reaped before that, so that until then its process number and its group's
    cannot pass to somebody else's process.
    """

    def __init__(self, show: LineSink) -> None:
        self.show = show
        self.children: list[ChildProcess] = []
        self.selector = selectors.DefaultSelector()
        self.clock_s = 0.0
        self._polled_s = time.monotonic()

    def __enter__(self) -> "WorkerProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal_groups(signal.SIGKILL)
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=KILL_S)
        until_s = time.monotonic() + 1.0  # where nobody reaps orphans, a dead grandchild stays listed
        while time.monotonic() < until_s and any(_group_exists(child.rank.pid) for child in self.children):
            time.sleep(0.01)
        self.selector.close()
        for child in self.children:
            for channel in child.channels:
                channel.close()

    def start(self, workers: Sequence[WorkerCommand]) -> None:
        """Starts the workers as ranks 0, 1, ...

        Raises:
          ClusterError: one could not be started.
        """
        for number, worker in enumerate(workers):
            try:
                self._start(number, worker)
            except OSError as error:
                raise ClusterError(
                    f"rank {number} could not be started: {error}. Check the command {worker.command[0]!r}, "
                    "and the limits on processes and open files (ulimit -a)."
                ) from error

    def restart(self, number: int, worker: WorkerCommand) -> None:
        """Starts another process for a rank whose process has ended."""
        gone = self.children[number]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(gone.rank.pid, signal.SIGKILL)  # what it started may have outlived it
        gone.process.wait(timeout=KILL_S)
        for channel in gone.channels:
            self._read(channel, most=64)
            if channel.open:
                self.selector.unregister(channel.descriptor)
            channel.close()
        self._start(number, worker)
        self.children[number] = self.children.pop()

    def send(self, number: int, line: str) -> None:
        """Sends a line to the rank; it is lost if the rank is gone."""
        with suppress(OSError):
            os.write(self.children[number].channels[0].descriptor, line.encode() + b"\n")

    def _start(self, number: int, worker: WorkerCommand) -> None:
        standby = worker.standby
        if standby is not None and standby.run(worker.command, worker.environment):
            process, ours = standby.process, standby.socket
        else:
            if standby is not None:
                standby.end()
            process, ours = spawn_rank(number, worker.command, worker.environment)
        child = ChildProcess(Rank(number, process.pid, last_beat_s=self.clock_s), process, self.clock_s)
        self.children.append(child)  # before anything else can fail: __exit__ ends what is listed
        self._open(child, ours.detach(), lambda line: self._receive(child, line))
        if process.stdout is not None:
            self._open(child, os.dup(process.stdout.fileno()), lambda line: self._show(child, line))
            process.stdout.close()

    def _open(self, child: ChildProcess, descriptor: int, take: Callable[[str], None]) -> None:
        channel = Channel(descriptor, take)
        child.channels.append(channel)
        self.selector.register(descriptor, selectors.EVENT_READ, channel)

    def _receive(self, child: ChildProcess, line: str) -> None:
        with suppress(ValueError, TypeError):  # a rank that was killed may leave half a line
            child.rank = replace(child.rank, beat=Beat(**json.loads(line)), last_beat_s=self.clock_s)

    def _show(self, child: ChildProcess, line: str) -> None:
        child.lines.append(line)
        child.lost_peer = child.lost_peer or LOST_PEER_LINE in line
        if not child.lost_peer and not LOST_PEER_NOISE.match(line):
            self.show(f"[rank {child.rank.number}] {line}")

    def last_lines(self, number: int) -> tuple[str, ...]:
        """What a rank said last, with what is still in its pipe: its end may be seen before its last words."""
        child = self.children[number]
        for channel in child.channels:
            self._read(channel, most=64)
        return tuple(child.lines)

    def poll(self) -> None:
        """Waits up to `POLL_S` for news, and takes in all there is."""
        events = self.selector.select(POLL_S)
        now_s = time.monotonic()
        # Time in which the launcher itself stood still (Ctrl-Z) is not held against the ranks.
        self.clock_s += min(now_s - self._polled_s, 1.0)
        self._polled_s = now_s
        for key, _ in events:
            self._read(key.data)
        for child in self.children:
            code = exit_code_of(child.rank.pid) if child.rank.code is None else None
            if code is not None:
                for channel in child.channels:  # its last words came before its end
                    self._read(channel, most=64)
                child.rank = replace(child.rank, code=code, ended_s=self.clock_s)

    def _read(self, channel: Channel, most: int = 1) -> None:
        if channel.open:
            channel.read(most)
            if not channel.open:
                self.selector.unregister(channel.descriptor)

    def kill(self, number: int) -> None:
        """Ends a rank at once, with what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.children[number].rank.pid, signal.SIGKILL)

    def ask_to_end(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Sends SIGTERM to what still runs, then waits for it up to `grace_s`, or until `hurry`."""
        if all(child.rank.code is not None for child in self.children):
            return
        self._signal_groups(signal.SIGTERM)
        self._signal_groups(signal.SIGCONT)  # a stopped process would not notice
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and not hurry() and any(child.rank.code is None for child in self.children):
            self.poll()

    def checkpoint(self) -> tuple[str, int | None]:
        """The run's folder and its last checkpoint, as the first rank that knows has said."""
        beats = [child.rank.beat for child in self.children if child.rank.beat is not None]
        folder = next((beat.folder for beat in beats if beat.folder), "")
        return folder, next((beat.saved for beat in beats if beat.saved is not None), None)

    def _signal_groups(self, number: signal.Signals) -> None:
        for child in self.children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.rank.pid, number)


def exit_code_of(pid: int) -> int | None:
    """The exit code of a child, or minus its signal, without reaping it; None while it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
