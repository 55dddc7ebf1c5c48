"""Sums through shared memory, with threads as ranks: each has its own sockets and its own map of the window."""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipod.collectives.verify import verify
from multipod.errors import ClusterError, PeerLostError, ScheduleError
from multipod.execute.engines import numpy as reference
from multipod.execute.engines.shared_memory import SharedMemory, in_rank_order
from multipod.topology.topology import Topology


class Meeting:
    """An all-gather among threads."""

    def __init__(self, ranks: int) -> None:
        self.values: list[bytes] = [b""] * ranks
        self.barrier = threading.Barrier(ranks)

    def of(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def exchange(value: bytes) -> Sequence[bytes]:
            self.values[rank] = value
            self.barrier.wait(10)
            return self.values

        return exchange


def on_ranks(ranks: int, work: Callable[[SharedMemory], Any], **options: Any) -> list[Any]:
    """What `work` returns on each rank, or the error that it raises."""
    meeting = Meeting(ranks)

    def run(rank: int) -> Any:
        window = SharedMemory(rank, ranks, meeting.of(rank), **{"limit_s": 20.0, **options})
        try:
            return work(window)
        except Exception as error:
            return error
        finally:
            window.close()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def vectors(ranks: int, length: int, dtype: str) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(length)
    return {rank: (rng.standard_normal(length) * 100).astype(dtype) for rank in range(ranks)}


@given(
    ranks=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float64", "float16", "int8", "int64", "uint32", "complex64"]),
    block_bytes=st.sampled_from([1, 64, 192, 4096]),
)
def test_sums_in_rank_order_bit_for_bit(ranks, lengths, dtype, block_bytes):
    schedule = in_rank_order(Topology((ranks,)))
    given_vectors = [vectors(ranks, length, dtype) for length in lengths]

    def work(window: SharedMemory) -> list[np.ndarray]:
        mine = [some[window.rank].copy() for some in given_vectors]
        for vector in mine:
            window.all_reduce(vector)
        return mine

    answers = on_ranks(ranks, work, block_bytes=block_bytes)
    for number, some in enumerate(given_vectors):
        expected = reference.run(schedule, some)
        for rank in range(ranks):
            assert answers[rank][number].tobytes() == expected[rank].tobytes()


@given(
    ranks=st.integers(1, 5),
    length=st.integers(0, 700),
    cut=st.tuples(st.integers(0, 700), st.integers(0, 700)),
    dtype=st.sampled_from(["float32", "float16", "int8", "uint64"]),
    block_bytes=st.sampled_from([64, 192]),
)
def test_vectors_that_live_in_shared_memory_give_the_same_bits(ranks, length, cut, dtype, block_bytes):
    low, high = sorted(min(end, length) for end in cut)
    whole, part = vectors(ranks, length, dtype), vectors(ranks, high - low, dtype)

    def work(window: SharedMemory) -> list[np.ndarray]:
        other, mine = window.empty(3, "int64"), window.empty(length, dtype)
        own = whole[window.rank].copy()
        other[:], mine[:] = window.rank, own
        window.all_reduce(mine)
        first = mine.copy()
        window.all_reduce(own)  # the two ways take turns
        mine[low:high] = part[window.rank]
        window.all_reduce(mine[low:high])
        window.all_reduce(other)
        return [first, own, mine.copy(), other.copy()]

    schedule = in_rank_order(Topology((ranks,)))
    all_of_it, slice_of_it = reference.run(schedule, whole), reference.run(schedule, part)
    for rank, (first, own, last, other) in enumerate(on_ranks(ranks, work, block_bytes=block_bytes)):
        expected = all_of_it[rank].copy()
        assert first.tobytes() == own.tobytes() == expected.tobytes()
        expected[low:high] = slice_of_it[rank]
        assert last.tobytes() == expected.tobytes()
        assert other.tolist() == 3 * [sum(range(ranks))]


@pytest.mark.parametrize(
    ("given_arrays", "said"),
    [
        ((np.ones(10), np.ones(12)), "rank 0 10 x float64, rank 1 12 x float64"),
        ((np.ones(0), np.ones(12)), "rank 0 0 x float64, rank 1 12 x float64"),
        ((np.ones(10), np.ones(10, np.float32)), "rank 0 10 x float64, rank 1 10 x float32"),
        ((np.ones(10), None), "rank 0 10 x float64, rank 1 an array of 5 x int8"),
    ],
)
def test_ranks_that_do_not_give_the_same_are_all_told(given_arrays, said):
    def work(window: SharedMemory) -> list[str]:
        errors = []
        for _ in range(2):
            mine = given_arrays[window.rank]
            with pytest.raises((ScheduleError, ClusterError)) as error:
                window.empty(5, "int8") if mine is None else window.all_reduce(mine)
            errors.append(f"{error.type.__name__}: {error.value}")
        return errors

    for rank, (first, again) in enumerate(on_ranks(2, work)):
        assert first == (
            f"ScheduleError: shared-memory sum on rank {rank} of 2: the ranks do not give the same: {said}. Give the "
            "same length and dtype on all ranks; this window is of no use any more."
        )
        assert again == (
            f"ClusterError: shared-memory sum on rank {rank} of 2: its ranks have parted. Make another, on all ranks."
        )


def test_memory_that_is_not_there_is_refused_on_all_ranks():
    for rank, error in enumerate(on_ranks(2, lambda window: window.empty(1 << 60, "int8"))):
        assert isinstance(error, ClusterError)
        assert f"sum on rank {rank} of 2: rank 0 has no memory for {1 << 61} bytes that all share." in str(error)


def test_a_window_that_was_closed_says_so():
    def work(window: SharedMemory) -> None:
        window.close()
        window.all_reduce(np.ones(10))

    for error in on_ranks(2, work):
        assert isinstance(error, ClusterError)
        assert str(error).endswith("the window is closed. Make another, on all ranks.")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_schedule_of_its_order_is_proven(ranks):
    topology = Topology((ranks,))
    verify(in_rank_order(topology), topology)


def test_infinities_and_not_a_number_pass_through():
    def work(window: SharedMemory) -> np.ndarray:
        vector = np.array([[1, 2, np.inf, 3e38], [1, np.nan, -np.inf, 3e38]][window.rank], np.float32)
        window.all_reduce(vector)
        return vector

    for answer in on_ranks(2, work):
        np.testing.assert_array_equal(answer, np.array([2, np.nan, np.nan, np.inf], np.float32))


def test_a_rank_that_ends_is_named():
    def work(window: SharedMemory) -> None:
        if window.rank != 1:
            window.all_reduce(np.ones(10))

    first, quitter, last = on_ranks(3, work)
    assert quitter is None
    for rank, error in ((0, first), (2, last)):
        assert isinstance(error, PeerLostError)
        assert f"on rank {rank} of 3: rank" in str(error)
        assert "has ended. This rank is well; see what rank" in str(error)
    assert "rank 1 has ended" in str(first) + str(last)


def test_a_rank_that_does_not_answer_is_named():
    ready = threading.Event()

    def work(window: SharedMemory) -> None:
        if window.rank == 1:
            assert ready.wait(10)
            return
        try:
            window.all_reduce(np.ones(10))
        finally:
            ready.set()

    error, _ = on_ranks(2, work, limit_s=0.2)
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(
        "shared-memory sum on rank 0 of 2: rank 1 has not answered for 0.2 s. This rank is well"
    )


def test_ranks_on_several_hosts_are_refused():
    def exchange(value: bytes) -> Sequence[bytes]:
        return [value, b"far/1234/5 multipod-x 00"]

    with pytest.raises(ClusterError, match=r"not on one host: rank 0 on \S+, rank 1 on far\. Make one window for"):
        SharedMemory(0, 2, exchange)


def test_a_rank_that_does_not_come_is_named():
    def exchange(value: bytes) -> Sequence[bytes]:
        return [value, value]

    with pytest.raises(ClusterError, match=r"on rank 0 of 2: no connection to ranks \[1\] \(timed out\)\. See whether"):
        SharedMemory(0, 2, exchange, limit_s=0.1)


def test_a_guest_who_is_no_rank_is_sent_away():
    """Anyone may knock at an abstract socket: who does not know the word of the meeting is not let in."""

    def exchange(value: bytes) -> Sequence[bytes]:
        address = "\0" + value.decode().split(" ")[1]
        with socket.socket(socket.AF_UNIX) as guest:
            guest.connect(address)
            guest.sendall(b"let me in, please, I am rank 1!!")
        return [value, value]

    with pytest.raises(ClusterError, match=r"no connection to ranks \[1\]"):
        SharedMemory(0, 2, exchange, limit_s=0.1)


@pytest.mark.parametrize("array", [np.ones((2, 3)), np.ones(10)[::2], np.broadcast_to(np.float32(1), 5)])
def test_arrays_that_are_not_flat_and_writeable_are_refused(array):
    (error,) = on_ranks(1, lambda window: window.all_reduce(array))
    assert isinstance(error, ScheduleError)
    assert "is not flat in memory or not writeable. Give array.reshape(-1) of a contiguous array." in str(error)
