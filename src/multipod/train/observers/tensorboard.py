"""Events as TensorBoard scalars."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event as Record
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from multipod.train.events import BadUpdate, Ended, Evaluated, Event, Started
from multipod.train.observers.scalars import scalars

FLUSH_S = 10.0


class TensorBoard:
    """Writes an event file into `folder` (made if missing): train/*, test/*, time/*, rate/examples_per_s.

    The file reaches the disk about every ten seconds, and with each evaluation and at the end. A run that
    goes on from a checkpoint adds a file that hides what older files hold of later updates.

    We use tensorboardX's `RecordWriter`, in the caller's thread. Its `SummaryWriter` hands events to a
    thread that dies unheard on a full disk; from then on `add_scalar` and `close` wait for ever for room in
    its queue (tensorboardX 2.6.5).

    A disk that refuses costs the scalars of that time, and no more: a new file is begun about ten seconds later.

    Raises:
      OSError: the first file cannot be opened.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        # Absolute, because tensorboardX takes the text before a colon for the name of a cloud store.
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._flushed = clock()
        self._open()

    def _open(self) -> None:
        self._lost = False
        # TensorBoard reads files in the order of their names. Opening overwrites, so two within a second must
        # differ: hence the number.
        number = sum(1 for _ in self._folder.glob("events.out.tfevents.*"))
        self._writer = RecordWriter(str(self._folder / f"events.out.tfevents.{int(time.time())}.{number:04d}"))
        self._write(Record(file_version="brain.Event:2"))

    def __call__(self, event: Event) -> None:
        """Writes the scalars of one event."""
        try:
            if not self._lost:
                self._put(event)
            elif self._clock() - self._flushed >= FLUSH_S:
                self._open()
        except OSError:
            self._lost = True
            self._flushed = self._clock()
            self.close()

    def _put(self, event: Event) -> None:
        if isinstance(event, Started) and event.update > 0:
            self._hide_after(event.update)
        if isinstance(event, BadUpdate) and event.back_to < event.update:
            self._hide_after(event.back_to)
        numbers = scalars(event)
        if numbers:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
            self._write(Record(summary=Summary(value=values), step=getattr(event, "update", 0)))
        if isinstance(event, Evaluated | Ended) or self._clock() - self._flushed >= FLUSH_S:
            self._writer.flush()
            self._flushed = self._clock()

    def close(self) -> None:
        """Writes what is left and closes the file; later calls do nothing."""
        with suppress(OSError):
            self._writer.close()

    def _hide_after(self, update: int) -> None:
        self._write(Record(step=update + 1, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, record: Record) -> None:
        record.wall_time = time.time()
        self._writer.write(record.SerializeToString())
