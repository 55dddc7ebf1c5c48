"""Slices, rows that an index chooses, and updates of a part."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.micro.graph import Op, Tensor
from multipod.micro.lowering.constants import ints, shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Value
from multipod.micro.lowering.moves import emit_reshape, emit_slice, emit_transpose
from multipod.micro.match import Const, Match, Rewrite, change_op, node
from multipod.micro.operators.operator import Operator, Options, SameScale


def lower_slice(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """SLICE, or STRIDED_SLICE where there are strides."""
    x, shape = low.tensor(inputs[0]), shape_of(eqn)
    start, limit, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
    return emit_slice(low, x, start, limit, strides, shape)


def lower_dynamic_slice(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """SLICE at a known place; along one dim at a place that is computed, GATHER of the rows."""
    x, starts = inputs[0], inputs[1:]
    sizes = eqn.params["slice_sizes"]
    moving = [dim for dim, start in enumerate(starts) if isinstance(start, Tensor)]
    fixed = [
        0 if isinstance(start, Tensor) else int(np.clip(start, 0, x.shape[dim] - sizes[dim]))
        for dim, start in enumerate(starts)
    ]
    limit = [
        x.shape[dim] if dim in moving else begin + sizes[dim] for dim, begin in enumerate(fixed)
    ]  # a place that is computed is bounded below
    x = emit_slice(low, x, fixed, limit, None, [stop - begin for begin, stop in zip(fixed, limit, strict=True)])
    for dim in moving:
        if low.tensor(x).dtype not in ("float32", "int8"):
            raise CannotLowerError("takes rows of integers at a computed place")
        last = np.array(x.shape[dim] - sizes[dim], np.int32)
        start = low.emit("MINIMUM", [low.emit("MAXIMUM", [starts[dim], np.array(0, np.int32)], ()), last], ())
        rows = low.emit("ADD", [emit_reshape(low, start, (1,)), ints(range(sizes[dim]))], (sizes[dim],))
        shape = (*x.shape[:dim], sizes[dim], *x.shape[dim + 1 :])
        x = low.emit("GATHER", [x, rows], shape, axis=dim, batch_dims=0)
    return x


def lower_dynamic_update_slice(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """DYNAMIC_UPDATE_SLICE; like JAX's it moves a place that is out of range inside."""
    x, update, *starts = inputs
    if all(isinstance(start, np.ndarray) for start in starts):
        begin: Value = ints(int(np.asarray(start)) for start in starts)
    else:
        parts = [emit_reshape(low, start, (1,)) for start in starts]
        begin = parts[0] if len(parts) == 1 else low.emit("CONCATENATION", parts, (len(parts),), "int32", axis=0)
    return low.emit("DYNAMIC_UPDATE_SLICE", [x, update, begin], shape_of(eqn))


def lower_split(low: Lowering, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Becomes one SLICE for each part."""
    x, axis, begin, parts = inputs[0], eqn.params["axis"], 0, []
    for size in map(int, eqn.params["sizes"]):
        start, limit = [0] * len(x.shape), list(x.shape)
        start[axis], limit[axis] = begin, begin + size
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        parts.append(emit_slice(low, x, start, limit, None, shape))
        begin += size
    return parts


def lower_gather(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """GATHER of whole slices along one dim (`jnp.take`, `table[index]`); indices that are out of range are undefined.

    JAX fills with NaN or clips; a microcontroller has no use for either, so the index is trusted.
    """
    table, index = inputs
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    dims = numbers.start_index_map
    is_whole = all(
        size == full for dim, (size, full) in enumerate(zip(sizes, table.shape, strict=True)) if dim not in dims
    )
    if len(dims) != 1 or numbers.operand_batching_dims or not is_whole or sizes[dims[0]] != 1:
        raise CannotLowerError("is not a choice of whole slices along one dim (jnp.take along an axis is)")
    axis, shape = dims[0], shape_of(eqn)
    if low.tensor(table).dtype not in ("float32", "int8"):
        raise CannotLowerError("takes rows of integers")
    wanted = tuple(index.shape[:-1])
    rows_shape = (*table.shape[:axis], *wanted, *table.shape[axis + 1 :])
    if numbers.collapsed_slice_dims != (axis,) and numbers.collapsed_slice_dims != ():
        raise CannotLowerError("drops another dim than the one it chooses along")
    rows = emit_reshape(low, index, wanted)
    if isinstance(rows, np.ndarray):
        rows = np.clip(rows, 0, table.shape[axis] - 1).astype(np.int32)
    result = low.emit("GATHER", [table, rows], rows_shape, axis=axis, batch_dims=0)
    batch = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    kept = [dim for dim in range(len(table.shape)) if dim != axis or not numbers.collapsed_slice_dims]
    order = [*(("t", dim) for dim in range(axis)), *(("i", n) for n in range(len(wanted))),
             *(("t", dim) for dim in range(axis + 1, len(table.shape)))]  # fmt: skip
    names = dict(zip(batch, (("i", n) for n in range(len(wanted))), strict=True))
    names |= dict(zip(numbers.offset_dims, (("t", dim) for dim in kept), strict=True))
    permutation = tuple(order.index(names[dim]) for dim in range(len(shape)) if names[dim] in order)
    return emit_reshape(low, emit_transpose(low, result, permutation), shape)


# --- negative indices -----------------------------------------------------------------------------------------------


def _index(match: Match) -> list[Op] | None:
    """NumPy's negative indices count from the end; an index that a model computes does not."""
    if not np.all(match["zero"].values == 0):
        return None
    return [change_op(match.op, [match["table"], match["i"]], match.op.output)]


def _index_reshaped(match: Match) -> list[Op] | None:
    flat = match.ops["flat"]
    if not np.all(match["zero"].values == 0):
        return None
    rows = replace(flat.output, name=flat.output.name + "_i")
    return [
        change_op(flat, [match["i"], flat.inputs[1]], rows),
        change_op(match.op, [match["table"], rows], match.op.output),
    ]


# --- what is computed -----------------------------------------------------------------------------------------------


def _slice(op: Op, xs: Any) -> Any:
    return lax.dynamic_slice(xs[0], [int(start) for start in xs[1]], op.output.shape)


def _strided_slice(op: Op, xs: Any) -> Any:
    return xs[0][tuple(slice(*map(int, ends)) for ends in zip(*xs[1:], strict=True))]


def _dynamic_update(op: Op, xs: Any) -> Any:
    return lax.dynamic_update_slice(xs[0], xs[1], [xs[2][dim] for dim in range(len(op.input(0).shape))])


_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
_WRAP = node("SELECT_V2", node("LESS", "i", Const("zero")), node("ADD", "i", Const()), "i")

TRUSTED_INDEX = (
    Rewrite("index that may be negative", node("GATHER", "table", _WRAP), _index),
    Rewrite("index that may be negative, reshaped", node("GATHER", "table", node("RESHAPE", _WRAP, name="flat")),
         _index_reshaped),
)  # fmt: skip

OPERATORS = (
    Operator(
        "SLICE", Options(48), since="1.14.0", versions={"int8": (2, "1.14.0"), "int16": (4, "2.4.0")},
        evaluate=_slice, quantised=SameScale(), primitives={"slice": lower_slice, "split": lower_split},
    ),
    Operator(
        "STRIDED_SLICE", Options(32, {name: (number, "int32", 0) for number, name in enumerate(_MASKS)}),
        since="1.6.0", versions={"int8": (2, "1.14.0"), "int16": (4, "2.2.0"), "bool": (3, "2.1.0")},
        evaluate=_strided_slice, quantised=SameScale(),
    ),
    Operator(
        "GATHER", Options(23, {"axis": (0, "int32", 0), "batch_dims": (1, "int32", 0)}), since="1.6.0",
        versions={"int8": (2, "1.14.0")}, quantised=SameScale(("int8",)),
        evaluate=lambda op, xs: jnp.take(xs[0], xs[1], axis=op.options["axis"], mode="clip"),
        primitives={"gather": lower_gather, "dynamic_slice": lower_dynamic_slice},
    ),
    Operator(
        "DYNAMIC_UPDATE_SLICE", Options(117), since="2.9.0", evaluate=_dynamic_update, quantised=SameScale(),
        primitives={"dynamic_update_slice": lower_dynamic_update_slice},
    ),
)  # fmt: skip
