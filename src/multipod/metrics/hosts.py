"""The hosts that share an evaluation: each brings a part, all get every part. Importing this does not import JAX."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from multipod.errors import MetricError, MultipodError

T = TypeVar("T")


class ProcessGroup(Protocol):
    """The processes of a run, seen from one of them."""

    @property
    def index(self) -> int:
        """This process, from 0."""
        ...

    @property
    def count(self) -> int:
        """All processes."""
        ...

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes in their order; each must call it, and gets the same."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process."""

    index: int = 0
    count: int = 1

    def gather(self, message: bytes) -> list[bytes]:
        """The message itself."""
        return [message]


ALONE = Alone()


def gather_parts(part: Callable[[], T], hosts: ProcessGroup = ALONE) -> list[T]:
    """What `part` returns on each host, on all hosts, in their order.

    A host on which `part` refuses still takes part in the exchange, so that none waits for it.
    What is exchanged is pickled: the hosts are processes of one run and trust each other.

    Raises:
      MetricError: on all hosts, with the messages of those on which `part` raised a MultipodError.
    """
    if hosts.count == 1:
        return [part()]
    try:
        message = pickle.dumps((True, part()), pickle.HIGHEST_PROTOCOL)
    except MultipodError as error:
        message = pickle.dumps((False, str(error)), pickle.HIGHEST_PROTOCOL)
    answers = [pickle.loads(answer) for answer in hosts.gather(message)]
    refused = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
    if refused:
        raise MetricError("\n".join(refused))
    return [value for _, value in answers]
