"""Rewrite rules for operators that only move elements: reshapes and transposes travel down and cancel."""

from dataclasses import replace

import numpy as np

from multipod.micro.graph import Op, Tensor, constant
from multipod.micro.lowering.constants import shrink
from multipod.micro.match import Const, Match, Rewrite, make_op, node
from multipod.micro.operators.table import OPERATORS

UNARY, BINARY = (
    "|".join(name for name, operator in OPERATORS.items() if operator.elementwise == inputs) for inputs in (1, 2)
)


def _like(op: Op, suffix: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(op.output.name + suffix, shape, op.output.dtype)


def _reshape_once(match: Match) -> list[Op]:
    return [replace(match.op, inputs=(match["x"], *match.op.inputs[1:]))]


def _same_shape(match: Match) -> Tensor | None:
    return match["x"] if match["x"].shape == match.op.output.shape else None


def _sink_reshape(match: Match) -> list[Op]:
    """f(reshape(x)) = reshape(f(x))."""
    op = match.op
    inner = _like(op, "_flat", match["x"].shape)
    return [
        replace(op, inputs=(match["x"],), outputs=(inner,)),
        make_op("RESHAPE", [inner, constant(np.asarray(op.output.shape, np.int32))], op.output, op.source),
    ]


def _sink_reshape_beside(match: Match) -> list[Op] | None:
    """reshape(x) + c = reshape(x + c), where c is one number, or one for each of the last dim, which stays."""
    op, c = match.op, shrink(match["c"].values)
    x, shape = match["x"], match.op.output.shape
    if not x.shape or not shape or match.ops["reshape"].output.shape != shape:
        return None
    if not (c.ndim == 0 or (c.ndim == 1 and x.shape[-1] == shape[-1] == c.shape[0])):
        return None
    inner = _like(op, "_flat", x.shape)
    inputs = tuple(x if tensor is match.ops["reshape"].output else constant(c) for tensor in op.inputs)
    return [
        replace(op, inputs=inputs, outputs=(inner,)),
        make_op("RESHAPE", [inner, constant(np.asarray(shape, np.int32))], op.output, op.source),
    ]


def _sink_reshape_pair(match: Match) -> list[Op] | None:
    """reshape(x) + reshape(y) = reshape(x + y), where the two are alike, or differ in the last dim alone."""
    op, x, y = match.op, match["x"], match["y"]
    left, right = (tensor.shape for tensor in op.tensors_in)
    alike = x.shape == y.shape and left == right
    kept = all(t.shape and s and t.shape[-1] == s[-1] for t, s in ((x, left), (y, right)))
    if x is y or not (alike or (kept and x.shape[:-1] == y.shape[:-1] and left[:-1] == right[:-1])):
        return None
    inner = _like(op, "_flat", np.broadcast_shapes(x.shape, y.shape))
    return [
        replace(op, inputs=(x, y), outputs=(inner,)),
        make_op("RESHAPE", [inner, constant(np.asarray(op.output.shape, np.int32))], op.output, op.source),
    ]


def _sink_reshape_reduce(match: Match) -> list[Op] | None:
    """A reduction of the last dim, which the reshape before it leaves alone."""
    op, x, flat = match.op, match["x"], match.ops["reshape"].output
    last = [int(axis) for axis in np.ravel(match["axes"].values)] == [len(flat.shape) - 1]
    if not last or not op.options["keep_dims"] or not x.shape or x.shape[-1] != flat.shape[-1]:
        return None
    inner = _like(op, "_flat", (*x.shape[:-1], 1))
    axes = constant(np.asarray([len(x.shape) - 1], np.int32))
    return [
        replace(op, inputs=(x, axes), outputs=(inner,)),
        make_op("RESHAPE", [inner, constant(np.asarray(op.output.shape, np.int32))], op.output, op.source),
    ]


def _order(match: Match) -> list[int]:
    return [int(dim) for dim in match["order"].values]


def _back(inner: Tensor, order: list[int], op: Op) -> Op:
    return make_op("TRANSPOSE", [inner, constant(np.asarray(order, np.int32))], op.output, op.source)


def _transpose_twice(match: Match) -> list[Op] | Tensor:
    order = [_order(match)[int(dim)] for dim in match["second"].values]
    if order == sorted(order):
        return match["x"]
    return [make_op("TRANSPOSE", [match["x"], constant(np.asarray(order, np.int32))], match.op.output, match.op.source)]


def _transpose_of_ones(match: Match) -> list[Op] | None:
    """Where only dims of size 1 move, a transpose is a reshape."""
    moved = [dim for dim in _order(match) if match["x"].shape[dim] > 1]
    if moved != sorted(moved):
        return None
    shape = constant(np.asarray(match.op.output.shape, np.int32))
    return [make_op("RESHAPE", [match["x"], shape], match.op.output, match.op.source)]


def _sink_transpose(match: Match) -> list[Op]:
    """f(transpose(x)) = transpose(f(x))."""
    inner = _like(match.op, "_t", match["x"].shape)
    return [replace(match.op, inputs=(match["x"],), outputs=(inner,)), _back(inner, _order(match), match.op)]


def _sink_transpose_beside(match: Match) -> list[Op] | None:
    """transpose(x) + c = transpose(x + c'), with c' the constant in the order of x."""
    op, order, turned = match.op, _order(match), match.ops["turn"].output
    if turned.shape != op.output.shape:
        return None
    c = match["c"].values
    wide = c.reshape((1,) * (len(order) - c.ndim) + c.shape).transpose(np.argsort(order))
    inner = _like(op, "_t", match["x"].shape)
    inputs = tuple(match["x"] if tensor is turned else constant(shrink(wide)) for tensor in op.inputs)
    return [replace(op, inputs=inputs, outputs=(inner,)), _back(inner, order, op)]


def _sink_transpose_pair(match: Match) -> list[Op] | None:
    op, order = match.op, _order(match)
    if order != [int(dim) for dim in match["second"].values] or match["x"].shape != match["y"].shape:
        return None
    inner = _like(op, "_t", match["x"].shape)
    return [replace(op, inputs=(match["x"], match["y"]), outputs=(inner,)), _back(inner, order, op)]


def _sink_transpose_reduce(match: Match) -> list[Op] | None:
    """A reduction of other dims of what was not yet transposed."""
    op, order = match.op, _order(match)
    if not op.options["keep_dims"]:
        return None
    axes = np.asarray(sorted(order[int(axis)] for axis in np.ravel(match["axes"].values)), np.int32)
    shape = tuple(1 if dim in axes else size for dim, size in enumerate(match["x"].shape))
    inner = _like(op, "_t", shape)
    return [replace(op, inputs=(match["x"], constant(axes)), outputs=(inner,)), _back(inner, order, op)]


def _sink_transpose_pad(match: Match) -> list[Op]:
    op, order = match.op, _order(match)
    widths = match["widths"].values[np.argsort(order)]
    shape = tuple(int(size + sum(w)) for size, w in zip(match["x"].shape, widths, strict=True))
    inner = _like(op, "_t", shape)
    inputs = (match["x"], constant(widths), *op.inputs[2:])
    return [replace(op, inputs=inputs, outputs=(inner,)), _back(inner, order, op)]


_TURN = node("TRANSPOSE", "x", Const("order"), name="turn")
_TURN2 = node("TRANSPOSE", "y", Const("second"))
_FLAT = node("RESHAPE", "x", name="reshape")

LAYOUT: list[Rewrite] = [
    Rewrite("reshape of reshape", node("RESHAPE", node("RESHAPE", "x")), _reshape_once),
    Rewrite("reshape to the same", node("RESHAPE", "x"), _same_shape),
    Rewrite("reshape below f", node(UNARY, _FLAT), _sink_reshape),
    *(Rewrite("reshape below a constant", node(BINARY, *operands), _sink_reshape_beside)
      for operands in ((_FLAT, Const("c")), (Const("c"), _FLAT))),
    Rewrite("reshape below a reduction", node("SUM|MEAN|REDUCE_MAX|REDUCE_MIN", _FLAT, Const("axes")),
         _sink_reshape_reduce),
    Rewrite("reshapes below a sum", node(BINARY, _FLAT, node("RESHAPE", "y")), _sink_reshape_pair),
    Rewrite("transpose of transpose", node("TRANSPOSE", _TURN, Const("second")), _transpose_twice),
    Rewrite("transpose of ones", _TURN, _transpose_of_ones),
    Rewrite("transpose below f", node(UNARY, _TURN), _sink_transpose),
    *(Rewrite("transpose below a constant", node(BINARY, *operands), _sink_transpose_beside)
      for operands in ((_TURN, Const("c")), (Const("c"), _TURN))),
    Rewrite("transposes below a sum", node(BINARY, _TURN, _TURN2), _sink_transpose_pair),
    Rewrite("transpose below a reduction", node("SUM|MEAN|REDUCE_MAX|REDUCE_MIN", _TURN, Const("axes")),
         _sink_transpose_reduce),
    Rewrite("transpose below padding", node("PAD|PADV2", _TURN, Const("widths")), _sink_transpose_pad),
]  # fmt: skip
