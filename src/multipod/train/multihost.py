"""Agreement among the processes of a run: barriers, broadcasts, and checks that they are the same."""

from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from multipod.errors import ClusterError, MultipodError, PeerLostError, RunFolderError

LONGEST, SHORT = 4096, 512


def barrier(name: str, timeout_s: float) -> None:
    """Returns when all processes have called it with this name; each name serves once.

    Goes through the coordination service, not through the devices: gloo gives up the first
    collective between two processes when one comes 30 s after the other, and on a busy machine
    their compile times can differ by more.

    Raises:
      PeerLostError: some process did not come in time.
    """
    if jax.process_count() == 1:
        return
    try:
        ocp.multihost.get_barrier_sync_fn()(key=f"multipod/{name}", timeout_ms=round(1000 * timeout_s))
    except Exception as error:
        raise PeerLostError(
            f"process {jax.process_index()} waited {timeout_s:g} s for its peers ({name}) in vain: "
            f"{str(error).splitlines()[0][:200]}. See which process is late, or raise --timeout."
        ) from error


def broadcast_from_0(decide: Callable[[], str]) -> str:
    """Returns, on all processes, the text that `decide` returns on process 0.

    Raises:
      RunFolderError: on all processes, if `decide` refused on process 0.
    """
    if jax.process_count() == 1:
        return decide()
    refused, text = 0, ""
    if jax.process_index() == 0:
        try:
            text = decide()
        except MultipodError as error:
            refused, text = 1, str(error)
    message = np.zeros(LONGEST, np.uint8)
    encoded = np.frombuffer(text.encode()[: LONGEST - 1], np.uint8)
    message[0], message[1 : 1 + len(encoded)] = refused, encoded
    message = np.asarray(multihost_utils.broadcast_one_to_all(message))
    text = bytes(message[1:]).rstrip(b"\0").decode()
    if message[0]:
        raise RunFolderError(text)
    return text


def assert_same(identity: str) -> None:
    """Refuses to train with processes of which one has another `identity` (`elastic.worker.worker.identity_of`).

    All processes call it at the same point; it is a message between all of them.

    Raises:
      ClusterError: on all processes, with every process that differs from the first.
    """
    identities = gather_lines(identity)
    others = [f"process {number} has {theirs}" for number, theirs in enumerate(identities) if theirs != identities[0]]
    if others:
        raise ClusterError(
            "not all processes would train the same:\n  "
            + "\n  ".join([f"process 0 has {identities[0]}", *others])
            + "\n"
            "Use the same versions, recipe and data on all hosts."
        )


def gather_lines(line: str) -> list[str]:
    """Returns the line of every process, in the order of the processes, without empty ones.

    All processes call it at the same point; it is a message between all of them.
    """
    if jax.process_count() == 1:
        return [line] if line else []
    message = np.zeros(SHORT, np.uint8)
    encoded = np.frombuffer(line.encode()[:SHORT], np.uint8)
    message[: len(encoded)] = encoded
    rows = np.asarray(multihost_utils.process_allgather(message)).reshape(-1, SHORT)
    lines = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
    return [text for text in lines if text]
