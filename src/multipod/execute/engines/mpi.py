"""Runs a `Schedule` over MPI by mpi4py, on arrays in the host's memory of NumPy or of any other framework.

Rank r of the communicator is the live chip of rank r. Results are those of `engines.numpy`, bit for bit. Open MPI waits
by polling: a rank that waits keeps its core busy, but gives it up to others when there are more ranks than cores.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from multipod.collectives.schedule import Schedule
from multipod.errors import PeerLostError, ScheduleError
from multipod.execute.adasum.arithmetic import Arithmetic
from multipod.execute.adasum.operator import Layers
from multipod.execute.adasum.ranks import PIECE_BYTES, Form, Span, combine_vector, describe_combination
from multipod.execute.engines.rank_program import (
    Post,
    Scratch,
    SumNote,
    Transfer,
    Wait,
    assert_same_notes,
    get_rank_program,
    make_note,
    run_rank_program,
)
from multipod.execute.engines.shared_memory import SharedMemory


def all_reduce(buffer: Any, schedule: Schedule, comm: MPI.Intracomm, *, limit_s: float = 300.0) -> None:
    """Sums `buffer` over the ranks of `comm` in place, in the way and in the order that the schedule says.

    All ranks call it with the same schedule, length and dtype, and one sum at a time on a communicator; the first sum
    of a kind sees whether they do. Not checked: that the schedule is right (`multipod.collectives.verify`). The first
    call on a communicator duplicates it, so that no message of the caller's can be taken for one of ours.

    Args:
      buffer: flat, contiguous and writeable: a NumPy array, or what gives its memory by DLPack (a CPU tensor of
        PyTorch) or by the buffer protocol (`array.array`).
      schedule: an all-reduce with as many live chips as `comm` has ranks.
      comm: any intracommunicator.
      limit_s: the longest to wait for one message.

    Raises:
      ScheduleError: a schedule or a buffer that does not fit, or the ranks do not give the same.
      PeerLostError: another rank ended, or did not answer in time. Of an MPI job nothing can go on after that.
    """
    if schedule.collective != "all-reduce":
        raise ScheduleError(f"{schedule} is no all-reduce. Call run, or build it with collective='all-reduce'.")
    run(buffer, schedule, comm, limit_s=limit_s)


def run(buffer: Any, schedule: Schedule, comm: MPI.Intracomm, *, limit_s: float = 300.0) -> None:
    """Does this rank's part of any schedule, in place; see `all_reduce`."""
    array = _as_array(buffer)
    program = get_rank_program(schedule, comm.rank, comm.size, array.size, array.itemsize)
    state = _state_of(comm)
    scratch = _SCRATCH.take(array.dtype, program.scratch, lambda length: np.empty(length, array.dtype))
    try:
        note = _assert_same_on_all_ranks(array, schedule, comm, limit_s)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs pass through, as in any sum
            run_rank_program(program, array, scratch, _post_bytes(state.comm, note.tag, limit_s))
    except (MPI.Exception, TimeoutError) as error:
        _ABANDONED.append((array, scratch))
        raise _lost_peer(schedule, comm, error) from error


def _lost_peer(schedule: Schedule, comm: MPI.Intracomm, error: Exception) -> PeerLostError:
    return PeerLostError(
        f"{schedule} on rank {comm.rank} of {comm.size}: the sum broke off: {error}. Another rank ended, does not "
        "answer, or sums another vector. See what the others printed last, and start all of them again."
    )


def _assert_same_on_all_ranks(
    array: np.ndarray,
    schedule: Schedule,
    comm: MPI.Intracomm,
    limit_s: float,
    layers: Layers | None = None,
    form: Form | None = None,
) -> SumNote:
    """Returns the note of this sum; before the first sum of a kind, sees that all ranks have the same one."""
    state, note = _state_of(comm), make_note(schedule, array.size, str(array.dtype), describe_combination(layers, form))
    if note not in state.checked:
        post = _post_bytes(state.comm, 0, limit_s)
        make = lambda text: np.frombuffer(text, np.uint8).copy()  # noqa: E731
        assert_same_notes(note, comm.rank, comm.size, post, make, np.ndarray.tobytes, layers.listing if layers else ())
        state.checked.add(note)
    return note


def adasum(
    buffer: Any,
    schedule: Schedule,
    layers: Layers,
    comm: MPI.Intracomm,
    *,
    form: Form | None = None,
    limit_s: float = 300.0,
    native: bool = True,
) -> None:
    """Combines `buffer` over the ranks in place by Adasum; see `all_reduce`, and `execute.adasum.operator`.

    Args:
      buffer: as for `all_reduce`, of a floating dtype.
      schedule: that combines, as `multipod.collectives.adasum.halving` builds it.
      layers: of the buffer.
      comm: any intracommunicator.
      form: `tree`, whose bits are those of `engines.numpy`, or `gram`; None takes what is faster for this length.
      limit_s: the longest to wait for one message.
      native: do the arithmetic in C, where there is a compiler.

    Raises:
      ScheduleError: a schedule, a buffer or layers that do not fit, or the ranks do not give the same.
      PoisonedError: on all ranks, if some layer of any is not finite; the buffer is of no use then.
      PeerLostError: another rank ended, or did not answer in time.
    """
    array = _as_array(buffer)
    if array.dtype.kind in "biuc":
        raise ScheduleError(f"adasum: an array of {array.dtype} has no angles. Give real floating-point numbers.")
    try:
        note = _assert_same_on_all_ranks(array, schedule, comm, limit_s, layers, form)
        with np.errstate(over="ignore", invalid="ignore"):
            engine = _CommEngine(comm, note.tag, limit_s)
            combine_vector(engine, Arithmetic(native), array, schedule, comm.rank, layers, form)
    except (MPI.Exception, TimeoutError) as error:
        _ABANDONED.append(array)
        raise _lost_peer(schedule, comm, error) from error


class _CommEngine:
    """The messages of Adasum over a communicator."""

    piece_bytes = PIECE_BYTES

    def __init__(self, comm: MPI.Intracomm, tag: int, limit_s: float) -> None:
        self._comm, self._tag, self._limit_s = comm, tag, limit_s

    def exchange(self, vector: np.ndarray, sends: Sequence[Span], receives: Sequence[Span]) -> Iterator[np.ndarray]:
        ends = np.cumsum([0] + [span.end - span.begin for span in receives]).tolist()
        memory = _ARRIVED.take(vector.dtype, ends[-1], lambda length: np.empty(length, vector.dtype))[0]
        buffers = [memory[begin:end] for begin, end in pairwise(ends)]
        # One tag for all: between two ranks both sides have the spans in one order, and MPI keeps it.
        incoming = [Transfer(buffer, span.peer, 0) for buffer, span in zip(buffers, receives, strict=True)]
        outgoing = [Transfer(vector[span.begin : span.end], span.peer, 0) for span in sends]
        try:
            waits = _post_bytes(_state_of(self._comm).comm, self._tag, self._limit_s)(incoming, outgoing)
            for wait, buffer in zip(waits, buffers, strict=False):
                wait()
                yield buffer
            for wait in waits[len(buffers) :]:
                wait()
        except TimeoutError:
            _ABANDONED.append(buffers)
            raise

    def run(self, vector: np.ndarray, schedule: Schedule) -> None:
        run(vector, schedule, self._comm, limit_s=self._limit_s)


def open_shared_memory(comm: MPI.Intracomm, **options: Any) -> SharedMemory:
    """The window of shared memory of the ranks of `comm`, which must be on one host; all of them call it.

    Args:
      comm: `world.Split_type(MPI.COMM_TYPE_SHARED)` gives the ranks of this host.
      options: of `SharedMemory`.

    Raises:
      ClusterError: the ranks are not on one host.
    """
    return SharedMemory(comm.rank, comm.size, comm.allgather, **options)


class _CommState:
    """What is kept on a communicator: messages of our own, and the sums that its ranks have checked."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.checked: set[SumNote] = set()


_SCRATCH, _ARRIVED = Scratch(), Scratch()
_ABANDONED: list[Any] = []  # memory in which a message may still arrive
_KEY = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, state: state.comm.Free())


def _state_of(comm: MPI.Intracomm) -> _CommState:
    state: Any = comm.Get_attr(_KEY)
    if state is None:
        state = _CommState(comm)
        comm.Set_attr(_KEY, state)
    return state


def _as_array(buffer: Any) -> np.ndarray:
    """The memory of `buffer` as a NumPy array."""
    array = buffer
    if not isinstance(buffer, np.ndarray):
        try:
            array = np.from_dlpack(buffer) if hasattr(buffer, "__dlpack__") else np.asarray(memoryview(buffer))
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise ScheduleError(
                f"a {type(buffer).__name__} does not give its memory to NumPy ({error}). Give a NumPy array, or a copy "
                "in the host's memory of a dtype that NumPy has."
            ) from error
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable or array.dtype.hasobject:
        raise ScheduleError(
            f"a {type(buffer).__name__} of shape {array.shape}, strides {array.strides} and dtype {array.dtype} is not "
            "flat in memory or not writeable, and schedules change a flat vector of numbers. Give array.reshape(-1) of "
            "a contiguous array, or a copy."
        )
    return array


def _post_bytes(comm: MPI.Intracomm, tag: int, limit_s: float) -> Post:
    largest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # other communicators do not have it

    # As bytes: MPI has no name for some dtypes, such as bfloat16, and does not add here.
    def post(incoming: Sequence[Transfer], outgoing: Sequence[Transfer]) -> list[Wait]:
        peers = [m.peer for m in (*incoming, *outgoing)]
        requests = [comm.Irecv([m.buffer.view(np.uint8), MPI.BYTE], m.peer, (tag + m.tag) % largest) for m in incoming]
        requests += [comm.Isend([m.buffer.view(np.uint8), MPI.BYTE], m.peer, (tag + m.tag) % largest) for m in outgoing]
        return [partial(_wait, request, peer, limit_s) for request, peer in zip(requests, peers, strict=True)]

    return post


def _wait(request: MPI.Request, peer: int, limit_s: float) -> None:
    if request.Test():
        return
    until = time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > until:
            _ABANDONED.append(request)
            raise TimeoutError(f"rank {peer} has not answered for {limit_s:g} s")
