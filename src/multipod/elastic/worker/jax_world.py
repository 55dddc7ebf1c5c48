"""Joins a world, leaves it, and cuts what hangs in it: all that is asked of JAX's insides to survive a peer.

`jax.distributed` knows one world a process: its number of processes is fixed, and what the others do when one of them
dies is to abort. So each world here is a new one: its own coordination service (held by the launcher's helper, so that
no rank's death takes it away), a new client, new CPU devices and new connections among them. The names used are not all
public: `jax._src.distributed.global_state`, `get_distributed_runtime_client` and `backends_are_initialized`. They are
used in this file and, the first, in `multipod.train.jax_service` alone, and are the same in JAX 0.10.2 and 0.12.0.
"""

import gc
import itertools
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.extend.backend
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from multipod.elastic.sockets import ESTABLISHED, LISTENING, list_sockets
from multipod.elastic.world import World
from multipod.errors import PeerLostError

POLL_S = 0.01
FOREVER_S = 7 * 24 * 3600


class WorldConnection:
    """This process's part in a world: made by `join`, ended by `leave`."""

    def __init__(self, world: World, rank: int, client: Any) -> None:
        self.world, self.rank, self.client = world, rank, client
        self.ports: set[int] = set()
        self.peer_ports: set[int] = set()

    def publish(self, name: str, text: str) -> None:
        """Puts `text` where all processes of this world can read it, as what this one publishes as `name`."""
        self.client.key_value_set(f"multipod/{name}/{self.world.process_of(self.rank)}", text)

    def collect(self, name: str, look: Callable[[], None]) -> list[str]:
        """Returns what each process published as `name`, in order, once all did; `look` raises to end the wait."""
        folder = f"multipod/{name}/"
        while True:
            look()
            texts = {key.rsplit("/", 1)[1]: text for key, text in self.client.key_value_dir_get(folder)}
            if len(texts) == len(self.world.ranks):
                return [texts[str(process)] for process in range(len(self.world.ranks))]
            time.sleep(POLL_S)

    def cut(self) -> int:
        """Closes the connections over which CPU collectives go: what waits in one fails at once.

        Each leads to a port that gloo listens on, here (`ports`) or at a peer (`peer_ports`, once that is known).
        One of its ends would do, but from a host that is cut off nothing is heard. Returns how many were.
        """
        count = 0
        for descriptor, local, remote in list_sockets(ESTABLISHED):
            if local in self.ports or remote in self.peer_ports:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as ours:
                    ours.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


def join(world: World, rank: int, silent_s: float) -> WorldConnection:
    """Joins the other processes of `world`; returns when all are there.

    All are about to. JAX would end this process if one did not come in time, so there is no time: should one die just
    now, the thread that is in here is abandoned. `silent_s` is after which the service takes a process for lost.

    Raises:
      PeerLostError: some process did not come.
    """
    client = _jax.get_distributed_runtime_client(
        world.address,
        world.process_of(rank),
        init_timeout=FOREVER_S,
        shutdown_timeout=1,
        heartbeat_timeout=max(1, round(silent_s)),
        shutdown_on_destruction=False,
        use_compression=True,
    )
    try:
        client.connect()
    except Exception as error:
        raise PeerLostError(
            f"rank {rank} could not join world {world.generation}: {str(error).splitlines()[0][:200]}. "
            "A peer has died, or the launcher's helper has."
        ) from error
    state: Any = distributed.global_state
    state.client, state.process_id, state.num_processes = client, world.process_of(rank), len(world.ranks)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _count_anew()
    connection = WorldConnection(world, rank, client)
    # A thread that was abandoned in the world before may have asked for devices since `leave`: those are of no world.
    jax.extend.backend.clear_backends()
    before = {one.local for one in list_sockets(LISTENING)}
    jax.devices()  # makes the devices, and with them the port on which gloo listens
    connection.ports = {one.local for one in list_sockets(LISTENING)} - before
    keep_compiled()
    return connection


def keep_compiled() -> None:
    """Has this process keep what it compiles, too, in the cache of compiled programs. Makes the devices.

    JAX keeps what process 0 compiles, for all; but on CPU a program's key differs between processes, and the others
    would compile all of it anew at each start and in each world.
    """
    if jax.default_backend() == "cpu":
        distributed.global_state.process_id = 0  # the devices know their process; nothing else here asks this


def leave(connection: WorldConnection | None) -> None:
    """Gives up the devices of this world, all arrays on them, and all compiled programs.

    Without a connection only what is left of an abandoned world is forgotten, not closed.
    """
    state: Any = distributed.global_state
    state.client = state.preemption_sync_manager = None
    state.process_id, state.num_processes = 0, 1  # of devices that somebody asks for before the next world is joined
    if connection is not None:
        with suppress(Exception):  # of a broken world: the service may not answer
            connection.client.shutdown()
        connection.client = None
    gc.collect()  # frames of what failed hold arrays
    jax.extend.backend.clear_backends()
    gc.collect()


def has_devices() -> bool:
    """Whether JAX has made this process's devices: it can then join no world but by `join`."""
    return bool(xla_bridge.backends_are_initialized())


def _count_anew() -> None:
    """Lets Orbax begin again: number its operations from 0, as a process does that comes later, and forget the world
    before. It keeps the first client that it saw, whose service is gone by now, and with shardings their devices."""
    with suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.futures import signaling_client, synchronization

        signaling_client.get_signaling_client.cache_clear()
        numbers = synchronization.OperationIdGenerator
        numbers._operation_id_counter = itertools.count()
        numbers._operation_id = next(numbers._operation_id_counter)
    with suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.serialization import jax_array_handlers, replica_slices

        replica_slices._sharding_num_replicas.cache_clear()
        jax_array_handlers._is_replicated_sharding.cache_clear()
