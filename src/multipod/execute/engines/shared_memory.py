"""Sums a vector over the processes of one host through memory that they share, in the order of their ranks.

The window is anonymous memory (`memfd_create`), handed from rank 0 to the others over Unix sockets with abstract names:
nothing of it has a name in any folder, so nothing is left behind however the processes end.

The vector is cut into chunks, and a chunk into one part for each rank. For each chunk, a rank

1. puts into its slots of the window the parts that others will sum;
2. sums its own part over all ranks in rank order, a part being small enough to stay in its cache;
3. takes the other sums out.

Up to `DEPTH` chunks are under way, so that a rank seldom waits for another. It waits by reading from a socket, where
each rank writes a byte when it has done step 1 or 2 of a chunk: a waiting rank sleeps and leaves its core to others,
and sees at once when another has ended. That the bytes pass through the kernel also orders the accesses to the window
on every processor.

A vector that lives in shared memory itself (`SharedMemory.empty`) need not be put in and taken out: each rank sums its
part of it straight from the vectors of all, and writes the sum into them. So no byte moves oftener than in a copy.
"""

import math
import mmap
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from multipod.collectives.schedule import ADD, COPY, Schedule, Steps, even, make_step
from multipod.errors import ClusterError, PeerLostError, ScheduleError
from multipod.topology.topology import Topology

DEPTH = 3
"""Slots for chunks. A rank puts chunk k once it has heard that all have summed chunk k - 3, and writes the sum of chunk
k once all have put chunk k, which they do after they took chunk k - 3 out: so nothing is overwritten too early."""

CHUNK_BYTES = 1 << 20
"""So parts have 512 KiB on 2 ranks, 256 KiB on 4. Of 128 KiB to 4 MiB these were the fastest for 16 MB on 2 cores with
2 MiB of L2 cache each (Xeon with AMX, 2026-11-21)."""

WINDOW_BYTES = 256 << 20  # at most: many ranks get smaller blocks
LINE_BYTES = 64  # of a cache line: blocks are multiples of it
NOTE_BYTES = 128  # of what a rank says that it is about to do

PUT, SUMMED, READY = b"p", b"s", b"r"

T = TypeVar("T")
Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives every rank the bytes of all ranks in rank order: an all-gather of the caller's process group."""


def in_rank_order(topology: Topology) -> Schedule:
    """The schedule whose sums `SharedMemory` makes, bit for bit: along the chain of ranks, and back.

    It has `2 (p - 1)` steps of one message with the whole vector: good for comparing, and for nothing else.
    """
    chips, last = topology.chips, len(topology.chips) - 1

    def hop(k: int) -> Any:
        if k < last:
            return make_step(chips[k], chips[k + 1], 0, op=ADD)
        k = 2 * last - k
        return make_step(chips[k], chips[k - 1], 0, op=COPY)

    return Schedule("all-reduce", "rank-order", topology, 1, even(1), Steps(2 * last, hop))


class SharedMemory:
    """One rank's end of a window of shared memory.

    All ranks make theirs at the same time, and then call `all_reduce` and `empty` in the same order, from one thread at
    a time.

    Args:
      rank: of this process, among `ranks`.
      ranks: processes on one Linux host.
      exchange: see `Exchange`; used while the window is made, and not after.
      limit_s: the longest to wait for another rank.
      block_bytes: of a part; from `CHUNK_BYTES` if None.

    Raises:
      ClusterError: the ranks are not on one host, or did not find each other in time.
    """

    def __init__(
        self, rank: int, ranks: int, exchange: Exchange, *, limit_s: float = 300.0, block_bytes: int | None = None
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._limit_s = limit_s
        self._calls = self._puts = self._sums = self._shared = 0
        self._broken = ""
        self._peers = _meet(rank, ranks, exchange, limit_s)
        self._heard: dict[int, Counter[bytes]] = {peer: Counter() for peer in self._peers}
        block = min(block_bytes or max(64 << 10, CHUNK_BYTES // ranks), WINDOW_BYTES // (DEPTH * ranks * ranks))
        shape = (DEPTH, ranks, ranks, max(LINE_BYTES, block // LINE_BYTES * LINE_BYTES))
        notes = 2 * ranks * NOTE_BYTES
        window = self._share(notes + math.prod(shape))
        self._notes = window[:notes].reshape(2, ranks, NOTE_BYTES)
        # [chunk % DEPTH, from rank, to rank, bytes]; where the two are equal: the sum that the rank has made.
        self._slots = window[notes:].reshape(shape)
        self._vectors: list[np.ndarray] = []  # of `empty`: uint8 [rank, bytes]

    def empty(self, length: int, dtype: DTypeLike) -> np.ndarray:
        """A flat array in shared memory, not filled in: it, or a slice of it, is summed in about half the time.

        All ranks call it with the same length and dtype. Its memory is kept until all ranks have let go of their arrays
        and of this window.

        Raises:
          ScheduleError: the ranks ask for different arrays.
          ClusterError: no memory for it.
          PeerLostError: another rank ended or does not answer.
        """
        kind = np.dtype(dtype)
        self._begin(f"an array of {length} x {kind}")
        self._tell(PUT)
        self._puts += 1
        self._agree()
        width = -(-length * kind.itemsize // LINE_BYTES) * LINE_BYTES
        self._vectors.append(self._share(self.ranks * width).reshape(self.ranks, width))
        return self._vectors[-1][self.rank, : length * kind.itemsize].view(kind)

    def all_reduce(self, vector: np.ndarray) -> None:
        """Sums `vector` over the ranks in place, as ((rank 0 + rank 1) + rank 2) + ...: the bits of `in_rank_order`.

        All ranks call it with the same length and dtype. Each rank moves its vector about twice through its caches,
        whatever their number; once if the vector is of `empty`.

        Raises:
          ScheduleError: an array that is not flat, contiguous and writeable, or the ranks' arrays are not alike.
          PeerLostError: another rank ended or does not answer; the window is of no use after that.
        """
        if vector.ndim != 1 or not vector.flags.c_contiguous or not vector.flags.writeable:
            raise ScheduleError(
                f"an array of shape {vector.shape} and strides {vector.strides} is not flat in memory or not "
                "writeable. Give array.reshape(-1) of a contiguous array."
            )
        if vector.dtype.hasobject or vector.itemsize > LINE_BYTES:
            raise ScheduleError(f"shared-memory sum: vectors of {vector.dtype} cannot be added there. Give numbers.")
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs pass through, as in any sum
            self.sum_with(vector, vector.ctypes.data, lambda raw: raw.view(vector.dtype), np.add)

    def sum_with(
        self, vector: Any, address: int, view: Callable[[np.ndarray], Any], add: Callable[..., object]
    ) -> None:
        """`all_reduce` on the flat arrays of any library.

        Args:
          vector: what to sum, in place.
          address: of its first byte.
          view: makes of an array of bytes, its last axis dense, one of that library and of the vector's dtype.
          add: `add(a, b, out=c)` of that library.
        """
        if self.ranks == 1:
            return
        what = f"{len(vector)} x {str(vector.dtype).removeprefix('torch.')}"
        for number, memory in enumerate(self._vectors):
            offset = address - memory[self.rank].ctypes.data
            if 0 <= offset < memory.shape[1] and len(vector):
                self._begin(f"{what} from byte {offset} of shared array {number}")
                rows = memory[:, offset : offset + len(vector) * vector.itemsize]
                self._sum_where_it_is(view(rows), view(self._slots)[0, self.rank, self.rank], add)
                return
        self._begin(what)
        self._sum_by_chunks(vector, view(self._slots), add)

    def close(self) -> None:
        """Closes the sockets and lets go of the memory, which the system frees when the last rank has."""
        for peer in self._peers.values():
            peer.close()
        self._vectors.clear()
        self._slots, self._notes = self._slots[:0].copy(), self._notes[:0].copy()
        self._broken = f"shared-memory sum on rank {self.rank} of {self.ranks}: the window is closed."

    def _begin(self, what: str) -> None:
        """Notes down what this rank is about to do, for `_agree`."""
        if self._broken:
            raise ClusterError(f"{self._broken} Make another, on all ranks.")
        self._calls += 1
        text = what.encode("ascii", "replace")[:NOTE_BYTES].ljust(NOTE_BYTES)
        self._notes[self._calls % 2, self.rank] = np.frombuffer(text, np.uint8)

    def _agree(self) -> None:
        """Waits until all ranks have put what belongs to this call's start, and sees that they do the same."""
        self._hear(PUT, self._puts)
        said = [bytes(note).decode("ascii").strip() for note in self._notes[self._calls % 2]]
        if len({*said}) > 1:
            self._broken = f"shared-memory sum on rank {self.rank} of {self.ranks}: its ranks have parted."
            raise ScheduleError(
                f"shared-memory sum on rank {self.rank} of {self.ranks}: the ranks do not give the same: "
                + ", ".join(f"rank {rank} {text}" for rank, text in enumerate(said))
                + ". Give the same length and dtype on all ranks; this window is of no use any more."
            )

    def _sum_by_chunks(self, vector: Any, slots: Any, add: Callable[..., object]) -> None:
        cut = _Cut(len(vector), self.ranks, slots.shape[-1])
        first = self._puts
        self._put(vector, slots[first % DEPTH], cut, 0)
        self._agree()
        for k in range(cut.chunks):
            if k + 1 < cut.chunks:
                self._put(vector, slots[(first + k + 1) % DEPTH], cut, k + 1)
            self._hear(PUT, first + k + 1)
            self._sum(vector, slots[(first + k) % DEPTH], cut, k, add)
            if k > 0:
                self._hear(SUMMED, self._sums - 1)
                self._take(vector, slots[(first + k - 1) % DEPTH], cut, k - 1)
        self._hear(SUMMED, self._sums)
        self._take(vector, slots[(first + cut.chunks - 1) % DEPTH], cut, cut.chunks - 1)

    def _sum_where_it_is(self, rows: Any, scratch: Any, add: Callable[..., object]) -> None:
        """For `rows` [rank, elements] in shared memory: a rank sums its part of them, and writes it to all."""
        self._tell(PUT)
        self._puts += 1
        self._agree()
        length = len(rows[0])
        low, high = self.rank * length // self.ranks, (self.rank + 1) * length // self.ranks
        # One's own slots are free: what others had to take from there they took before they came here.
        block = len(scratch)
        for begin in range(low, high, block):
            parts = [row[begin : min(begin + block, high)] for row in rows]
            total = parts[0]
            for part in parts[1:-1]:
                total = add(total, part, out=scratch[: len(part)])
            add(total, parts[-1], out=parts[self.rank])
            for peer in self._peers:
                parts[peer][:] = parts[self.rank]
        self._tell(SUMMED)
        self._sums += 1
        self._hear(SUMMED, self._sums)

    def _put(self, vector: Any, slots: Any, cut: "_Cut", k: int) -> None:
        for peer in self._peers:
            low, high = cut.part(k, peer)
            slots[self.rank, peer, : high - low] = vector[low:high]
        self._tell(PUT)
        self._puts += 1

    def _sum(self, vector: Any, slots: Any, cut: "_Cut", k: int, add: Callable[..., object]) -> None:
        low, high = cut.part(k, self.rank)
        parts = [slots[rank, self.rank, : high - low] for rank in range(self.ranks)]
        total, parts[self.rank] = parts[self.rank], vector[low:high]
        add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            add(total, part, out=total)
        self._tell(SUMMED)
        self._sums += 1
        vector[low:high] = total

    def _take(self, vector: Any, slots: Any, cut: "_Cut", k: int) -> None:
        for peer in self._peers:
            low, high = cut.part(k, peer)
            vector[low:high] = slots[peer, peer, : high - low]

    def _tell(self, what: bytes) -> None:
        for peer in self._peers:
            self._tell_one(peer, what)

    def _tell_one(self, peer: int, what: bytes) -> None:
        try:
            self._peers[peer].send(what)
        except OSError as error:
            raise self._lost(peer, "has ended") from error

    def _hear(self, what: bytes, count: int) -> None:
        """Waits until all others have said `what` so many times in all."""
        for peer, heard in self._heard.items():
            while heard[what] < count:
                said = self._read(peer, lambda link: link.recv(4096))
                if not said:
                    raise self._lost(peer, "has ended")
                for word in (PUT, SUMMED, READY):
                    heard[word] += said.count(word)

    def _read(self, peer: int, read: Callable[[socket.socket], T]) -> T:
        try:
            return read(self._peers[peer])
        except BlockingIOError as error:
            raise self._lost(peer, f"has not answered for {self._limit_s:g} s") from error
        except OSError as error:
            raise self._lost(peer, "has ended") from error

    def _share(self, size: int) -> np.ndarray:
        """So many bytes that all ranks see: rank 0 makes them, and hands them to the others."""
        self._shared += 1
        if self.rank == 0:
            self._hear(READY, self._shared)
            memory = _allocate(size)
            for peer, link in self._peers.items():
                try:
                    socket.send_fds(link, [b"w" if memory else b"n"], [memory] if memory else [])
                except OSError as error:
                    raise self._lost(peer, "has ended") from error
        else:
            # Who is ready reads nothing from rank 0 but this, so no plain read can lose what comes with the byte.
            self._tell_one(0, READY)
            said, given, _, _ = self._read(0, lambda link: socket.recv_fds(link, 1, 1, socket.MSG_CMSG_CLOEXEC))
            if not said:
                raise self._lost(0, "has ended")
            memory = given[0] if given else None
        if memory is None:
            raise ClusterError(
                f"shared-memory sum on rank {self.rank} of {self.ranks}: rank 0 has no memory for {size} bytes that "
                "all share. Give smaller blocks or vectors, or more memory."
            )
        try:
            return np.frombuffer(mmap.mmap(memory, max(size, 1)), np.uint8)[:size]
        finally:
            os.close(memory)

    def _lost(self, peer: int, how: str) -> PeerLostError:
        self._broken = f"shared-memory sum on rank {self.rank} of {self.ranks}: the window lost rank {peer}."
        return PeerLostError(
            f"shared-memory sum on rank {self.rank} of {self.ranks}: rank {peer} {how}. This rank is well; see what "
            f"rank {peer} printed last, and start all of them again."
        )


class _Cut(NamedTuple):
    """How a vector is cut into chunks, and these into parts of at most `block` elements."""

    length: int
    ranks: int
    block: int

    @property
    def chunks(self) -> int:
        return max(1, -(-self.length // (self.ranks * self.block)))

    def part(self, chunk: int, rank: int) -> tuple[int, int]:
        """Where the part of `chunk` that `rank` sums begins and ends; parts of a short chunk may be empty."""
        begin = chunk * self.ranks * self.block
        size = min(self.length - begin, self.ranks * self.block)
        return begin + rank * size // self.ranks, begin + (rank + 1) * size // self.ranks


def _meet(rank: int, ranks: int, exchange: Exchange, limit_s: float) -> dict[int, socket.socket]:
    """A socket to every other rank, by rank; reads and writes on them end after `limit_s`."""
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as door:
        # An abstract name is gone with its socket. Anyone on the host may connect to it: the word says who may stay.
        address, word = "multipod-" + secrets.token_hex(16), secrets.token_bytes(16)
        door.bind("\0" + address)
        door.listen(ranks)
        door.settimeout(limit_s)
        said = [text.decode().split(" ") for text in exchange(f"{_host()} {address} {word.hex()}".encode())]
        _check_hosts([host for host, _, _ in said])
        try:
            # To connect does not wait for the other to accept, so all can do that first.
            for other, (_, name, its_word) in enumerate(said[:rank]):
                peers[other] = socket.socket(socket.AF_UNIX)
                peers[other].connect("\0" + name)
                peers[other].sendall(bytes.fromhex(its_word) + rank.to_bytes(4, "little"))
            while len(peers) < ranks - 1:
                guest, _ = door.accept()
                guest.settimeout(limit_s)
                hello = guest.recv(len(word) + 4, socket.MSG_WAITALL)
                if secrets.compare_digest(hello[: len(word)], word):
                    peers[int.from_bytes(hello[len(word) :], "little")] = guest
                else:
                    guest.close()
        except OSError as error:
            missing = sorted({*range(ranks)} - {*peers, rank})
            for peer in peers.values():
                peer.close()
            raise ClusterError(
                f"shared-memory sum on rank {rank} of {ranks}: no connection to ranks {missing} ({error}). See whether "
                "they still run, and what they printed last."
            ) from error
    # The kernel's own time-out: Python's would cost a call of poll for each read.
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    for peer in peers.values():
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return dict(sorted(peers.items()))


def _host() -> str:
    """What two processes have in common if they can meet: the kernel's start and the network, which containers part."""
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
    """A file of so many bytes in memory alone, or None where there is no memory for it."""
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
