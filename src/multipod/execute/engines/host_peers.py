"""Unix sockets between the ranks of one host: one byte tells a peer how far this rank is, and memory is handed over.

A waiting rank sleeps in a read from a socket, leaves its core to others, and sees at once when another has ended. That
the bytes pass through the kernel also orders the ranks' accesses to memory that they share, on every processor.
"""

import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from multipod.errors import ClusterError, PeerLostError

READY = b"r"
"""The signal of a rank that waits for memory from rank 0. Other signals are the callers'."""
MOST_GUESTS = 64
"""Connections that have not yet shown that they are a rank."""

T = TypeVar("T")
Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives every rank the bytes of all ranks in rank order: an all-gather of the caller's process group."""


class HostPeers:
    """One rank's sockets to all other ranks of its host. A signal is one byte; each end counts how often it came.

    Args:
      rank: of this process, among `ranks`.
      ranks: processes on one Linux host.
      exchange: see `Exchange`; used while the sockets are connected, and not after.
      limit_s: the longest to wait for another rank.

    Raises:
      ClusterError: the ranks are not on one host, or did not find each other in time.
    """

    def __init__(self, rank: int, ranks: int, exchange: Exchange, limit_s: float) -> None:
        self.rank, self.ranks = rank, ranks
        self.sent: Counter[bytes] = Counter()
        self._limit_s = limit_s
        self._shared = 0
        self._broken = ""
        self._links = _connect(rank, ranks, exchange, limit_s)
        self._received: dict[int, Counter[bytes]] = {peer: Counter() for peer in self._links}

    @property
    def others(self) -> Sequence[int]:
        """The other ranks."""
        return tuple(self._links)

    def check_usable(self) -> None:
        """Refuses to go on after the ranks have parted, one was lost, or `close`.

        Raises:
          ClusterError: says what happened.
        """
        if self._broken:
            raise ClusterError(f"{self._broken} Make another, on all ranks.")

    def mark_broken(self, why: str) -> None:
        """Makes `check_usable` refuse from now on."""
        self._broken = f"shared-memory sum on rank {self.rank} of {self.ranks}: {why}."

    def signal(self, signal: bytes) -> None:
        """Sends `signal` to all others.

        Raises:
          PeerLostError: another rank ended.
        """
        for peer in self._links:
            self._send(peer, signal)
        self.sent[signal] += 1

    def wait_for(self, signal: bytes, count: int) -> None:
        """Waits until all others have sent `signal` `count` times in all.

        Raises:
          PeerLostError: another rank ended or does not answer.
        """
        for peer, received in self._received.items():
            while received[signal] < count:
                signals = self._read(peer, lambda link: link.recv(4096))
                if not signals:
                    raise self._lost(peer, "has ended")
                for number in signals:
                    received[bytes((number,))] += 1

    def share_memory(self, size: int) -> np.ndarray:
        """`size` bytes that all ranks see: rank 0 allocates them, and hands them to the others.

        Raises:
          ClusterError: no memory for it.
          PeerLostError: another rank ended or does not answer.
        """
        self._shared += 1
        memory = self._give_memory(size) if self.rank == 0 else self._take_memory()
        if memory is None:
            raise ClusterError(
                f"shared-memory sum on rank {self.rank} of {self.ranks}: rank 0 has no memory for {size} bytes that "
                "all share. Give smaller blocks or vectors, or more memory."
            )
        try:
            return np.frombuffer(mmap.mmap(memory, max(size, 1)), np.uint8)[:size]
        finally:
            os.close(memory)

    def _give_memory(self, size: int) -> int | None:
        self.wait_for(READY, self._shared)
        memory = _allocate(size)
        for peer, link in self._links.items():
            try:
                socket.send_fds(link, [b"w" if memory else b"n"], [memory] if memory else [])
            except OSError as error:
                raise self._lost(peer, "has ended") from error
        return memory

    def _take_memory(self) -> int | None:
        # Who is ready reads nothing from rank 0 but this, so no plain read can lose what comes with the byte.
        self._send(0, READY)
        answer, memories, _, _ = self._read(0, lambda link: socket.recv_fds(link, 1, 1, socket.MSG_CMSG_CLOEXEC))
        if not answer:
            raise self._lost(0, "has ended")
        return memories[0] if memories else None

    def close(self) -> None:
        """Closes the sockets."""
        for link in self._links.values():
            link.close()
        self.mark_broken("the window is closed")

    def _send(self, peer: int, signal: bytes) -> None:
        try:
            self._links[peer].send(signal)
        except OSError as error:
            raise self._lost(peer, "has ended") from error

    def _read(self, peer: int, read: Callable[[socket.socket], T]) -> T:
        try:
            return read(self._links[peer])
        except BlockingIOError as error:
            raise self._lost(peer, f"has not answered for {self._limit_s:g} s") from error
        except OSError as error:
            raise self._lost(peer, "has ended") from error

    def _lost(self, peer: int, how: str) -> PeerLostError:
        self.mark_broken(f"the window lost rank {peer}")
        return PeerLostError(
            f"shared-memory sum on rank {self.rank} of {self.ranks}: rank {peer} {how}. This rank is well; see what "
            f"rank {peer} printed last, and start all of them again."
        )


def _connect(rank: int, ranks: int, exchange: Exchange, limit_s: float) -> dict[int, socket.socket]:
    """Opens a socket to every other rank, by rank; reads and writes on them end after `limit_s`."""
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as door:
        # An abstract name is gone with its socket. Anyone on the host may connect to it: the word says who may stay.
        address, word = "multipod-" + secrets.token_hex(16), secrets.token_bytes(16)
        door.bind("\0" + address)
        door.listen(ranks + MOST_GUESTS)
        cards = [text.decode().split(" ") for text in exchange(f"{_host()} {address} {word.hex()}".encode())]
        _check_hosts([host for host, _, _ in cards])
        try:
            # To connect does not wait for the other to accept, so all can do that first.
            for other, (_, name, its_word) in enumerate(cards[:rank]):
                peers[other] = socket.socket(socket.AF_UNIX)
                _limit(peers[other], limit_s)  # it waits while strangers fill the other's queue
                peers[other].connect("\0" + name)
                peers[other].sendall(bytes.fromhex(its_word) + rank.to_bytes(4, "little"))
            _admit(door, word, peers, ranks, limit_s)
        except OSError as error:
            missing = sorted({*range(ranks)} - {*peers, rank})
            for peer in peers.values():
                peer.close()
            raise ClusterError(
                f"shared-memory sum on rank {rank} of {ranks}: no connection to ranks {missing} ({error}). See whether "
                "they still run, and what they printed last."
            ) from error
    for peer in peers.values():
        peer.setblocking(True)
        _limit(peer, limit_s)
    return dict(sorted(peers.items()))


def _admit(door: socket.socket, word: bytes, peers: dict[int, socket.socket], ranks: int, limit_s: float) -> None:
    """Takes the other ranks in, until all are there. Who does not say the word waits, up to `MOST_GUESTS` of them.

    A rank's word comes in one piece, so who sends less is none; the guest who has said nothing for longest makes room.

    Raises:
      TimeoutError: somebody did not come within `limit_s`.
    """
    until_s = time.monotonic() + limit_s
    guests: dict[int, socket.socket] = {}
    poll = select.poll()  # select.select refuses descriptors above 1023
    poll.register(door, select.POLLIN)
    door.setblocking(False)
    try:
        while len(peers) < ranks - 1:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            # The door last: who comes in may get the number of one who went.
            for number, _ in sorted(poll.poll(1e3 * left_s), key=lambda event: event[0] == door.fileno()):
                if number != door.fileno():
                    poll.unregister(number)
                    _greet(guests.pop(number), word, peers)
                    continue
                if len(guests) >= MOST_GUESTS:
                    oldest = next(iter(guests))
                    poll.unregister(oldest)
                    _greet(guests.pop(oldest), word, peers)
                try:
                    guest, _ = door.accept()
                except OSError:  # who asked is gone, or there are no descriptors just now
                    time.sleep(0.01)
                    continue
                guest.setblocking(False)
                guests[guest.fileno()] = guest
                poll.register(guest, select.POLLIN)
    finally:
        for guest in guests.values():
            guest.close()


def _greet(guest: socket.socket, word: bytes, peers: dict[int, socket.socket]) -> None:
    """Makes a guest a peer if it has said the word and its rank; else closes it."""
    hello = b""
    with suppress(OSError):
        hello = guest.recv(len(word) + 4)
    if len(hello) == len(word) + 4 and secrets.compare_digest(hello[: len(word)], word):
        peers[int.from_bytes(hello[len(word) :], "little")] = guest
    else:
        guest.close()


def _limit(link: socket.socket, limit_s: float) -> None:
    """The kernel's own time-out: Python's would cost a call of poll for each read."""
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _host() -> str:
    """Names the host so that two processes with one name can connect: the kernel's start, and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _check_hosts(hosts: Sequence[str]) -> None:
    if len({*hosts}) > 1:
        where = ", ".join(f"rank {rank} on {host.split('/')[0]}" for rank, host in enumerate(hosts))
        raise ClusterError(
            f"shared-memory sum: the ranks are not on one host: {where}. Make one window for the ranks of each host, "
            "or sum over the group with another algorithm."
        )


def _allocate(size: int) -> int | None:
    """Makes a file of `size` bytes in memory alone; None where there is no memory for it."""
    if size > _available():
        return None
    memory = os.memfd_create("multipod")
    try:
        # Now, rather than when it is written to, which would kill the process. Without the check above it would first
        # take all memory that there is.
        os.posix_fallocate(memory, 0, max(size, 1))
    except OSError:
        os.close(memory)
        return None
    return memory


def _available() -> int:
    """Bytes of the host's memory that can be had, as the kernel estimates."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
