"""What threads make ahead of its use, handed out in order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

Made = TypeVar("Made")


class MadeAhead(Iterator[Made], Generic[Made]):
    """`make(number)` of each of `numbers`, in their order, made by `threads` threads up to `ahead` before their use.

    They begin with the first that is asked for. What `make` raises comes in the place of what it should have made.
    """

    def __init__(self, make: Callable[[int], Made], numbers: Iterator[int], threads: int, ahead: int) -> None:
        self._make, self._numbers, self._ahead = make, numbers, ahead
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="multipod read")
        self._waiting: deque[Future[Made]] = deque()

    def __next__(self) -> Made:
        """The next one, waited for if it is not there yet."""
        self._submit(self._ahead - len(self._waiting))
        if not self._waiting:
            raise StopIteration
        first = self._waiting.popleft()
        self._submit(1)
        return first.result()

    def close(self) -> None:
        """Makes no more, and does not wait for what is being made."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, count: int) -> None:
        self._waiting.extend(self._pool.submit(self._make, number) for number in islice(self._numbers, count))
