"""Gives every float tensor its scale: kernels that only move numbers share one, some have a fixed one."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from multipod.errors import ExportError
from multipod.micro.graph import Graph, Op, Quant, Tensor, format_shapes, inner_graphs
from multipod.micro.operators.table import weights_of
from multipod.micro.quantising import kernels
from multipod.micro.quantising.options import Quantisation
from multipod.micro.quantising.ranges import Seen, grid, span


def refuse_unknown(graph: Graph, options: Quantisation) -> None:
    """Refuses operators without an integer kernel.

    Raises:
      ExportError: lists all of them, with the user's lines.
    """
    wrong: list[str] = []
    unknown = {op for op in graph.ops if not (is_float(op, options) or kernels.is_known(op, options.activations))}
    for op in graph.ops:
        if inner_graphs(op) and op.kind != "TABLE":
            wrong.append(
                f"{op.source}: {op.kind}, a loop or branch; unroll it (export(..., unroll=1000)) or keep it in float32"
            )
        elif op in unknown and any(t.dtype == "float32" for t in (*op.tensors_in, *op.outputs)):
            wrong.append(f"{op.source}: {op.kind}({format_shapes(op.inputs)})")
        elif (kernel := weights_of(op)) and not kernel.int4 and options.weights == "int4":
            wrong.append(f"{op.source}: {op.kind} with int4 weights")
    if wrong:
        kinds = sorted({op.kind for op in unknown})
        raise ExportError(
            f"quantisation: {options.activations} has no kernel for\n  " + "\n  ".join(dict.fromkeys(wrong)) + "\n"
            f"Keep them in float32 with keep_float={tuple(kinds)!r}, or write them otherwise."
        )


def is_float(op: Op, options: Quantisation) -> bool:
    """Whether an operator works in float32 in the quantised model: asked for, or a change of type."""
    return op.kind in options.keep_float or op.kind == "CAST"


def in_float(tensor: Tensor | None) -> bool:
    """Whether a tensor is one that is to be quantised."""
    return tensor is not None and tensor.dtype == "float32"


def insert_requantising(graph: Graph, options: Quantisation) -> Graph:
    """The graph with a QUANTIZE before operators that want equal scales of inputs whose scales are fixed."""
    makers = graph.producer
    ops: list[Op] = []
    for op in graph.ops:
        moving = [t for t in op.tensors_in if in_float(t) and not t.constant]
        if kernels.shares_scale(op) and len(set(moving)) > 1:
            swaps = {}
            for tensor in dict.fromkeys(moving):
                maker = _origin(makers, tensor)
                if maker is not None and kernels.fixed_grid(maker, options.activations):
                    swaps[tensor] = Tensor(tensor.name + "_requantised", tensor.shape)
                    ops.append(Op("QUANTIZE", (tensor,), (swaps[tensor],), {}, op.source))
            op = replace(op, inputs=tuple(swaps.get(t, t) if t is not None else None for t in op.inputs))
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _origin(makers: Mapping[Tensor, Op], tensor: Tensor) -> Op | None:
    """The operator that gave a tensor its scale, through those that only move numbers."""
    op = makers.get(tensor)
    while op is not None and kernels.shares_scale(op):
        moving = {t for t in op.tensors_in if in_float(t) and not t.constant}
        if len(moving) != 1:
            return None
        op = makers.get(moving.pop())
    return op


class _Groups:
    """Disjoint sets of tensors."""

    def __init__(self) -> None:
        self.parent: dict[Tensor, Tensor] = {}

    def root(self, tensor: Tensor) -> Tensor:
        while self.parent.get(tensor, tensor) is not tensor:
            tensor = self.parent[tensor]
        return tensor

    def join(self, first: Tensor, second: Tensor) -> None:
        self.parent[self.root(second)] = self.root(first)


def grids(graph: Graph, seen: Mapping[Tensor, Seen], options: Quantisation) -> dict[Tensor, Quant]:
    """The grid of every float tensor but weights and biases; of constants too, where an operator reads them as data."""
    groups, fixed = _Groups(), dict[Tensor, Quant]()
    spans: dict[Tensor, tuple[float, float]] = {}
    for op in graph.ops:
        if is_float(op, options):
            continue
        data = _data(op)
        for tensor in data:
            if tensor.constant and not kernels.clips(op):
                spans[tensor] = float(tensor.values.min()), float(tensor.values.max())
        if kernels.shares_scale(op):
            for tensor in data:
                groups.join(op.output, tensor)
    for op in graph.ops:
        fixed_grid = None if is_float(op, options) else kernels.fixed_grid(op, options.activations)
        if fixed_grid:
            fixed[groups.root(op.output)] = Quant((fixed_grid[0],), fixed_grid[1])
    for tensor, statistics in seen.items():
        spans[tensor] = span(statistics, options)
    merged: dict[Tensor, tuple[float, float]] = {}
    for tensor, (low, high) in spans.items():
        root = groups.root(tensor)
        known = merged.get(root, (low, high))
        merged[root] = min(low, known[0]), max(high, known[1])
    everything = {*spans, *(t for op in graph.ops if not is_float(op, options) for t in _data(op))}
    return {
        tensor: fixed.get(groups.root(tensor)) or grid(*merged.get(groups.root(tensor), (0.0, 1.0)), options)
        for tensor in everything
    }


def _data(op: Op) -> list[Tensor]:
    """The float inputs of an operator that are data: not weights and biases."""
    if kernel := weights_of(op):
        return [op.input(kernel.data)]
    return [tensor for tensor in op.tensors_in if in_float(tensor)]


def weight_grid(op: Op, weights: np.ndarray, axis: int, options: Quantisation) -> Quant:
    """Symmetric, one scale for each output channel; a single one for dense layers in int4, or where asked for."""
    limit = options.weight_limit
    if not per_channel(op, options):
        return Quant((_scale(float(np.abs(weights).max(initial=0)), limit),), 0)
    largest = np.abs(weights).max(axis=tuple(d for d in range(weights.ndim) if d != axis), initial=0)
    return Quant(tuple(_scale(float(size), limit) for size in largest), 0, axis)


def per_channel(op: Op, options: Quantisation) -> bool:
    """Whether each output channel has a scale of its own. TFLM's dense layers have no such kernel in int4."""
    return op.kind != "FULLY_CONNECTED" or (options.dense_per_channel and options.weights != "int4")


def _scale(size: float, limit: int) -> float:
    return float(np.float32(max(size, 1e-10) / limit))
