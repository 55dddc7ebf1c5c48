"""Plans the arena on the host: where each activation lies, so that a microcontroller need not think about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from multipod.micro.graph import Graph, Tensor, inner_graphs
from multipod.micro.operators.table import OPERATORS

ALIGNMENT = 16
"""Bytes to which TFLM rounds every buffer."""
TRIES = 2000


@dataclass(frozen=True)
class Life:
    """A buffer of `size` bytes that is in use from operator `first` to operator `last`, both included."""

    size: int
    first: int
    last: int

    def meets(self, other: "Life") -> bool:
        """Whether both are in use at the same time."""
        return self.first <= other.last and other.first <= self.last


def lifetimes(graph: Graph) -> dict[Tensor, Life]:
    """The lives of the tensors that are not constant: inputs from the first operator on, outputs to the last."""
    first = dict.fromkeys(graph.inputs, 0)
    last = dict.fromkeys(graph.inputs, 0)
    for number, op in enumerate(graph.ops):
        for tensor in op.outputs:
            first[tensor] = last[tensor] = number
        for tensor in op.tensors_in:
            last[tensor] = number
    last.update(dict.fromkeys(graph.outputs, max(len(graph.ops) - 1, 0)))
    return {t: Life(-(-t.size_bytes // ALIGNMENT) * ALIGNMENT, first[t], last[t]) for t in first if not t.constant}


def in_place(graph: Graph) -> dict[Tensor, Tensor]:
    """For outputs that may lie over an input of the same shape, which nothing needs later: that input."""
    last = {tensor: number for number, op in enumerate(graph.ops) for tensor in op.tensors_in}
    over: dict[Tensor, Tensor] = {}
    for number, op in enumerate(graph.ops):
        for tensor in op.tensors_in if OPERATORS[op.kind].in_place else ():
            alike = tensor.dtype == op.output.dtype and (tensor.shape == op.output.shape or op.kind == "RESHAPE")
            free = last[tensor] == number and not tensor.constant and tensor not in graph.outputs
            if alike and free:
                over.setdefault(op.output, tensor)
    return over


def shared_lives(graph: Graph) -> tuple[list[Life], dict[Tensor, int]]:
    """The lives of pieces of memory, and which piece each tensor lies in: more than one where it is worked in place."""
    alone, over = lifetimes(graph), in_place(graph)
    pieces: list[Life] = []
    number: dict[Tensor, int] = {}
    for tensor, life in alone.items():
        below = over.get(tensor)
        if below is None:
            number[tensor] = len(pieces)
            pieces.append(life)
        else:
            number[tensor] = piece = number[below]
            pieces[piece] = Life(pieces[piece].size, pieces[piece].first, max(pieces[piece].last, life.last))
    return pieces, number


def lower_bound(all_lives: Sequence[Life]) -> int:
    """The bytes in use at the fullest moment: no plan needs less, unless operators work in place."""
    moments = {life.first for life in all_lives}
    return max((sum(x.size for x in all_lives if x.first <= now <= x.last) for now in moments), default=0)


def place(order: Sequence[int], all_lives: Sequence[Life]) -> tuple[list[int], int]:
    """Offsets when each life in this order takes the lowest place that is free for all of it, and the bytes in all."""
    offsets = [0] * len(all_lives)
    done: list[int] = []
    for number in order:
        life = all_lives[number]
        taken = sorted((offsets[i], offsets[i] + all_lives[i].size) for i in done if all_lives[i].meets(life))
        offset = 0
        for start, end in taken:
            if start - offset >= life.size:
                break
            offset = max(offset, end)
        offsets[number] = offset
        done.append(number)
    return offsets, max((o + x.size for o, x in zip(offsets, all_lives, strict=True)), default=0)


def plan(all_lives: Sequence[Life]) -> tuple[list[int], int]:
    """Offsets of buffers in one arena, and its bytes.

    First fit by size (as TFLM does), by length of life and by area; where none reaches the lower bound, what tops the
    arena is moved to the front of the order, as long as that helps, `TRIES` times at most. Small problems end optimal;
    in general this is NP-hard (dynamic storage allocation; Garey and Johnson, 1979, SR2).
    """
    numbers = range(len(all_lives))
    keys = (
        lambda i: (-all_lives[i].size, all_lives[i].first),
        lambda i: (all_lives[i].first - all_lives[i].last, -all_lives[i].size),
        lambda i: -all_lives[i].size * (all_lives[i].last - all_lives[i].first + 1),
    )
    orders = [sorted(numbers, key=key) for key in keys]
    bound = lower_bound(all_lives)
    best = min((place(order, all_lives) for order in orders), key=lambda tried: tried[1])
    for start in orders:
        order, seen = start, set[tuple[int, ...]]()
        for _ in range(TRIES // len(orders)):
            offsets, total = place(order, all_lives)
            best = min(best, (offsets, total), key=lambda tried: tried[1])
            if best[1] <= bound or tuple(order) in seen:
                break
            seen.add(tuple(order))
            top = max(numbers, key=lambda i: offsets[i] + all_lives[i].size)
            order = [top, *(i for i in order if i != top)]
    return best


def plan_offline(graph: Graph) -> list[int] | None:
    """An offset for each tensor of the file, -1 for constants; None for graphs with graphs inside, which TFLM plans."""
    if any(inner_graphs(op) for op in graph.ops):
        return None
    pieces, number = shared_lives(graph)
    offsets, _ = plan(pieces)
    return [offsets[number[tensor]] if tensor in number else -1 for tensor in graph.tensors]
