"""Goodput: the time of a run that went into good updates, over all of its time, and where the rest went.

A `GoodputAccount` is filled by the events of a run, in order. It covers interruptions: each process begins with what
the ones before it had (`past_seconds`, from the events that they left), and what they did that is lost counts as
repeated.

The causes, each in seconds:

    start       from the start of a process to the loop: imports, joining the others, restoring the state
    compile     of the step
    input       updates that waited for their batch
    checkpoint  what the loop waited for a save, or for one that failed
    copies      of the state, to memory and to the neighbour, in a run that survives
    evaluation  of the state, where no updates went on beside it
    trouble     bad updates, and what was done about them
    repeated    updates whose result was lost, and done again
    restart     from the last sign of one process to the start of the next
    regroup     from the last update of some processes to the start of those that go on, in a run that survives
    other       the rest: the last lines of the report, timing the gradient sum
"""

from array import array
from collections.abc import Iterable

from multipod.train.events import BadUpdate, Compiled, Ended, Evaluated, Event, Saved, SaveFailed, Started, Updated

CAUSES = (
    "start",
    "compile",
    "input",
    "checkpoint",
    "copies",
    "evaluation",
    "trouble",
    "repeated",
    "restart",
    "regroup",
    "other",
)

GOOD, ALL = "good", "all"


class GoodputAccount:
    """Seconds of a run by what they went into; see the module. Eight bytes an update."""

    def __init__(self) -> None:
        self.lost_s: dict[str, float] = {}
        self.repeated = 0
        self.troubled: dict[str, int] = {}
        self._before_s = 0.0  # good time of the processes before
        self._first = 0
        self._steps_s = array("d")  # good time of each update of this process that still counts

    @property
    def good_s(self) -> float:
        """Time in updates that count, without waiting for their batches."""
        return self._before_s + sum(self._steps_s)

    @property
    def told_s(self) -> float:
        """All time that some event told of."""
        return self.good_s + sum(self.lost_s.values())

    def lose(self, cause: str, seconds: float) -> None:
        """Counts time that was lost."""
        if seconds > 0:
            self.lost_s[cause] = self.lost_s.get(cause, 0.0) + seconds

    def __call__(self, event: Event) -> None:
        """Counts one event in."""
        match event:
            case Started():
                self._start(event)
            case Compiled():
                self.lose("compile", event.seconds)
            case Updated():
                self.lose("input", event.data_s)
                self.lose("copies", event.copy_s)
                self._steps_s.append(max(0.0, event.step_s - event.data_s - event.copy_s))
            case Evaluated() if not event.beside:
                self.lose("evaluation", event.seconds)
            case Saved() | SaveFailed():
                self.lose("checkpoint", event.seconds)
            case BadUpdate():
                self.troubled[event.action] = self.troubled.get(event.action, 0) + 1
                self.lose("trouble", event.seconds)
                if event.action != "repeated" and self._steps_s:
                    self.lose("trouble", self._steps_s[-1])
                    self._steps_s[-1] = 0.0
                self.undo(event.back_to)
            case _:
                pass

    def undo(self, update: int) -> None:
        """The updates after number `update` are lost, and will be done again."""
        for seconds in self._steps_s[max(0, update - self._first) :]:
            self.lose("repeated", seconds)
            self.repeated += 1
        del self._steps_s[max(0, update - self._first) :]

    def _start(self, event: Started) -> None:
        self.lost_s = {cause: seconds for cause, seconds in event.past.items() if cause != GOOD}
        self._before_s = event.past.get(GOOD, 0.0)
        self.repeated = event.repeated
        self._first, self._steps_s = event.update, array("d")
        self.lose("start", event.began_s)

    def goodput(self, run_s: float) -> float:
        """The share of `run_s` in good updates; NaN of no time."""
        return self.good_s / run_s if run_s > 0 else float("nan")

    def past(self) -> dict[str, float]:
        """What the next process begins with: `Started.past`."""
        return {GOOD: self.good_s, **self.lost_s}


def account_for(events: Iterable[Event]) -> GoodputAccount:
    """The account after these events; of a run that ended by itself with the time that no other event told."""
    account = GoodputAccount()
    for event in events:
        account(event)
        if isinstance(event, Ended) and event.run_s > account.told_s:
            account.lose("other", event.run_s - account.told_s)
    return account


def past_seconds(
    events: Iterable[Event], update: int, away_s: float, cause: str = "restart"
) -> tuple[dict[str, float], int]:
    """`Started.past` and `Started.repeated` of a process that goes on after `update` updates.

    Args:
      events: those that the processes before left, all of them.
      update: of the checkpoint that it goes on from.
      away_s: since their last sign; less than 0 (a clock was set back) counts as 0.
      cause: what that time went into.
    """
    account = account_for(events)
    account.undo(update)
    account.lose(cause, away_s)
    return account.past(), account.repeated
