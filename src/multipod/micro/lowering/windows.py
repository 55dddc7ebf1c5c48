"""Reductions, pooling windows, sums along a dim, and the largest's place."""

from typing import Any

import numpy as np

from multipod.micro.graph import Tensor
from multipod.micro.lowering.linear import padding_of, sizes_after
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Rule, Value
from multipod.micro.lowering.shapes import ints, reshaped

REDUCE = {"reduce_sum": "SUM", "reduce_max": "REDUCE_MAX", "reduce_min": "REDUCE_MIN", "reduce_and": "REDUCE_ALL"}


def _shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


def _reduce(kind: str) -> Rule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        x = low.tensor(inputs[0])
        if kind != "REDUCE_ALL" and x.dtype != "float32":
            raise CannotLowerError(f"reduces {x.dtype}; TFLM reduces floats")
        return reduced(low, kind, x, tuple(eqn.params["axes"]))

    return rule


def reduced(low: Lowering, kind: str, x: Value, axes: tuple[int, ...]) -> Value:
    """x reduced over axes, which are dropped; dims are merged where TFLM's four are not enough."""
    shape = tuple(size for dim, size in enumerate(x.shape) if dim not in axes)
    if all(x.shape[axis] == 1 for axis in axes):
        return reshaped(low, x, shape)
    if len(x.shape) > 4:
        axes = tuple(sorted(axes))
        if axes != tuple(range(axes[0], axes[-1] + 1)):
            raise CannotLowerError(f"reduces scattered dims of {len(x.shape)}, and TFLM knows four")
        sizes = [x.shape[: axes[0]], x.shape[axes[0] : axes[-1] + 1], x.shape[axes[-1] + 1 :]]
        sizes = sizes if sizes[2] else sizes[:2]
        x, axes = reshaped(low, x, tuple(int(np.prod(part)) for part in sizes)), (1,)
    kept = tuple(1 if dim in axes else size for dim, size in enumerate(x.shape))
    y = low.emit(kind, [x, ints(axes)], kept, keep_dims=True)
    return reshaped(low, y, shape)


def reduce_or(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """not all(not x)."""
    x = low.tensor(inputs[0])
    none = reduced(low, "REDUCE_ALL", low.emit("LOGICAL_NOT", [x], x.shape), tuple(eqn.params["axes"]))
    return low.emit("LOGICAL_NOT", [none], none.shape)


def _arg(kind: str) -> Rule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        (axis,) = eqn.params["axes"]
        return low.emit(kind, [inputs[0], np.asarray(axis, np.int32)], _shape(eqn), "int32", output_type="int32")

    return rule


def cumsum(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """CUMSUM."""
    axis = np.asarray(eqn.params["axis"], np.int32)
    return low.emit("CUMSUM", [inputs[0], axis], _shape(eqn), exclusive=False, reverse=eqn.params["reverse"])


def _pool(kind: str) -> Rule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        params = {key: tuple(eqn.params[key]) for key in ("window_dimensions", "window_strides", "padding")}
        if any(d != 1 for key in ("base_dilation", "window_dilation") for d in eqn.params[key]):
            raise CannotLowerError("is dilated, which TFLite's pools are not")
        rank = len(params["window_dimensions"])
        over = [dim for dim in range(rank) if params["window_dimensions"][dim] > 1 or params["window_strides"][dim] > 1]
        if rank not in (3, 4) or not set(over) <= set(range(1, rank - 1)):
            raise CannotLowerError("pools over other dims than the middle ones of [n, (h,) w, c]")
        x: Value = low.tensor(inputs[0])
        window, strides = ((1,) * (4 - rank) + params[key][1:-1] for key in ("window_dimensions", "window_strides"))
        around = ((0, 0),) * (4 - rank) + params["padding"][1:-1]
        x = reshaped(low, x, (x.shape[0], *(1,) * (4 - rank), *x.shape[1:]))
        fill = 0.0 if kind == "AVERAGE_POOL_2D" else -3.0e38
        if kind == "AVERAGE_POOL_2D":  # a sum counts what is padded as zero, so it is padded beforehand
            x, padding = _explicit(low, x, around)
        else:
            x, padding = _max_padding(low, x, around, window, strides, fill)
        shape = (x.shape[0], *sizes_after(x, padding, window, strides), x.shape[3])
        y: Value = low.emit(
            kind, [x], shape, padding=padding, stride_w=strides[1], stride_h=strides[0], filter_width=window[1],
            filter_height=window[0], fused_activation_function="NONE",
        )  # fmt: skip
        if kind == "AVERAGE_POOL_2D":
            y = low.emit("MUL", [y, np.asarray(np.prod(window), np.float32)], shape)
        return reshaped(low, y, _shape(eqn))

    return rule


def _explicit(low: Lowering, x: Value, around: Any) -> tuple[Value, str]:
    from multipod.micro.lowering.shapes import padded

    return padded(low, x, ((0, 0), *around, (0, 0))), "VALID"


def _max_padding(low: Lowering, x: Value, around: Any, window: Any, strides: Any, fill: float) -> tuple[Value, str]:
    """SAME where it is that; else zeros before a relu's output would do, but in general the least float."""
    y, padding = padding_of(low, x, around, window, strides)
    if padding == "SAME" or y is x:
        return y, padding
    if low.ops and isinstance(y, Tensor) and low.ops[-1].output is y:
        low.ops.pop()  # PAD with zeros is not what a maximum wants
    return padding_of(low, x, around, window, strides, fill)


RULES: dict[str, Rule] = {
    **{name: _reduce(kind) for name, kind in REDUCE.items()},
    "reduce_or": reduce_or, "argmax": _arg("ARG_MAX"), "argmin": _arg("ARG_MIN"), "cumsum": cumsum,
    "reduce_window_max": _pool("MAX_POOL_2D"), "reduce_window_sum": _pool("AVERAGE_POOL_2D"),
}  # fmt: skip
