"""The hosts that share an evaluation: each brings a part, all get every part. Importing this does not import JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
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


ALONE = Alone()
OK, REFUSED = b"\0", b"\1"
"""The first byte of a part, and of a message why there is none."""


def gather_parts(part: Callable[[], T], kind: type[T], hosts: ProcessGroup = ALONE) -> list[T]:
    """What `part` returns on each host, on all hosts, in their order.

    A host on which `part` refuses still takes part in the exchange, so that none waits for it. What comes from other
    hosts is read as `kind` and nothing else (MessagePack): it can name no code to run.

    Args:
      kind: of what `part` returns, down to what lists and dataclasses hold: numbers, texts, bytes and NumPy arrays.

    Raises:
      MetricError: on all hosts, with the messages of those on which `part` raised a MultipodError; or a host sent
        something else than `kind`.
    """
    if hosts.count == 1:
        return [part()]
    try:
        message = OK + msgspec.msgpack.encode(part(), enc_hook=_plain)
    except MultipodError as error:
        message = REFUSED + str(error).encode()
    answers = hosts.gather(message)
    wrong = [
        f"rank {rank}: {answer[1:].decode(errors='replace')}" for rank, answer in enumerate(answers) if answer[:1] != OK
    ]
    if wrong:
        raise MetricError("\n".join(wrong))
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=_array)
    parts = []
    for rank, answer in enumerate(answers):
        try:
            parts.append(decoder.decode(answer[1:]))
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise MetricError(
                f"rank {rank} sent something else than its part of an evaluation: {error}. See whether all processes "
                "run the same version."
            ) from error
    return parts


def _plain(value: Any) -> Any:
    """NumPy's values as what MessagePack has."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} is nothing that hosts exchange: give gather_parts numbers, texts, arrays")


def _array(kind: Any, value: Any) -> Any:
    """The inverse of `_plain`, for arrays. They own their memory, and can be written to."""
    if kind is not np.ndarray:
        raise TypeError(f"{kind} is nothing that hosts exchange")
    name, shape, content = value
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"an array of {name}")
    return np.frombuffer(content, dtype).reshape(shape).copy()
