"""Judges detections beside training: evaluation number e by host e modulo hosts, in a process of its own.

Judging takes longer than the time between two evaluations, and holds Python's lock. Nothing here needs JAX.

Source: the submission of arXiv:2011.03641, which goes round robin in threads.
"""

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from multipod.errors import MetricError, MultipodError
from multipod.metrics.coco import Detections, GroundTruth, average_precision, merge_detections
from multipod.metrics.hosts import ALONE, ProcessGroup, gather_parts

Judged = dict[str, dict[str, float]]
"""Kind to name to value."""

# Not a fork, which can hang beside JAX's threads, nor a spawn of `multiprocessing`, which runs the main script again.
_CHILD = "import sys; sys.path[:] = {path!r}; from multipod.metrics.judge import serve; serve()"


class Judge:
    """Judges evaluations in the background, round robin over the hosts.

    Every host makes one, and calls `submit` and `finished` at the same points of its run: both are collectives.
    Close it, or use it in a `with` statement.
    """

    def __init__(
        self, truth: GroundTruth, kinds: Sequence[str] = ("box",), hosts: ProcessGroup = ALONE, processes: int = 1
    ) -> None:
        """`processes` judge at once on this host; each lives for one evaluation that is this host's."""
        self._truth, self._kinds, self._hosts = truth, tuple(kinds), hosts
        self._threads = ThreadPoolExecutor(processes, "multipod-judge")
        self._waiting: dict[int, Future[Judged]] = {}
        self._running: list[subprocess.Popen[bytes]] = []

    def submit(self, number: int, part: Detections) -> int:
        """Gathers the detections of evaluation `number` from all hosts; returns the host that judges them.

        Raises:
          MetricError: see `merge_detections`; on all hosts.
        """
        found = merge_detections(gather_parts(lambda: part, Detections, self._hosts))
        host = number % self._hosts.count
        if host == self._hosts.index:
            self._waiting[number] = self._threads.submit(self._judged, number, found)
        return host

    def finished(self, wait: bool = False) -> dict[int, Judged]:
        """The evaluations judged since the last call, by number; the same on every host.

        Waits for those that are not ready only if `wait`.

        Raises:
          MetricError: on all hosts, what `average_precision` refused on one.
        """

        def ready() -> dict[int, Judged]:
            numbers = [number for number, future in self._waiting.items() if wait or future.done()]
            return {number: self._waiting.pop(number).result() for number in numbers}

        news = {
            number: value
            for part in gather_parts(ready, dict[int, Judged], self._hosts)
            for number, value in part.items()
        }
        return dict(sorted(news.items()))

    def close(self) -> None:
        """Ends the processes; what they have not judged is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._running:
            with contextlib.suppress(OSError):
                process.kill()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _judged(self, number: int, found: Detections) -> Judged:
        message = pickle.dumps((self._truth, found, self._kinds), pickle.HIGHEST_PROTOCOL)
        command = [sys.executable, "-c", _CHILD.format(path=sys.path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            self._running.append(process)
            answer, said = process.communicate(message)
            self._running.remove(process)
        if process.returncode:  # it was killed, or pycocotools failed: the other hosts must hear of it
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            reason = last or f"its process ended with {process.returncode}"
            raise MetricError(f"coco: evaluation {number} could not be judged: {reason}")
        good, value = pickle.loads(answer)
        if not good:
            raise MetricError(value)
        return value


def serve() -> None:
    """Reads what to judge from standard input, and writes what came of it to standard output."""
    truth, found, kinds = pickle.load(sys.stdin.buffer)
    try:
        answer: tuple[bool, object] = (True, {kind: average_precision(truth, found, kind) for kind in kinds})
    except MultipodError as error:
        answer = (False, str(error))
    pickle.dump(answer, sys.stdout.buffer)
