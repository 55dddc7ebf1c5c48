"""Runs the processes of one training run, and ends all of them when one dies or is stuck.

`supervise` is the whole interface. It starts the ranks as `WorkerProcesses`; `judge` decides from their beats and exit
codes, as a pure function.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from multipod.elastic.heartbeat import Beat
from multipod.elastic.launcher.processes import LineSink, Rank, WorkerCommand, WorkerProcesses, print_to_stderr
from multipod.errors import PeerLostError
from multipod.runtime import Timeouts
from multipod.train.stop import NOTICES

SETTLE_S = 0.5  # the ranks that lost a peer end within this of it: wait for all before naming one
START_S = 60.0  # starting Python from a cold disk, machine busy: no wait for a peer, so no less for short time-outs
LOST_PEER_S = 0.5  # to end in, once a peer has died: nothing can be agreed on without it, so nothing saved
SAME_PRESS_S = 0.3  # timeout(1) and others pass one signal on twice, to the process and to its group

INTERRUPTED = 130
REFUSED = 2
"""What every error exits with that the user can cause (`MultipodError`), and a wrong command line."""
BEFORE_FIRST = "the run was interrupted before its first update"
_INTERRUPTED_CODES = (INTERRUPTED, -signal.SIGINT)
_VICTIM_CODES = (PeerLostError.exit_code, -signal.SIGABRT)


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
      exit_code: 0, 1 for a failure, 2 for a refusal, which no further start would change, 130 for an interrupt.
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


def supervise(
    workers: Sequence[WorkerCommand],
    timeouts: Timeouts,
    show: LineSink = print_to_stderr,
    settled: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """Runs all workers as ranks 0, 1, ... to their end; when it returns or raises, none of them is left.

    Rank 0 inherits stdout and stderr; what the others print is shown as `[rank 1] ...`. Each worker
    finds the number of its socket in `MULTIPOD_CONTROL_FD`, and gets no standard input. The first
    SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 to this process is passed on to rank 0 as SIGINT, for the run to agree where to
    stop; the second ends all ranks at once. Signals are handled only when called from the main thread. `settled` is
    called once, when all are past their first update.

    Raises:
      ClusterError: a worker could not be started.
    """
    with count_signals() as stops, WorkerProcesses(show) as processes:
        processes.start(workers)
        outcome = _watch(processes, timeouts, stops, settled)
        # Taken now: what a rank says when it is asked to end tells nothing of why it had to be.
        lines = () if outcome.culprit is None else processes.last_lines(outcome.culprit)
        lost_peer = outcome.exit_code in (1, REFUSED) and not outcome.stuck
        grace_s = min(LOST_PEER_S, timeouts.grace_s) if lost_peer else timeouts.grace_s
        processes.ask_to_end(grace_s, hurry=lambda: stops.count > 1 or outcome.reason == BEFORE_FIRST)
    folder, saved = processes.checkpoint()
    return replace(outcome, lines=lines, folder=folder, saved=saved)


def judge(ranks: Sequence[Rank], now_s: float, timeouts: Timeouts) -> RunOutcome | None:
    """How the run has ended, as far as can be told at `now_s`; None while it goes on."""
    running = [rank for rank in ranks if rank.code is None]
    stopped = [rank for rank in ranks if rank.code in _INTERRUPTED_CODES]
    failed = [rank for rank in ranks if rank.code not in (None, 0, *_INTERRUPTED_CODES)]
    if stopped and all(rank.code in _VICTIM_CODES for rank in failed):
        waited_s = now_s - min(rank.ended_s for rank in stopped)
        over = not running or waited_s > timeouts.silence_s
        return RunOutcome(INTERRUPTED, reason="the run was interrupted") if over else None
    if failed:
        waited_s = now_s - min(rank.ended_s for rank in failed)
        return blame(failed) if not running or waited_s >= SETTLE_S else None
    if not running:
        return RunOutcome(0)
    return find_silent_rank(running, now_s, timeouts) or find_stalled_rank(running, now_s, timeouts)


def blame(failed: Sequence[Rank]) -> RunOutcome:
    """The cause among ranks that failed together: a signal, else an error, else an abort, else a lost peer.

    SIGABRT comes after errors because JAX's coordination service aborts the healthy ranks.
    """

    def order(rank: Rank) -> tuple[int, float]:
        if rank.code in _VICTIM_CODES:
            return (3 if rank.code == PeerLostError.exit_code else 2), rank.ended_s
        return (0 if rank.code is not None and rank.code < 0 else 1), rank.ended_s

    culprit = min(failed, key=order)
    code = REFUSED if has_refused(culprit) else 1
    what = f"{culprit} {describe_end(culprit.code or 0)}; last seen: {culprit.activity}"
    return RunOutcome(code, culprit.number, what)


def has_refused(rank: Rank) -> bool:
    """Whether the rank ended by a message to the user before its first update was done: started anew, it would again.

    Later the same code may come of a disk that is full.
    """
    begun = 0 if rank.beat is None else rank.beat.begun
    return rank.code == REFUSED and (begun == 0 or (begun == 1 and rank.activity.startswith("in update")))


def describe_end(code: int) -> str:
    """An exit code, or minus a signal, in words."""
    if code >= 0:
        return f"exited with code {code}"
    names = {member.value: member.name for member in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def find_silent_rank(running: Sequence[Rank], now_s: float, timeouts: Timeouts) -> RunOutcome | None:
    """A rank without a sign of life: the one silent longest beyond what it is allowed."""

    def allowed_s(rank: Rank) -> float:
        if rank.beat is None:
            return max(START_S, timeouts.limit_s)
        if rank.beat.done:  # it may wait for the others at JAX's closing barrier
            return timeouts.collective_s + timeouts.grace_s
        return timeouts.silence_s

    rank = max(running, key=lambda rank: now_s - rank.last_beat_s - allowed_s(rank))
    silent_s = now_s - rank.last_beat_s
    if silent_s <= allowed_s(rank):
        return None
    if rank.beat is not None and rank.beat.done:
        reason = f"{rank} has done its last update, and has not exited for {silent_s:.0f} s"
    elif rank.beat is None:
        reason = f"{rank} gave no sign of life for {silent_s:.0f} s since its start"
    else:
        reason = f"{rank} gave no sign of life for {silent_s:.0f} s; last seen: {rank.activity}"
    return RunOutcome(1, rank.number, reason, stuck=True)


def find_stalled_rank(running: Sequence[Rank], now_s: float, timeouts: Timeouts) -> RunOutcome | None:
    """All are alive, and for `no_progress_s` none has moved, while at least one waits in an update.

    The first update of a process does not count: it may hold compilation and connecting.
    """
    seen = [(rank, rank.beat) for rank in running if rank.beat is not None and not rank.beat.done]
    ages_s = [now_s - rank.last_beat_s + beat.age_s for rank, beat in seen]
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
    reason = f"{who} made no progress for {min(ages_s):.0f} s while {last[0].activity}{others}"
    return RunOutcome(1, culprit, reason, stuck=True)


@dataclass
class StopSignals:
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
def count_signals() -> Iterator[StopSignals]:
    """Counts the signals that ask for a stop; in the main thread only. The old handlers come back at the end."""
    stops = StopSignals()
    wanted = (signal.SIGINT, *NOTICES) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stops.handle) for number in wanted}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    processes: WorkerProcesses, timeouts: Timeouts, stops: StopSignals, settled: Callable[[], None]
) -> RunOutcome:
    asked = begun = False
    while True:
        processes.poll()
        if not begun and all(child.rank.beat is not None and child.rank.beat.begun > 1 for child in processes.children):
            begun = True
            settled()
        if stops.count > 1:
            return RunOutcome(INTERRUPTED, reason="the run was interrupted twice, and all processes were killed")
        if stops.count and not asked:
            asked = True
            first = processes.children[0].rank
            if first.beat is None or first.code is not None:  # nobody there to agree on anything, nothing to save
                return RunOutcome(INTERRUPTED, reason="the run was interrupted")
            if first.beat.phase in ("starting", "compiling") and not first.beat.begun:  # nothing that is not saved
                return RunOutcome(INTERRUPTED, reason=BEFORE_FIRST)
            os.kill(first.pid, signal.SIGINT)
        outcome = judge([child.rank for child in processes.children], processes.clock_s, timeouts)
        if outcome is not None:
            return outcome
