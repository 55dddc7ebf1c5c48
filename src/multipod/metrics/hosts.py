"""The hosts that share an evaluation: each brings a part, all get every part. Importing this does not import JAX."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

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


@dataclass(frozen=True)
class JaxProcesses:
    """The processes that `jax.distributed` has joined. Gathering is a collective: call it from the main thread."""

    @property
    def index(self) -> int:
        """This process, from 0."""
        import jax

        return jax.process_index()

    @property
    def count(self) -> int:
        """All processes."""
        import jax

        return jax.process_count()

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes: two collectives, one for the lengths, one padded to the longest."""
        from jax.experimental import multihost_utils

        if self.count == 1:
            return [message]
        # As bytes: without x64, JAX would cut the lengths to 32 bits.
        length = np.frombuffer(len(message).to_bytes(8, "little"), np.uint8)
        lengths = [int.from_bytes(bytes(row), "little") for row in multihost_utils.process_allgather(length)]
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(padded))
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


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
