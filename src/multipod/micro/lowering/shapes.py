"""Primitives that move elements: reshape, transpose, slice, pad, concatenate, gather, reverse."""

from typing import Any

import numpy as np

from multipod.micro.graph import Tensor
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Rule, Value

MAX_RANK = 4
"""TFLM's kernels that move or broadcast elements know at most this many dims (some five)."""


def ints(values: Any) -> np.ndarray:
    """A constant int32 vector."""
    return np.asarray(list(values), np.int32)


def reshaped(low: Lowering, x: Value, shape: tuple[int, ...]) -> Value:
    """x in another shape; nothing where it has it."""
    if tuple(x.shape) == tuple(shape):
        return x
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    return low.emit("RESHAPE", [x, ints(shape)], shape)


def transposed(low: Lowering, x: Value, permutation: tuple[int, ...]) -> Value:
    """x with dims in this order, merged where they stay side by side so that as few as may be are left."""
    if isinstance(x, np.ndarray):
        return x.transpose(permutation)
    shape = tuple(x.shape[dim] for dim in permutation)
    moved = [dim for dim in permutation if x.shape[dim] > 1]
    if moved == sorted(moved):  # only dims of size 1 move
        return reshaped(low, x, shape)
    if x.dtype not in ("float32", "int8", "int16"):
        raise CannotLowerError(f"transposes {x.dtype}, and TFLM transposes float32, int8 and int16")
    groups = _runs(permutation, x.shape)
    if len(groups) == len(permutation) or len(permutation) <= MAX_RANK:
        _check_rank(len(permutation))
        return low.emit("TRANSPOSE", [x, ints(permutation)], shape)
    order = sorted(range(len(groups)), key=lambda number: groups[number][0])
    merged = tuple(int(np.prod([x.shape[dim] for dim in groups[number]])) for number in order)
    _check_rank(len(merged))
    flat = low.emit("RESHAPE", [x, ints(merged)], merged)
    places = [order.index(number) for number in range(len(groups))]
    turned = low.emit("TRANSPOSE", [flat, ints(places)], [merged[place] for place in places])
    return low.emit("RESHAPE", [turned, ints(shape)], shape)


def _runs(permutation: tuple[int, ...], shape: tuple[int, ...]) -> list[list[int]]:
    """Dims that follow each other before and after, without those of size 1."""
    runs: list[list[int]] = []
    kept = [dim for dim in range(len(shape)) if shape[dim] > 1]
    for dim in (dim for dim in permutation if shape[dim] > 1):
        follows = bool(runs) and kept.index(dim) == kept.index(runs[-1][-1]) + 1
        if follows:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return runs


def _check_rank(rank: int) -> None:
    if rank > MAX_RANK:
        raise CannotLowerError(f"needs {rank} dims, and TFLM's kernels know {MAX_RANK}")


def _shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


def reshape(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """RESHAPE, also of squeeze and expand_dims."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        raise CannotLowerError("permutes dims while it reshapes; transpose first")
    return reshaped(low, inputs[0], _shape(eqn))


def transpose(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """TRANSPOSE."""
    return transposed(low, inputs[0], eqn.params["permutation"])


def broadcast_in_dim(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """A reshape, and BROADCAST_TO where elements repeat; element-wise readers drop the latter later."""
    x, shape = inputs[0], _shape(eqn)
    wide = [1] * len(shape)
    for dim, place in enumerate(eqn.params["broadcast_dimensions"]):
        wide[place] = x.shape[dim]
    x = reshaped(low, x, tuple(wide))
    return x if tuple(wide) == shape else low.emit("BROADCAST_TO", [x, ints(shape)], shape)


def slice_(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """SLICE, or STRIDED_SLICE where there are strides."""
    x, shape = low.tensor(inputs[0]), _shape(eqn)
    start, limit, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
    return sliced(low, x, start, limit, strides, shape)


def sliced(low: Lowering, x: Value, start: Any, limit: Any, strides: Any, shape: Any) -> Value:
    """x[start:limit:strides]."""
    if tuple(x.shape) == tuple(shape):
        return x
    if isinstance(x, np.ndarray):
        return x[tuple(map(slice, start, limit, strides or [1] * x.ndim))]
    _check_rank(len(x.shape))
    if strides is None or all(stride == 1 for stride in strides):
        return low.emit("SLICE", [x, ints(start), ints(shape)], shape)
    masks: dict[str, Any] = {
        "begin_mask": 0,
        "end_mask": 0,
        "ellipsis_mask": 0,
        "new_axis_mask": 0,
        "shrink_axis_mask": 0,
    }
    return low.emit("STRIDED_SLICE", [x, ints(start), ints(limit), ints(strides)], shape, **masks)


def dynamic_slice(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
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
    x = sliced(low, x, fixed, limit, None, [stop - begin for begin, stop in zip(fixed, limit, strict=True)])
    for dim in moving:
        if low.tensor(x).dtype not in ("float32", "int8"):
            raise CannotLowerError("takes rows of integers at a computed place")
        last = np.array(x.shape[dim] - sizes[dim], np.int32)
        start = low.emit("MINIMUM", [low.emit("MAXIMUM", [starts[dim], np.array(0, np.int32)], ()), last], ())
        rows = low.emit("ADD", [reshaped(low, start, (1,)), ints(range(sizes[dim]))], (sizes[dim],))
        shape = (*x.shape[:dim], sizes[dim], *x.shape[dim + 1 :])
        x = low.emit("GATHER", [x, rows], shape, axis=dim, batch_dims=0)
    return x


def dynamic_update_slice(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """DYNAMIC_UPDATE_SLICE; like JAX's it moves a place that is out of range inside."""
    x, update, *starts = inputs
    if all(isinstance(start, np.ndarray) for start in starts):
        begin: Value = ints(int(np.asarray(start)) for start in starts)
    else:
        parts = [reshaped(low, start, (1,)) for start in starts]
        begin = parts[0] if len(parts) == 1 else low.emit("CONCATENATION", parts, (len(parts),), "int32", axis=0)
    return low.emit("DYNAMIC_UPDATE_SLICE", [x, update, begin], _shape(eqn))


def concatenate(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """CONCATENATION."""
    return concatenated(low, inputs, eqn.params["dimension"], _shape(eqn))


def concatenated(low: Lowering, parts: list[Value], axis: int, shape: tuple[int, ...]) -> Value:
    """Parts side by side; by tens, since TFLM's kernel takes ten."""
    if len(parts) == 1:
        return parts[0]
    most = 10
    while len(parts) > most:
        groups = [parts[start : start + most] for start in range(0, len(parts), most)]
        parts = []
        for group in groups:
            size = sum(part.shape[axis] for part in group)
            parts.append(concatenated(low, group, axis, (*shape[:axis], size, *shape[axis + 1 :])))
    return low.emit("CONCATENATION", parts, shape, axis=axis, fused_activation_function="NONE")


def split(low: Lowering, eqn: Any, inputs: list[Value]) -> list[Value]:
    """One SLICE for each part."""
    x, axis, begin, parts = inputs[0], eqn.params["axis"], 0, []
    for size in map(int, eqn.params["sizes"]):
        start, limit = [0] * len(x.shape), list(x.shape)
        start[axis], limit[axis] = begin, begin + size
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        parts.append(sliced(low, x, start, limit, None, shape))
        begin += size
    return parts


def pad(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """PAD with zeros, PADV2 with another number; negative padding slices. Padding between elements is refused."""
    x, fill = inputs
    config = eqn.params["padding_config"]
    if any(inner for _, _, inner in config):
        raise CannotLowerError("pads between elements, for which TFLite has no operator")
    if isinstance(fill, Tensor):
        raise CannotLowerError("pads with a computed number")
    return padded(low, x, [(before, after) for before, after, _ in config], float(fill))


def padded(low: Lowering, x: Value, around: Any, fill: float = 0.0) -> Value:
    """x with (before, after) more elements along each dim, fewer where negative."""
    start = [max(-before, 0) for before, _ in around]
    limit = [size - max(-after, 0) for size, (_, after) in zip(x.shape, around, strict=True)]
    x = sliced(low, x, start, limit, None, [stop - begin for begin, stop in zip(start, limit, strict=True)])
    grown = [(max(before, 0), max(after, 0)) for before, after in around]
    if not any(map(any, grown)):
        return x
    _check_rank(len(grown))
    shape = [size + before + after for size, (before, after) in zip(x.shape, grown, strict=True)]
    widths = np.asarray(grown, np.int32)
    if fill == 0:
        return low.emit("PAD", [x, widths], shape)
    return low.emit("PADV2", [x, widths, np.asarray(fill, low.tensor(x).dtype)], shape)


def rev(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """REVERSE_V2, one axis at a time."""
    x = inputs[0]
    for axis in eqn.params["dimensions"]:
        x = low.emit("REVERSE_V2", [x, ints([axis])], _shape(eqn))
    return x


def gather(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """GATHER of whole slices along one dim (`jnp.take`, `table[index]`); indices that are out of range are undefined.

    JAX fills with NaN or clips; a microcontroller has no use for either, so the index is trusted.
    """
    table, index = inputs
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    dims = numbers.start_index_map
    whole = all(
        size == full for dim, (size, full) in enumerate(zip(sizes, table.shape, strict=True)) if dim not in dims
    )
    if len(dims) != 1 or numbers.operand_batching_dims or not whole or sizes[dims[0]] != 1:
        raise CannotLowerError("is not a choice of whole slices along one dim (jnp.take along an axis is)")
    axis, shape = dims[0], _shape(eqn)
    if low.tensor(table).dtype not in ("float32", "int8"):
        raise CannotLowerError("takes rows of integers")
    wanted = tuple(index.shape[:-1])
    found = (*table.shape[:axis], *wanted, *table.shape[axis + 1 :])
    if numbers.collapsed_slice_dims != (axis,) and numbers.collapsed_slice_dims != ():
        raise CannotLowerError("drops another dim than the one it chooses along")
    rows = reshaped(low, index, wanted)
    if isinstance(rows, np.ndarray):
        rows = np.clip(rows, 0, table.shape[axis] - 1).astype(np.int32)
    result = low.emit("GATHER", [table, rows], found, axis=axis, batch_dims=0)
    batch = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    kept = [dim for dim in range(len(table.shape)) if dim != axis or not numbers.collapsed_slice_dims]
    order = [*(("t", dim) for dim in range(axis)), *(("i", n) for n in range(len(wanted))),
             *(("t", dim) for dim in range(axis + 1, len(table.shape)))]  # fmt: skip
    names = dict(zip(batch, (("i", n) for n in range(len(wanted))), strict=True))
    names |= dict(zip(numbers.offset_dims, (("t", dim) for dim in kept), strict=True))
    permutation = tuple(order.index(names[dim]) for dim in range(len(shape)) if names[dim] in order)
    return reshaped(low, transposed(low, result, permutation), shape)


RULES: dict[str, Rule] = {
    "reshape": reshape, "squeeze": reshape, "expand_dims": reshape, "transpose": transpose, "slice": slice_,
    "broadcast_in_dim": broadcast_in_dim, "dynamic_slice": dynamic_slice, "concatenate": concatenate, "split": split,
    "dynamic_update_slice": dynamic_update_slice, "pad": pad, "rev": rev, "gather": gather,
}  # fmt: skip
