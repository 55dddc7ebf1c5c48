"""Runs a `Schedule` over `torch.distributed`: gloo on CPU, NCCL on GPU, any process group.

Rank r of the group is the live chip of rank r. Results are those of `engines.numpy`, bit for bit. How long a rank waits
for another is the time-out of the group (`init_process_group(timeout=...)`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import distributed
from torch.distributed import ProcessGroup

from multipod.collectives.schedule import Schedule
from multipod.errors import MultipodError, PeerLostError, ScheduleError
from multipod.execute.adasum.arithmetic import Arithmetic
from multipod.execute.adasum.native import NativeFunctions, load_functions
from multipod.execute.adasum.operator import LARGEST, Layers
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

TAG = 1 << 24
"""Our tags count from here, so that none is taken for a caller's."""


def all_reduce(tensor: torch.Tensor, schedule: Schedule, group: ProcessGroup | None = None) -> None:
    """Sums `tensor` over the group's ranks in place, in the way and in the order that the schedule says.

    All ranks call it with the same schedule, length and dtype, and one sum at a time on a group; the first sum of a
    kind sees whether they do. Not checked: that the schedule is right (`multipod.collectives.verify`).

    Args:
      tensor: flat and contiguous, on a device that the group's backend reaches.
      schedule: an all-reduce with as many live chips as the group has ranks.
      group: the default group if None.

    Raises:
      ScheduleError: a schedule or a tensor that does not fit, or the ranks do not give the same.
      PeerLostError: another rank ended, or did not answer in time.
    """
    if schedule.collective != "all-reduce":
        raise ScheduleError(f"{schedule} is no all-reduce. Call run, or build it with collective='all-reduce'.")
    run(tensor, schedule, group)


def run(
    tensor: torch.Tensor, schedule: Schedule, group: ProcessGroup | None = None, *, grouped: bool | None = None
) -> None:
    """Does this rank's part of any schedule, in place; see `all_reduce`.

    NCCL matches the messages of a step only when they are all posted in one call; `grouped` asks for that, and is what
    None means for tensors on an accelerator.
    """
    group = require_process_group(group)
    _check(tensor)
    rank, ranks = group.rank(), group.size()
    program = get_rank_program(schedule, rank, ranks, tensor.numel(), tensor.element_size())
    grouped = tensor.device.type != "cpu" if grouped is None else grouped
    post = _post_grouped if grouped else _post_singly
    try:
        with torch.no_grad():
            note = _assert_same_on_all_ranks(tensor, schedule, group, grouped)
            scratch = _SCRATCH.take((tensor.device, tensor.dtype), program.scratch, tensor.new_empty)
            run_rank_program(program, tensor, scratch, post(group, TAG + note.tag), grouped=grouped)
    except RuntimeError as error:  # what all backends of PyTorch raise
        raise _lost_peer(schedule, group, error) from error


def _lost_peer(schedule: Schedule, group: ProcessGroup, error: RuntimeError) -> PeerLostError:
    return PeerLostError(
        f"{schedule} on rank {group.rank()} of {group.size()}: the sum broke off: {str(error).splitlines()[0]} Another "
        "rank ended, did not answer within the group's time-out, or sums another vector. See what the others printed "
        "last, and start all of them again."
    )


def _assert_same_on_all_ranks(
    tensor: torch.Tensor,
    schedule: Schedule,
    group: ProcessGroup,
    grouped: bool,
    layers: Layers | None = None,
    form: Form | None = None,
) -> SumNote:
    """Returns the note of this sum; before the first sum of a kind, sees that all ranks have the same one."""
    note = make_note(schedule, tensor.numel(), str(tensor.dtype), describe_combination(layers, form))
    if note not in (checked := _CHECKED.setdefault(group, set())):
        post = (_post_grouped if grouped else _post_singly)(group, TAG)
        make = partial(_bytes, device=tensor.device)
        tensors = layers.listing if layers else ()
        assert_same_notes(note, group.rank(), group.size(), post, make, lambda buffer: bytes(buffer.tolist()), tensors)
        checked.add(note)
    return note


def adasum(
    tensor: torch.Tensor,
    schedule: Schedule,
    layers: Layers,
    group: ProcessGroup | None = None,
    *,
    form: Form | None = None,
    grouped: bool | None = None,
) -> None:
    """Combines `tensor` over the group's ranks in place by Adasum; see `all_reduce`, and `execute.adasum.operator`.

    Args:
      tensor: flat and contiguous, of a floating dtype.
      schedule: that combines, as `multipod.collectives.adasum.halving` builds it.
      layers: of the tensor.
      group: the default group if None.
      form: `tree` or `gram` (`multipod.execute.adasum.ranks`); None takes what is faster for this length.
      grouped: as for `run`.

    Raises:
      ScheduleError: a schedule, a tensor or layers that do not fit, or the ranks do not give the same.
      PoisonedError: on all ranks, if some layer of any is not finite; the tensor is of no use then.
      PeerLostError: another rank ended, or did not answer in time.
    """
    group = require_process_group(group)
    _check(tensor)
    if not tensor.is_floating_point():
        raise ScheduleError(f"adasum: a tensor of {tensor.dtype} has no angles. Give floating-point numbers.")
    grouped = tensor.device.type != "cpu" if grouped is None else grouped
    try:
        with torch.no_grad():
            note = _assert_same_on_all_ranks(tensor, schedule, group, grouped, layers, form)
            engine = _GroupEngine(group, note.tag, grouped)
            combine_vector(engine, _TensorArithmetic(), tensor, schedule, group.rank(), layers, form)
    except RuntimeError as error:
        if isinstance(error, MultipodError):
            raise
        raise _lost_peer(schedule, group, error) from error


class _GroupEngine:
    """The messages of Adasum over a process group."""

    def __init__(self, group: ProcessGroup, tag: int, grouped: bool) -> None:
        self._group, self._tag, self._grouped = group, TAG + tag, grouped

    @property
    def piece_bytes(self) -> int:
        return 0 if self._grouped else PIECE_BYTES

    def exchange(self, vector: torch.Tensor, sends: Sequence[Span], receives: Sequence[Span]) -> Iterator[torch.Tensor]:
        lengths = [span.end - span.begin for span in receives]
        memory = _ARRIVED.take((vector.device, vector.dtype), sum(lengths), vector.new_empty)[0]
        buffers = list(memory.split(lengths)) if lengths else []
        post = (_post_grouped if self._grouped else _post_singly)(self._group, self._tag)
        # One tag for all: between two ranks both sides have the spans in one order, and the transport keeps it.
        incoming = [Transfer(buffer, span.peer, 0) for buffer, span in zip(buffers, receives, strict=True)]
        outgoing = [Transfer(vector[span.begin : span.end], span.peer, 0) for span in sends]
        waits = post(incoming, outgoing)
        for wait, buffer in zip(waits, buffers, strict=False):
            wait()
            yield buffer
        for wait in waits[len(buffers) :]:
            wait()

    def run(self, vector: torch.Tensor, schedule: Schedule) -> None:
        run(vector, schedule, self._group, grouped=self._grouped)


class _TensorArithmetic(Arithmetic):
    """The arithmetic of Adasum on tensors, on any device."""

    xp: Any = torch

    def itemsize(self, vector: torch.Tensor) -> int:
        return vector.element_size()

    def zeros(self, like: torch.Tensor, length: int) -> torch.Tensor:
        return like.new_zeros(length, dtype=torch.float64)

    def add_dots(
        self, dots: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor, cuts: np.ndarray, left: bool
    ) -> None:
        if _fast(mine, theirs) is None:
            super().add_dots(dots, mine, theirs, cuts, left)
        else:
            Arithmetic().add_dots(dots.numpy(), mine.numpy(), theirs.numpy(), cuts, left)

    def blend(
        self, mine: torch.Tensor, theirs: torch.Tensor, cuts: np.ndarray, own: torch.Tensor, other: torch.Tensor
    ) -> None:
        if _fast(mine, theirs) is None:
            super().blend(mine, theirs, cuts, own, other)
        else:
            Arithmetic().blend(mine.numpy(), theirs.numpy(), cuts, own.numpy(), other.numpy())

    def add_gram(self, gram: torch.Tensor, rows: Sequence[torch.Tensor], cuts: np.ndarray) -> None:
        if _fast(*rows) is None:
            super().add_gram(gram, rows, cuts)
        else:
            Arithmetic().add_gram(gram.numpy(), [row.numpy() for row in rows], cuts)

    def mix(self, out: torch.Tensor, rows: Sequence[torch.Tensor], cuts: np.ndarray, weights: np.ndarray) -> None:
        if _fast(out, *rows) is None:
            super().mix(out, rows, cuts, weights)
        else:
            Arithmetic().mix(out.numpy(), [row.numpy() for row in rows], cuts, weights)

    def finite(self, vector: torch.Tensor) -> bool:
        if _fast(vector) is not None:
            return Arithmetic().finite(vector.numpy())
        if vector.dtype != torch.float64 and bool(vector.sum(dtype=torch.float32).isfinite()):
            return True
        return bool((vector.double().abs() <= LARGEST).all())

    def numbers(self, values: torch.Tensor) -> np.ndarray:
        return values.cpu().numpy()

    def _fast(self, *arrays: Any) -> None:
        """None: what tensors can have of it is taken above."""

    def _wide(self, part: torch.Tensor) -> torch.Tensor:
        return part.double()

    def _stacked(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts))

    def _slices(self, like: torch.Tensor, begin: int, end: int) -> list[slice]:
        at_once = like.device.type != "cpu" and begin < end
        return [slice(begin, end)] if at_once else super()._slices(like, begin, end)


def _fast(*tensors: torch.Tensor) -> NativeFunctions | None:
    """The functions in C, if they take these tensors: they lie in the host's memory, and all have one dtype."""
    if any(t.device.type != "cpu" or t.dtype != tensors[0].dtype or not t.is_contiguous() for t in tensors):
        return None
    return load_functions(_NUMPY[tensors[0].dtype]) if tensors[0].dtype in _NUMPY else None


_NUMPY = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def require_process_group(group: ProcessGroup | None) -> ProcessGroup:
    """The group, or the default one if None.

    Raises:
      ScheduleError: there is no default group.
    """
    group = group or distributed.group.WORLD
    if group is None:
        raise ScheduleError(
            "torch.distributed has no process group. Call torch.distributed.init_process_group first, or run under "
            "torchrun."
        )
    return group


def open_shared_memory(group: ProcessGroup | None = None, **options: Any) -> "TensorMemory":
    """The group's window of shared memory, for CPU tensors; all ranks call it, on one host.

    Args:
      group: the default group if None.
      options: of `SharedMemory`.

    Raises:
      ClusterError: the ranks are not on one host.
    """
    group = require_process_group(group)

    def exchange(value: bytes) -> Sequence[bytes]:
        values: list[bytes] = [b""] * group.size()
        distributed.all_gather_object(values, value, group=group)
        return values

    return TensorMemory(SharedMemory(group.rank(), group.size(), exchange, **options))


class TensorMemory:
    """`SharedMemory` for tensors; bfloat16, which NumPy lacks, is added by PyTorch."""

    def __init__(self, window: SharedMemory) -> None:
        self._window = window

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a flat CPU tensor over the ranks in place; see `SharedMemory.all_reduce`.

        Raises:
          ScheduleError: a tensor that is not flat, not contiguous or not on the CPU.
          PeerLostError: another rank ended or does not answer.
        """
        _check(tensor)
        if tensor.device.type != "cpu":
            raise ScheduleError(
                f"shared-memory: the tensor is on {tensor.device}, and the window is in the host's memory. "
                "Sum over the group with another algorithm."
            )
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            view = partial(_view, dtype=tensor.dtype)
            self._window.sum_with(tensor, tensor.data_ptr(), view, torch.add)
        else:
            self._window.all_reduce(tensor.numpy())

    def empty(self, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A flat tensor in shared memory, not filled in, which is summed faster; see `SharedMemory.empty`."""
        return _view(self._window.empty(length * dtype.itemsize, np.uint8), dtype)

    def close(self) -> None:
        """Gives the window back."""
        self._window.close()


_SCRATCH = Scratch()
_ARRIVED = Scratch()
_CHECKED: WeakKeyDictionary[ProcessGroup, set[SumNote]] = WeakKeyDictionary()


def _bytes(text: bytes, device: torch.device) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8, device=device)


def _view(raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype)


def _check(tensor: torch.Tensor) -> None:
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ScheduleError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not flat in memory, and "
            "schedules cut a flat vector. Give tensor.view(-1), or a contiguous copy."
        )


def _post_singly(group: ProcessGroup, tag: int) -> Post:
    def post(incoming: Sequence[Transfer], outgoing: Sequence[Transfer]) -> list[Wait]:
        works = [distributed.irecv(m.buffer, group=group, tag=tag + m.tag, group_src=m.peer) for m in incoming]
        works += [distributed.isend(m.buffer, group=group, tag=tag + m.tag, group_dst=m.peer) for m in outgoing]
        return [work.wait for work in works]

    return post


def _post_grouped(group: ProcessGroup, tag: int) -> Post:
    def post(incoming: Sequence[Transfer], outgoing: Sequence[Transfer]) -> list[Wait]:
        both = [(distributed.irecv, m) for m in incoming] + [(distributed.isend, m) for m in outgoing]
        if not both:
            return []
        works = distributed.batch_isend_irecv(
            [distributed.P2POp(op, m.buffer, group=group, tag=tag + m.tag, group_peer=m.peer) for op, m in both]
        )
        # NCCL gives one work for all of them; other backends give one for each.
        return [work.wait for work in (works * len(both) if len(works) == 1 else works)]

    return post
