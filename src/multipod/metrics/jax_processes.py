"""The processes of a JAX program as the hosts that share an evaluation (`multipod.metrics.hosts.ProcessGroup`)."""

from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils


@dataclass(frozen=True)
class JaxProcesses:
    """The processes that `jax.distributed` has joined. Gathering is a collective: call it from the main thread."""

    @property
    def index(self) -> int:
        """This process, from 0."""
        return jax.process_index()

    @property
    def count(self) -> int:
        """All processes."""
        return jax.process_count()

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes: two collectives, one for the lengths, one padded to the longest."""
        if self.count == 1:
            return [message]
        # As bytes: without x64, JAX would cut the lengths to 32 bits.
        length = np.frombuffer(len(message).to_bytes(8, "little"), np.uint8)
        lengths = [int.from_bytes(bytes(row), "little") for row in multihost_utils.process_allgather(length)]
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(padded))
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
