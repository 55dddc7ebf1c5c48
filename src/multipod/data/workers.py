"""Processes that make parts of batches, for work that holds Python's lock. One that dies or hangs is replaced, once.

Nothing is lost with a process: a part of a batch is a pure function of its place, so another process makes it anew.
Arrays come back through memory that both processes map; only their shapes go through the pipe.
"""

import contextlib
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from multipod.data.reading import statistics_of
from multipod.data.source import HostBatch
from multipod.errors import DataError

FIRST_S = 60.0
"""What a process may need for its first part at least: it starts Python and imports what it needs."""

DIED = "See whether memory ran out (dmesg), read with fewer processes, or look at what the data do there."
ENDED = "the reading processes were ended."
HUNG = "See to the disk or the code that hangs there; if parts may take so long, raise --read-limit."


@dataclass
class _Worker:
    """A process, the pipe to it, and the memory in which its arrays come back.

    Attributes:
      number: its place among the processes.
      process: of `multiprocessing`.
      pipe: to it.
      memory: a descriptor that both map.
      restarts: of this place so far.
      answered: it has sent a part.
      hung_s: so long it did not answer, and was ended; 0: it did.
      failure: why it is not started again; empty while it works.
    """

    number: int
    process: Any
    pipe: Connection
    memory: int
    restarts: int = 0
    answered: bool = False
    hung_s: float = 0.0
    failure: str = ""

    def end(self) -> None:
        """Ends the process, and gives back what it had. Whoever takes it out of the list of all calls this, once."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        os.close(self.memory)


class Workers:
    """`count` processes that make parts of `batches`. `part` may be called by as many threads at once.

    One that needs longer than `limit_s` for a part is taken to hang, as one that reads from a mount that is stuck.
    """

    def __init__(self, batches: Any, count: int, limit_s: float = 300.0) -> None:
        self._batches, self._count, self._limit_s = batches, count, limit_s
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._all: list[_Worker] = []
        self._closed = False
        self._lock = threading.Lock()
        for number in range(count):
            self._idle.put(self._start(number))

    def __len__(self) -> int:
        return self._count

    def part(self, position: int, first: int, stop: int) -> HostBatch:
        """What `batches.part` makes of these.

        Raises:
          DataError: a process died or hung twice, or what it met itself.
        """
        worker = self._idle.get()
        try:
            while True:
                if self._closed:
                    raise DataError(ENDED)
                try:
                    worker.pipe.send((position, first, stop))
                    return self._received(worker, self._answer(worker))
                except (EOFError, OSError):
                    worker = self._again(worker, position)
        finally:
            self._idle.put(worker)

    def _answer(self, worker: _Worker) -> bytes:
        """What the process sends.

        Raises:
          EOFError: it died, or hung and was killed.
        """
        limit_s = self._limit_s if worker.answered else max(self._limit_s, FIRST_S)
        if not worker.pipe.poll(limit_s):
            worker.hung_s = limit_s
            worker.process.kill()
            raise EOFError
        worker.answered = True
        return worker.pipe.recv_bytes()

    def close(self) -> None:
        """Ends the processes. Threads that wait for a part get an error."""
        with self._lock:
            self._closed, ended = True, self._all
            self._all = []
        for worker in ended:
            worker.process.kill()
        # A pipe or memory that were closed under a thread could be another's a moment later.
        used = [self._idle.get() for _ in range(self._count)]
        for worker in ended:
            worker.end()
        for worker in used:
            self._idle.put(worker)

    def _start(self, number: int, restarts: int = 0) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        memory = os.memfd_create(f"multipod-reader-{number}", os.MFD_CLOEXEC)
        process = context.Process(target=_serve, args=(theirs, _Handle(memory), self._batches), daemon=True)
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"the data cannot be sent to a reading process: {error}. Define their classes at the top of a module, "
                "or read with threads."
            ) from error
        theirs.close()
        worker = _Worker(number, process, ours, memory, restarts)
        with self._lock:
            if not self._closed:
                self._all.append(worker)
                return worker
        worker.end()
        raise DataError(ENDED)

    def _again(self, worker: _Worker, position: int) -> _Worker:
        """Another process in the place of one that died or hung.

        Raises:
          DataError: it is the second there.
        """
        if worker.failure:
            raise DataError(worker.failure)
        worker.process.join(timeout=5)
        if worker.restarts:
            worker.failure = (
                f"reading process {worker.number} (pid {worker.process.pid}) {_end(worker)} while it "
                f"made batch {position}, as the one before it. The run stops; the last checkpoint is whole. "
                + (HUNG if worker.hung_s else DIED)
            )
            raise DataError(worker.failure)
        with self._lock:
            if self._closed:  # and what it has was given back there
                raise DataError(ENDED)
            self._all.remove(worker)
        worker.end()
        return self._start(worker.number, worker.restarts + 1)

    def _received(self, worker: _Worker, message: bytes) -> HostBatch:
        kind, content, skipped, stages = pickle.loads(message)
        statistics = statistics_of(self._batches.source)
        for example in skipped:
            statistics.skip(*example)
        for name, (seconds, count) in stages.items():
            statistics.add(name, seconds, count)
        if kind == "error":
            raise content
        layout, size = content
        if not size:
            return {name: np.zeros(shape, dtype) for name, dtype, shape, _ in layout}
        with mmap.mmap(worker.memory, size, prot=mmap.PROT_READ) as memory:
            return {
                name: np.frombuffer(memory, dtype, int(np.prod(shape)), offset).reshape(shape).copy()
                for name, dtype, shape, offset in layout
            }


class _Handle:
    """A descriptor that goes with a process that is started."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self.descriptor)

    def __setstate__(self, state: Any) -> None:
        self.descriptor = state.detach()


def _end(worker: _Worker) -> str:
    code = worker.process.exitcode
    if worker.hung_s:
        return f"gave no answer for {worker.hung_s:,.0f} s"
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code is not None else "stopped answering"


def _serve(pipe: Connection, handle: _Handle, batches: Any) -> None:
    """What a process does: makes parts until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's own process decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    statistics = statistics_of(batches.source)
    with contextlib.suppress(EOFError, OSError):
        while True:
            place = pipe.recv()
            try:
                answer: tuple[str, Any] = ("arrays", _written(handle.descriptor, batches.part(*place)))
            except Exception as error:
                answer = ("error", error)
            pipe.send_bytes(_packed(*answer, statistics.news(), statistics.take()))


def _packed(kind: str, content: Any, skipped: list[Any], taken: dict[str, tuple[float, int]]) -> bytes:
    try:
        message = pickle.dumps((kind, content, skipped, taken))
        pickle.loads(message)  # exceptions with arguments of their own may fail only here
        return message
    except Exception:
        content = DataError(f"a reading process met {type(content).__name__}: {content}")
        return pickle.dumps((kind, content, skipped, taken))


def _written(memory: int, batch: HostBatch) -> tuple[list[tuple[str, str, tuple[int, ...], int]], int]:
    """Writes the arrays into the shared memory. Returns where each lies, and how many bytes there are."""
    layout, size = [], 0
    for name, array in batch.items():
        layout.append((name, array.dtype.str, array.shape, size))
        size += -(-array.nbytes // 64) * 64
    if os.fstat(memory).st_size < size:
        os.ftruncate(memory, size)
    if size:
        with mmap.mmap(memory, size) as mapped:
            for (_, dtype, shape, offset), array in zip(layout, batch.values(), strict=True):
                np.frombuffer(mapped, dtype, array.size, offset).reshape(shape)[...] = array
    return layout, size
