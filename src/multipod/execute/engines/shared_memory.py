"""Sums a vector over the processes of one host through memory that they share, in the order of their ranks.

The window is anonymous memory (`memfd_create`), handed from rank 0 to the others over Unix sockets with abstract names:
nothing of it has a name in any folder, so nothing is left behind however the processes end.

The vector is cut into chunks, and a chunk into one part for each rank. For each chunk, a rank

1. puts into its slots of the window the parts that others will sum;
2. sums its own part over all ranks in rank order, a part being small enough to stay in its cache;
3. takes the other sums out.

Up to `DEPTH` chunks are under way, so that a rank seldom waits for another. Each rank signals (`host_peers.py`) when it
has done step 1 or 2 of a chunk.

A vector that lives in shared memory itself (`SharedMemory.empty`) need not be put in and taken out: each rank sums its
part of it straight from the vectors of all, and writes the sum into them. So no byte moves oftener than in a copy.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from multipod.collectives.schedule import ADD, COPY, Schedule, Steps, even_bounds, make_step
from multipod.errors import ScheduleError
from multipod.execute.engines.host_peers import Exchange, HostPeers
from multipod.topology.topology import Topology

DEPTH = 3
"""Slots for chunks. A rank puts chunk k once it has heard that all have summed chunk k - 3, and writes the sum of chunk
k once all have put chunk k, which they do after they took chunk k - 3 out: so nothing is overwritten too early."""

CHUNK_BYTES = 1 << 20
"""So parts have 512 KiB on 2 ranks, 256 KiB on 4. Of 128 KiB to 4 MiB these were the fastest for 16 MB on 2 cores with
2 MiB of L2 cache each (Xeon with AMX, 2026-11-21)."""

WINDOW_BYTES = 256 << 20  # at most: many ranks get smaller blocks
LINE_BYTES = 64  # of a cache line: blocks are multiples of it
NOTE_BYTES = 128  # of the text that says what a rank is about to do

PUT, SUMMED = b"p", b"s"  # signals


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

    return Schedule("all-reduce", "rank-order", topology, 1, even_bounds(1), Steps(2 * last, hop))


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
        self._peers = HostPeers(rank, ranks, exchange, limit_s)
        self._calls = 0
        block = min(block_bytes or max(64 << 10, CHUNK_BYTES // ranks), WINDOW_BYTES // (DEPTH * ranks * ranks))
        shape = (DEPTH, ranks, ranks, max(LINE_BYTES, block // LINE_BYTES * LINE_BYTES))
        notes = 2 * ranks * NOTE_BYTES
        window = self._peers.share_memory(notes + math.prod(shape))
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
        self._announce(f"an array of {length} x {kind}")
        self._peers.signal(PUT)
        self._assert_same_call()
        width = -(-length * kind.itemsize // LINE_BYTES) * LINE_BYTES
        self._vectors.append(self._peers.share_memory(self.ranks * width).reshape(self.ranks, width))
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
                self._announce(f"{what} from byte {offset} of shared array {number}")
                rows = memory[:, offset : offset + len(vector) * vector.itemsize]
                self._sum_in_place(view(rows), view(self._slots)[0, self.rank, self.rank], add)
                return
        self._announce(what)
        self._sum_by_chunks(vector, view(self._slots), add)

    def close(self) -> None:
        """Closes the sockets and lets go of the memory, which the system frees when the last rank has."""
        self._peers.close()
        self._vectors.clear()
        self._slots, self._notes = self._slots[:0].copy(), self._notes[:0].copy()

    def _announce(self, what: str) -> None:
        """Writes what this rank is about to do where all see it, for `_assert_same_call`."""
        self._peers.check_usable()
        self._calls += 1
        text = what.encode("ascii", "replace")[:NOTE_BYTES].ljust(NOTE_BYTES)
        self._notes[self._calls % 2, self.rank] = np.frombuffer(text, np.uint8)

    def _assert_same_call(self) -> None:
        """Waits until all ranks have begun this call, and refuses to go on unless they do the same."""
        self._peers.wait_for(PUT, self._peers.sent[PUT])
        texts = [bytes(note).decode("ascii").strip() for note in self._notes[self._calls % 2]]
        if len({*texts}) > 1:
            self._peers.mark_broken("its ranks have parted")
            raise ScheduleError(
                f"shared-memory sum on rank {self.rank} of {self.ranks}: the ranks do not give the same: "
                + ", ".join(f"rank {rank} {text}" for rank, text in enumerate(texts))
                + ". Give the same length and dtype on all ranks; this window is of no use any more."
            )

    def _sum_by_chunks(self, vector: Any, slots: Any, add: Callable[..., object]) -> None:
        cut = _Cut(len(vector), self.ranks, slots.shape[-1])
        first = self._peers.sent[PUT]
        self._put(vector, slots[first % DEPTH], cut, 0)
        self._assert_same_call()
        for k in range(cut.chunks):
            if k + 1 < cut.chunks:
                self._put(vector, slots[(first + k + 1) % DEPTH], cut, k + 1)
            self._peers.wait_for(PUT, first + k + 1)
            self._sum(vector, slots[(first + k) % DEPTH], cut, k, add)
            if k > 0:
                self._peers.wait_for(SUMMED, self._peers.sent[SUMMED] - 1)
                self._take(vector, slots[(first + k - 1) % DEPTH], cut, k - 1)
        self._peers.wait_for(SUMMED, self._peers.sent[SUMMED])
        self._take(vector, slots[(first + cut.chunks - 1) % DEPTH], cut, cut.chunks - 1)

    def _sum_in_place(self, rows: Any, scratch: Any, add: Callable[..., object]) -> None:
        """Sums this rank's part of `rows` [rank, elements], which are shared memory, and writes it to all of them."""
        self._peers.signal(PUT)
        self._assert_same_call()
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
            for peer in self._peers.others:
                parts[peer][:] = parts[self.rank]
        self._peers.signal(SUMMED)
        self._peers.wait_for(SUMMED, self._peers.sent[SUMMED])

    def _put(self, vector: Any, slots: Any, cut: "_Cut", k: int) -> None:
        for peer in self._peers.others:
            low, high = cut.part(k, peer)
            slots[self.rank, peer, : high - low] = vector[low:high]
        self._peers.signal(PUT)

    def _sum(self, vector: Any, slots: Any, cut: "_Cut", k: int, add: Callable[..., object]) -> None:
        low, high = cut.part(k, self.rank)
        parts = [slots[rank, self.rank, : high - low] for rank in range(self.ranks)]
        total, parts[self.rank] = parts[self.rank], vector[low:high]
        add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            add(total, part, out=total)
        self._peers.signal(SUMMED)
        vector[low:high] = total

    def _take(self, vector: Any, slots: Any, cut: "_Cut", k: int) -> None:
        for peer in self._peers.others:
            low, high = cut.part(k, peer)
            vector[low:high] = slots[peer, peer, : high - low]


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
