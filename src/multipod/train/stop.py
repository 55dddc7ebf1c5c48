"""Ctrl-C asks a run to stop after the update it is in; a second one ends the process at once.

So do the signals by which schedulers say that a machine is about to be taken away: SIGTERM (pre-emption, Kubernetes),
SIGUSR1 and SIGUSR2 (Slurm's `--signal`). The state is then saved before anything else is finished.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean: this machine is about to be taken away."""


_LEAVE = 1 << 14
"""Weighs more than the wishes to stop of all devices together, of which there are fewer."""


@dataclass(frozen=True)
class ExitWish:
    """What a process wants of all others after the update that it gives the devices: one integer on its way.

    The devices add their integers up, so the sum says whether any process wants it.

    Attributes:
      stop: save and stop.
      leave: come together anew, in another world.
    """

    stop: bool = False
    leave: bool = False

    def encode(self) -> int:
        """The integer of one device."""
        return self.stop + _LEAVE * self.leave

    @classmethod
    def decode(cls, total: int) -> "ExitWish":
        """What any device wants, from the sum over fewer than 16,384 of them."""
        return cls(total % _LEAVE > 0, total >= _LEAVE)


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """Asks for a stop after the update that is running."""
        self.asked = True


@contextmanager
def stop_on_signals(notice: str) -> Iterator[StopRequest]:
    """A `StopRequest` that SIGINT and the `NOTICES` set; the old handlers come back at the end.

    SIGINT prints `notice` on standard error. They are unblocked, too: whoever starts a process may have blocked them,
    and Ray's workers do.

    A second SIGINT exits at once with 130. Use it in the main thread.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.asked and number == signal.SIGINT:
            os._exit(130)
        request.ask()
        if number == signal.SIGINT:
            os.write(2, f"\n{notice}\n".encode())  # print could be interrupted in the middle of itself

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, *NOTICES)}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, old)
    try:
        yield request
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in old.items():
            signal.signal(number, handler)
