"""Rewrite rules for operators that only move elements: reshapes and transposes travel down and cancel."""

from dataclasses import replace

import numpy as np

from multipod.micro.graph import Op, Tensor, constant
from multipod.micro.lowering.constants import small
from multipod.micro.match import Const, Found, Rule, new, node
from multipod.micro.operators.table import OPERATORS

UNARY, BINARY = (
    "|".join(name for name, operator in OPERATORS.items() if operator.elementwise == inputs) for inputs in (1, 2)
)


def _like(op: Op, suffix: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(op.output.name + suffix, shape, op.output.dtype)


def _reshape_once(found: Found) -> list[Op]:
    return [replace(found.op, inputs=(found["x"], *found.op.inputs[1:]))]


def _same_shape(found: Found) -> Tensor | None:
    return found["x"] if found["x"].shape == found.op.output.shape else None


def _sink_reshape(found: Found) -> list[Op]:
    """f(reshape(x)) = reshape(f(x))."""
    op = found.op
    inner = _like(op, "_flat", found["x"].shape)
    return [
        replace(op, inputs=(found["x"],), outputs=(inner,)),
        new("RESHAPE", [inner, constant(np.asarray(op.output.shape, np.int32))], op.output, op.source),
    ]


def _sink_reshape_beside(found: Found) -> list[Op] | None:
    """reshape(x) + c = reshape(x + c), where c is one number, or one for each of the last dim, which stays."""
    op, c = found.op, small(found["c"].values)
    x, shape = found["x"], found.op.output.shape
    if not x.shape or not shape or found.ops["reshape"].output.shape != shape:
        return None
    if not (c.ndim == 0 or (c.ndim == 1 and x.shape[-1] == shape[-1] == c.shape[0])):
        return None
    inner = _like(op, "_flat", x.shape)
    inputs = tuple(x if tensor is found.ops["reshape"].output else constant(c) for tensor in op.inputs)
    return [
        replace(op, inputs=inputs, outputs=(inner,)),
        new("RESHAPE", [inner, constant(np.asarray(shape, np.int32))], op.output, op.source),
    ]


def _sink_reshape_pair(found: Found) -> list[Op] | None:
    """reshape(x) + reshape(y) = reshape(x + y), where the two are alike, or differ in the last dim alone."""
    op, x, y = found.op, found["x"], found["y"]
    left, right = (tensor.shape for tensor in op.tensors_in)
    alike = x.shape == y.shape and left == right
    kept = all(t.shape and s and t.shape[-1] == s[-1] for t, s in ((x, left), (y, right)))
    if x is y or not (alike or (kept and x.shape[:-1] == y.shape[:-1] and left[:-1] == right[:-1])):
        return None
    inner = _like(op, "_flat", np.broadcast_shapes(x.shape, y.shape))
    return [
        replace(op, inputs=(x, y), outputs=(inner,)),
        new("RESHAPE", [inner, constant(np.asarray(op.output.shape, np.int32))], op.output, op.source),
    ]


def _sink_reshape_reduce(found: Found) -> list[Op] | None:
    """A reduction of the last dim, which the reshape before it leaves alone."""
    op, x, flat = found.op, found["x"], found.ops["reshape"].output
    last = [int(axis) for axis in np.ravel(found["axes"].values)] == [len(flat.shape) - 1]
    if not last or not op.options["keep_dims"] or not x.shape or x.shape[-1] != flat.shape[-1]:
        return None
    inner = _like(op, "_flat", (*x.shape[:-1], 1))
    axes = constant(np.asarray([len(x.shape) - 1], np.int32))
    return [
        replace(op, inputs=(x, axes), outputs=(inner,)),
        new("RESHAPE", [inner, constant(np.asarray(op.output.shape, np.int32))], op.output, op.source),
    ]


def _order(found: Found) -> list[int]:
    return [int(dim) for dim in found["order"].values]


def _back(inner: Tensor, order: list[int], op: Op) -> Op:
    return new("TRANSPOSE", [inner, constant(np.asarray(order, np.int32))], op.output, op.source)


def _transpose_twice(found: Found) -> list[Op] | Tensor:
    order = [_order(found)[int(dim)] for dim in found["second"].values]
    if order == sorted(order):
        return found["x"]
    return [new("TRANSPOSE", [found["x"], constant(np.asarray(order, np.int32))], found.op.output, found.op.source)]


def _transpose_of_ones(found: Found) -> list[Op] | None:
    """Where only dims of size 1 move, a transpose is a reshape."""
    moved = [dim for dim in _order(found) if found["x"].shape[dim] > 1]
    if moved != sorted(moved):
        return None
    shape = constant(np.asarray(found.op.output.shape, np.int32))
    return [new("RESHAPE", [found["x"], shape], found.op.output, found.op.source)]


def _sink_transpose(found: Found) -> list[Op]:
    """f(transpose(x)) = transpose(f(x))."""
    inner = _like(found.op, "_t", found["x"].shape)
    return [replace(found.op, inputs=(found["x"],), outputs=(inner,)), _back(inner, _order(found), found.op)]


def _sink_transpose_beside(found: Found) -> list[Op] | None:
    """transpose(x) + c = transpose(x + c'), with c' the constant in the order of x."""
    op, order, turned = found.op, _order(found), found.ops["turn"].output
    if turned.shape != op.output.shape:
        return None
    c = found["c"].values
    wide = c.reshape((1,) * (len(order) - c.ndim) + c.shape).transpose(np.argsort(order))
    inner = _like(op, "_t", found["x"].shape)
    inputs = tuple(found["x"] if tensor is turned else constant(small(wide)) for tensor in op.inputs)
    return [replace(op, inputs=inputs, outputs=(inner,)), _back(inner, order, op)]


def _sink_transpose_pair(found: Found) -> list[Op] | None:
    op, order = found.op, _order(found)
    if order != [int(dim) for dim in found["second"].values] or found["x"].shape != found["y"].shape:
        return None
    inner = _like(op, "_t", found["x"].shape)
    return [replace(op, inputs=(found["x"], found["y"]), outputs=(inner,)), _back(inner, order, op)]


def _sink_transpose_reduce(found: Found) -> list[Op] | None:
    """A reduction of other dims of what was not yet transposed."""
    op, order = found.op, _order(found)
    if not op.options["keep_dims"]:
        return None
    axes = np.asarray(sorted(order[int(axis)] for axis in np.ravel(found["axes"].values)), np.int32)
    shape = tuple(1 if dim in axes else size for dim, size in enumerate(found["x"].shape))
    inner = _like(op, "_t", shape)
    return [replace(op, inputs=(found["x"], constant(axes)), outputs=(inner,)), _back(inner, order, op)]


def _sink_transpose_pad(found: Found) -> list[Op]:
    op, order = found.op, _order(found)
    widths = found["widths"].values[np.argsort(order)]
    shape = tuple(int(size + sum(w)) for size, w in zip(found["x"].shape, widths, strict=True))
    inner = _like(op, "_t", shape)
    inputs = (found["x"], constant(widths), *op.inputs[2:])
    return [replace(op, inputs=inputs, outputs=(inner,)), _back(inner, order, op)]


_TURN = node("TRANSPOSE", "x", Const("order"), name="turn")
_TURN2 = node("TRANSPOSE", "y", Const("second"))
_FLAT = node("RESHAPE", "x", name="reshape")

LAYOUT: list[Rule] = [
    Rule("reshape of reshape", node("RESHAPE", node("RESHAPE", "x")), _reshape_once),
    Rule("reshape to the same", node("RESHAPE", "x"), _same_shape),
    Rule("reshape below f", node(UNARY, _FLAT), _sink_reshape),
    *(Rule("reshape below a constant", node(BINARY, *operands), _sink_reshape_beside)
      for operands in ((_FLAT, Const("c")), (Const("c"), _FLAT))),
    Rule("reshape below a reduction", node("SUM|MEAN|REDUCE_MAX|REDUCE_MIN", _FLAT, Const("axes")),
         _sink_reshape_reduce),
    Rule("reshapes below a sum", node(BINARY, _FLAT, node("RESHAPE", "y")), _sink_reshape_pair),
    Rule("transpose of transpose", node("TRANSPOSE", _TURN, Const("second")), _transpose_twice),
    Rule("transpose of ones", _TURN, _transpose_of_ones),
    Rule("transpose below f", node(UNARY, _TURN), _sink_transpose),
    *(Rule("transpose below a constant", node(BINARY, *operands), _sink_transpose_beside)
      for operands in ((_TURN, Const("c")), (Const("c"), _TURN))),
    Rule("transposes below a sum", node(BINARY, _TURN, _TURN2), _sink_transpose_pair),
    Rule("transpose below a reduction", node("SUM|MEAN|REDUCE_MAX|REDUCE_MIN", _TURN, Const("axes")),
         _sink_transpose_reduce),
    Rule("transpose below padding", node("PAD|PADV2", _TURN, Const("widths")), _sink_transpose_pad),
]  # fmt: skip
