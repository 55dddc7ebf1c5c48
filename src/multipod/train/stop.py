"""Ctrl-C asks a run to stop after the update it is in; a second one ends the process at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """Asks for a stop after the update that is running."""
        self.asked = True


@contextmanager
def stop_on_signals(notice: str) -> Iterator[StopRequest]:
    """A `StopRequest` that SIGINT and SIGTERM set; the old handlers come back at the end.

    SIGINT prints `notice` on standard error.

    A second SIGINT exits at once with 130. Use it in the main thread.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.asked and number == signal.SIGINT:
            os._exit(130)
        request.ask()
        if number == signal.SIGINT:
            os.write(2, f"\n{notice}\n".encode())  # print could be interrupted in the middle of itself

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
