"""Masks in front of a softmax: numbers that stand for minus infinity, brought near the others.

`softmax(where(mask, x, -1e9))` would have one grid of integers from -1e9 to the largest x, on which all x are the same.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from multipod.micro.graph import Graph, Op, Tensor
from multipod.micro.quantising.ranges import Seen

MARGIN = 12.0
"""So far below the least of the others a number has a probability of exp(-12) = 6e-6 of theirs at most: less than the
smallest step of a softmax's output in 8 and in 16 bits."""

MOVES = {"RESHAPE", "TRANSPOSE"}
"""Operators between a choice and a softmax that change no number."""


def narrow_masks(graph: Graph, seen: Mapping[Tensor, Seen]) -> Graph:
    """The graph with constants of choices that go into a softmax alone, raised to `MARGIN` below what they hide.

    Args:
      seen: what calibration saw of each tensor.
    """
    readers: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for tensor in op.tensors_in:
            readers.setdefault(tensor, []).append(op)
    return replace(graph, ops=tuple(_narrowed(op, graph, readers, seen) for op in graph.ops))


def _narrowed(op: Op, graph: Graph, readers: Mapping[Tensor, list[Op]], seen: Mapping[Tensor, Seen]) -> Op:
    if op.kind != "SELECT_V2" or not _only_into_softmax(op.output, graph, readers):
        return op
    inputs = list(op.inputs)
    for at, other in ((1, 2), (2, 1)):
        hidden, shown = op.input(at), op.input(other)
        if hidden.constant and not shown.constant and shown in seen:
            least = np.float32(seen[shown].low - MARGIN)
            inputs[at] = replace(hidden, data=np.maximum(hidden.values, least))
    return replace(op, inputs=tuple(inputs))


def _only_into_softmax(tensor: Tensor, graph: Graph, readers: Mapping[Tensor, list[Op]]) -> bool:
    return tensor not in graph.outputs and all(
        op.kind == "SOFTMAX" or (op.kind in MOVES and _only_into_softmax(op.output, graph, readers))
        for op in readers.get(tensor, ())
    )
