"""Runs the processes of one training run, and ends all of them when one dies or is stuck.

`supervise` is the whole interface. It starts every rank in a session of its own, so that a rank can
be ended with all the processes it started. Each rank sends beats (`multipod.train.heartbeat`) over
an inherited socket; `judge` decides from these and from the exit codes, as a pure function. When
the launcher itself dies, even by SIGKILL, that socket closes and the ranks end by themselves.

What it cannot reach: a grandchild that moved to another session, and a rank that is stopped
(SIGSTOP) while the launcher is killed.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType

from multipod.errors import ClusterError, PeerLostError
from multipod.runtime import Timeouts
from multipod.train.heartbeat import Beat
from multipod.train.standby import Warm, spawned
from multipod.train.stop import NOTICES

POLL_S = 0.05
SETTLE_S = 0.5  # the ranks that lost a peer end within this of it: wait for all before naming one
START_S = 30.0  # starting Python on a loaded machine: no wait for a peer, so not below this for short time-outs
BEREFT_S = 0.5  # to end in, once a peer has died: nothing can be agreed on without it, so nothing saved
KILL_S = 5.0  # after SIGKILL; longer only while the kernel itself holds a process
SAME_PRESS_S = 0.3  # timeout(1) and others pass one signal on twice, to the process and to its group
KEPT_LINES = 20
LONGEST_LINE = 1 << 16

INTERRUPTED = 130
BEFORE_FIRST = "the run was interrupted before its first update"
_INTERRUPTED_CODES = (INTERRUPTED, -signal.SIGINT)
_VICTIM_CODES = (PeerLostError.exit_code, -signal.SIGABRT)

Relay = Callable[[str], None]
"""Given each line that the launcher shows, without its end."""


def to_stderr(line: str) -> None:
    """Writes the line to this process's stderr at once."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Worker:
    """How to start one rank: its command and its whole environment; `warm` is a process that waits to run it."""

    command: Sequence[str]
    environment: Mapping[str, str]
    warm: Warm | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      exit_code: 0, 1 for a failure, 130 for an interrupt.
      culprit: the rank that failed or is stuck; None if none did, or if it cannot be told.
      reason: a sentence without its full stop; empty if all went well.
      stuck: the culprit was alive; a longer time-out would have waited longer for it.
      lines: the last output of the culprit, oldest first; none for rank 0, whose output is not read.
      folder: the run's folder as the ranks told it; may be empty.
      saved: updates in the last checkpoint, None if there is none.
    """

    exit_code: int
    culprit: int | None = None
    reason: str = ""
    stuck: bool = False
    lines: tuple[str, ...] = ()
    folder: str = ""
    saved: int | None = None


@dataclass(frozen=True)
class Rank:
    """What is known of one rank. Times are seconds on the launcher's clock, which starts at 0.

    Attributes:
      number: its rank.
      pid: its process, which leads a group of the same number.
      heard_s: when the last beat came; the start before the first.
      beat: the last one.
      code: how it ended, None while it runs: its exit code, or minus the signal.
      ended_s: when that was seen.
    """

    number: int
    pid: int
    heard_s: float = 0.0
    beat: Beat | None = None
    code: int | None = None
    ended_s: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.pid})"

    @property
    def place(self) -> str:
        """What its last beat said that it was doing; a dead rank may have gone on for `beat_s` after that."""
        if self.beat is None:
            return "starting"
        done = self.beat.update
        places = {
            "updating": f"in update {done + 1}",
            "evaluating": f"evaluating after update {done}",
            "saving": f"saving after update {done}",
        }
        return places.get(self.beat.phase, self.beat.phase)


def supervise(
    workers: Sequence[Worker], timeouts: Timeouts, relay: Relay = to_stderr, settled: Callable[[], None] = lambda: None
) -> Outcome:
    """Runs all workers as ranks 0, 1, ... to their end; when it returns or raises, none of them is left.

    Rank 0 inherits stdout and stderr; what the others print is relayed as `[rank 1] ...`. Each worker
    finds the number of its socket in `MULTIPOD_CONTROL_FD`, and gets no standard input. The first
    SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 to this process is passed on to rank 0 as SIGINT, for the run to agree where to
    stop; the second ends all ranks at once. Signals are handled only when called from the main thread. `settled` is
    called once, when all are past their first update.

    Raises:
      ClusterError: a worker could not be started.
    """
    with signals() as presses, _Crew(relay) as crew:
        crew.start(workers)
        outcome = _watch(crew, timeouts, presses, settled)
        # Taken now: what a rank says when it is asked to end tells nothing of why it had to be.
        lines = () if outcome.culprit is None else crew.last_lines(outcome.culprit)
        bereft = outcome.exit_code == 1 and not outcome.stuck
        grace_s = min(BEREFT_S, timeouts.grace_s) if bereft else timeouts.grace_s
        crew.ask_to_end(grace_s, hurry=lambda: presses.count > 1 or outcome.reason == BEFORE_FIRST)
    folder, saved = crew.checkpoint()
    return replace(outcome, lines=lines, folder=folder, saved=saved)


def judge(ranks: Sequence[Rank], now_s: float, timeouts: Timeouts) -> Outcome | None:
    """How the run has ended, as far as can be told at `now_s`; None while it goes on."""
    running = [rank for rank in ranks if rank.code is None]
    stopped = [rank for rank in ranks if rank.code in _INTERRUPTED_CODES]
    failed = [rank for rank in ranks if rank.code not in (None, 0, *_INTERRUPTED_CODES)]
    if stopped and all(rank.code in _VICTIM_CODES for rank in failed):
        waited_s = now_s - min(rank.ended_s for rank in stopped)
        over = not running or waited_s > timeouts.silence_s
        return Outcome(INTERRUPTED, reason="the run was interrupted") if over else None
    if failed:
        waited_s = now_s - min(rank.ended_s for rank in failed)
        return _blame(failed) if not running or waited_s >= SETTLE_S else None
    if not running:
        return Outcome(0)
    return _silent(running, now_s, timeouts) or _stalled(running, now_s, timeouts)


def _blame(failed: Sequence[Rank]) -> Outcome:
    """The cause among ranks that failed together: a signal, else an error, else an abort, else a lost peer.

    SIGABRT comes after errors because JAX's coordination service aborts the healthy ranks.
    """

    def order(rank: Rank) -> tuple[int, float]:
        if rank.code in _VICTIM_CODES:
            return (3 if rank.code == PeerLostError.exit_code else 2), rank.ended_s
        return (0 if rank.code is not None and rank.code < 0 else 1), rank.ended_s

    culprit = min(failed, key=order)
    return Outcome(1, culprit.number, f"{culprit} {_ending(culprit.code or 0)}; last seen: {culprit.place}")


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    names = {member.value: member.name for member in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _silent(running: Sequence[Rank], now_s: float, timeouts: Timeouts) -> Outcome | None:
    """A rank without a sign of life: the one silent longest beyond what it is allowed."""

    def allowed_s(rank: Rank) -> float:
        if rank.beat is None:
            return max(START_S, timeouts.limit_s)
        if rank.beat.done:  # it may wait for the others at JAX's closing barrier
            return timeouts.collective_s + timeouts.grace_s
        return timeouts.silence_s

    rank = max(running, key=lambda rank: now_s - rank.heard_s - allowed_s(rank))
    silent_s = now_s - rank.heard_s
    if silent_s <= allowed_s(rank):
        return None
    if rank.beat is not None and rank.beat.done:
        reason = f"{rank} has done its last update, and has not exited for {silent_s:.0f} s"
    elif rank.beat is None:
        reason = f"{rank} gave no sign of life for {silent_s:.0f} s since its start"
    else:
        reason = f"{rank} gave no sign of life for {silent_s:.0f} s; last seen: {rank.place}"
    return Outcome(1, rank.number, reason, stuck=True)


def _stalled(running: Sequence[Rank], now_s: float, timeouts: Timeouts) -> Outcome | None:
    """All are alive, and for `no_progress_s` none has moved, while at least one waits in an update.

    The first update of a process does not count: it may hold compilation and connecting.
    """
    seen = [(rank, rank.beat) for rank in running if rank.beat is not None and not rank.beat.done]
    ages_s = [now_s - rank.heard_s + beat.age_s for rank, beat in seen]
    updating = [beat.phase == "updating" for _, beat in seen]
    first = any(beat.begun <= at_it for (_, beat), at_it in zip(seen, updating, strict=True))
    if len(seen) < len(running) or first or not any(updating) or min(ages_s) <= timeouts.no_progress_s:
        return None

    def position(at: tuple[Rank, Beat]) -> tuple[int, bool]:
        return at[1].update, at[1].phase == "updating"  # saving after update 5 comes before update 6

    lowest = min(map(position, seen))
    last = [rank for rank, beat in seen if position((rank, beat)) == lowest]
    if len(last) == len(seen) > 1:
        who, culprit = "all ranks", None
    elif len(last) > 1:
        who, culprit = "ranks " + ", ".join(str(rank.number) for rank in last), None
    else:
        who, culprit = str(last[0]), last[0].number
    others = ", and the others wait" if len(last) < len(seen) else ""
    reason = f"{who} made no progress for {min(ages_s):.0f} s while {last[0].place}{others}"
    return Outcome(1, culprit, reason, stuck=True)


@dataclass
class Presses:
    """How often the launcher was asked to stop."""

    count: int = 0
    last_s: float = float("-inf")

    def handle(self, number: int, frame: FrameType | None) -> None:
        """One signal; what follows at once is the same press."""
        now_s = time.monotonic()
        if now_s - self.last_s > SAME_PRESS_S:
            self.count += 1
        self.last_s = now_s


@contextmanager
def signals() -> Iterator[Presses]:
    """Counts the signals that ask for a stop; in the main thread only. The old handlers come back at the end."""
    presses = Presses()
    wanted = (signal.SIGINT, *NOTICES) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, presses.handle) for number in wanted}
    try:
        yield presses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(crew: "_Crew", timeouts: Timeouts, presses: Presses, settled: Callable[[], None]) -> Outcome:
    told = begun = False
    while True:
        crew.poll()
        if not begun and all(child.rank.beat is not None and child.rank.beat.begun > 1 for child in crew.children):
            begun = True
            settled()
        if presses.count > 1:
            return Outcome(INTERRUPTED, reason="the run was interrupted twice, and all processes were killed")
        if presses.count and not told:
            told = True
            first = crew.children[0].rank
            if first.beat is None or first.code is not None:  # nobody there to agree on anything, nothing to save
                return Outcome(INTERRUPTED, reason="the run was interrupted")
            if first.beat.phase in ("starting", "compiling") and not first.beat.begun:  # nothing that is not saved
                return Outcome(INTERRUPTED, reason=BEFORE_FIRST)
            os.kill(first.pid, signal.SIGINT)
        outcome = judge([child.rank for child in crew.children], crew.clock_s, timeouts)
        if outcome is not None:
            return outcome


@dataclass
class _Channel:
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
        if self.open:
            self.read(most=64)
        os.close(self.descriptor)


@dataclass
class _Child:
    """A started rank: what is known of it, and what must be closed."""

    rank: Rank
    process: subprocess.Popen[bytes]
    started_s: float = 0.0
    channels: list[_Channel] = field(default_factory=list)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class _Crew:
    """The started ranks. Leaving its context ends them, however that happens.

    Invariant: no rank is reaped before that, so that until then its process number and its group's
    cannot pass to somebody else's process.
    """

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.children: list[_Child] = []
        self.selector = selectors.DefaultSelector()
        self.clock_s = 0.0
        self._polled_s = time.monotonic()

    def __enter__(self) -> "_Crew":
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

    def start(self, workers: Sequence[Worker]) -> None:
        for number, worker in enumerate(workers):
            try:
                self._start(number, worker)
            except OSError as error:
                raise ClusterError(
                    f"rank {number} could not be started: {error}. Check the command {worker.command[0]!r}, "
                    "and the limits on processes and open files (ulimit -a)."
                ) from error

    def restart(self, number: int, worker: Worker) -> None:
        """Starts the rank anew, whose process has ended."""
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

    def say(self, number: int, line: str) -> None:
        """Sends a line to the rank; a rank that is gone does not hear it."""
        with suppress(OSError):
            os.write(self.children[number].channels[0].descriptor, line.encode() + b"\n")

    def _start(self, number: int, worker: Worker) -> None:
        warm = worker.warm
        if warm is not None and warm.begins(worker.command, worker.environment):
            process, ours = warm.process, warm.socket
        else:
            if warm is not None:
                warm.end()
            process, ours = spawned(number, worker.command, worker.environment)
        child = _Child(Rank(number, process.pid, heard_s=self.clock_s), process, self.clock_s)
        self.children.append(child)  # before anything else can fail: __exit__ ends what is listed
        self._open(child, ours.detach(), lambda line: self._hear(child, line))
        if process.stdout is not None:
            self._open(child, os.dup(process.stdout.fileno()), lambda line: self._show(child, line))
            process.stdout.close()

    def _open(self, child: _Child, descriptor: int, take: Callable[[str], None]) -> None:
        channel = _Channel(descriptor, take)
        child.channels.append(channel)
        self.selector.register(descriptor, selectors.EVENT_READ, channel)

    def _hear(self, child: _Child, line: str) -> None:
        with suppress(ValueError, TypeError):  # a rank that was killed may leave half a line
            child.rank = replace(child.rank, beat=Beat(**json.loads(line)), heard_s=self.clock_s)

    def _show(self, child: _Child, line: str) -> None:
        child.lines.append(line)
        self.relay(f"[rank {child.rank.number}] {line}")

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
            code = _exit_code(child.rank.pid) if child.rank.code is None else None
            if code is not None:
                for channel in child.channels:  # its last words came before its end
                    self._read(channel, most=64)
                child.rank = replace(child.rank, code=code, ended_s=self.clock_s)

    def _read(self, channel: _Channel, most: int = 1) -> None:
        if channel.open:
            channel.read(most)
            if not channel.open:
                self.selector.unregister(channel.descriptor)

    def ask_to_end(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """SIGTERM to what still runs, then waits up to `grace_s` of it, or until `hurry`."""
        if all(child.rank.code is not None for child in self.children):
            return
        self._signal_groups(signal.SIGTERM)
        self._signal_groups(signal.SIGCONT)  # a stopped process would not notice
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and not hurry() and any(child.rank.code is None for child in self.children):
            self.poll()

    def checkpoint(self) -> tuple[str, int | None]:
        """The run's folder and its last checkpoint, as told by the first rank that knows."""
        beats = [child.rank.beat for child in self.children if child.rank.beat is not None]
        folder = next((beat.folder for beat in beats if beat.folder), "")
        return folder, next((beat.saved for beat in beats if beat.saved is not None), None)

    def _signal_groups(self, number: signal.Signals) -> None:
        for child in self.children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.rank.pid, number)


def _exit_code(pid: int) -> int | None:
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
