"""Writes operators that move elements: reshapes, transposes, slices, concatenations, padding."""

from typing import Any

import numpy as np

from multipod.micro.lowering.constants import ints
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Value

MAX_RANK = 4
"""TFLM's kernels that move or broadcast elements know at most this many dims (some five)."""


def emit_reshape(low: Lowering, x: Value, shape: tuple[int, ...]) -> Value:
    """Reshapes x; does nothing where it has that shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    return low.emit("RESHAPE", [x, ints(shape)], shape)


def emit_transpose(low: Lowering, x: Value, permutation: tuple[int, ...]) -> Value:
    """Transposes x, with dims merged that stay side by side, so that as few as possible are left."""
    if isinstance(x, np.ndarray):
        return x.transpose(permutation)
    shape = tuple(x.shape[dim] for dim in permutation)
    moved = [dim for dim in permutation if x.shape[dim] > 1]
    if moved == sorted(moved):  # only dims of size 1 move
        return emit_reshape(low, x, shape)
    if x.dtype not in ("float32", "int8", "int16"):
        raise CannotLowerError(f"transposes {x.dtype}, and TFLM transposes float32, int8 and int16")
    groups = _runs(permutation, x.shape)
    if len(groups) == len(permutation) or len(permutation) <= MAX_RANK:
        check_rank(len(permutation))
        return low.emit("TRANSPOSE", [x, ints(permutation)], shape)
    order = sorted(range(len(groups)), key=lambda number: groups[number][0])
    merged = tuple(int(np.prod([x.shape[dim] for dim in groups[number]])) for number in order)
    check_rank(len(merged))
    flat = low.emit("RESHAPE", [x, ints(merged)], merged)
    places = [order.index(number) for number in range(len(groups))]
    turned = low.emit("TRANSPOSE", [flat, ints(places)], [merged[number] for number in places])
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


def check_rank(rank: int) -> None:
    """Refuses more dims than TFLM knows."""
    if rank > MAX_RANK:
        raise CannotLowerError(f"needs {rank} dims, and TFLM's kernels know {MAX_RANK}")


def emit_slice(low: Lowering, x: Value, start: Any, limit: Any, strides: Any, shape: Any) -> Value:
    """Takes x[start:limit:strides]: a SLICE, or a STRIDED_SLICE where there are strides."""
    if tuple(x.shape) == tuple(shape):
        return x
    if isinstance(x, np.ndarray):
        return x[tuple(map(slice, start, limit, strides or [1] * x.ndim))]
    check_rank(len(x.shape))
    if strides is None or all(stride == 1 for stride in strides):
        return low.emit("SLICE", [x, ints(start), ints(shape)], shape)
    names = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    masks: dict[str, Any] = dict.fromkeys(names, 0)
    return low.emit("STRIDED_SLICE", [x, ints(start), ints(limit), ints(strides)], shape, **masks)


def emit_concatenation(low: Lowering, parts: list[Value], axis: int, shape: tuple[int, ...]) -> Value:
    """Puts parts side by side; by tens, since TFLM's kernel takes ten."""
    if len(parts) == 1:
        return parts[0]
    most = 10
    while len(parts) > most:
        groups = [parts[start : start + most] for start in range(0, len(parts), most)]
        parts = []
        for group in groups:
            size = sum(part.shape[axis] for part in group)
            parts.append(emit_concatenation(low, group, axis, (*shape[:axis], size, *shape[axis + 1 :])))
    return low.emit("CONCATENATION", parts, shape, axis=axis, fused_activation_function="NONE")


def emit_pad(low: Lowering, x: Value, around: Any, fill: float = 0.0) -> Value:
    """Adds (before, after) elements along each dim of x, takes some away where negative."""
    start = [max(-before, 0) for before, _ in around]
    limit = [size - max(-after, 0) for size, (_, after) in zip(x.shape, around, strict=True)]
    x = emit_slice(low, x, start, limit, None, [stop - begin for begin, stop in zip(start, limit, strict=True)])
    grown = [(max(before, 0), max(after, 0)) for before, after in around]
    if not any(map(any, grown)):
        return x
    check_rank(len(grown))
    shape = [size + before + after for size, (before, after) in zip(x.shape, grown, strict=True)]
    widths = np.asarray(grown, np.int32)
    if fill == 0:
        return low.emit("PAD", [x, widths], shape)
    return low.emit("PADV2", [x, widths, np.asarray(fill, low.tensor(x).dtype)], shape)
