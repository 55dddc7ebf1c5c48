"""Pools: the largest of each window, or its mean."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.micro.graph import Op, Tensor
from multipod.micro.lowering.constants import shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, PrimitiveRule, Value
from multipod.micro.lowering.moves import emit_pad, emit_reshape
from multipod.micro.lowering.padding import padding_of, same_padding, sizes_after
from multipod.micro.match import Const, Match, Rewrite, change_op, node
from multipod.micro.operators.operator import Operator, Options, SameScale
from multipod.micro.operators.values import apply_activation

LEAST = -3.0e38
"""Stands for minus infinity around what a maximum is taken of."""

OPTIONS = Options(5, {
    "padding": (0, "padding", 0), "stride_w": (1, "int32", 0), "stride_h": (2, "int32", 0),
    "filter_width": (3, "int32", 0), "filter_height": (4, "int32", 0),
    "fused_activation_function": (5, "activation", 0),
})  # fmt: skip


def _pool(kind: str) -> PrimitiveRule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        window, strides, around = _window(eqn)
        x: Value = low.tensor(inputs[0])
        x = emit_reshape(low, x, (x.shape[0], *(1,) * (4 - len(x.shape)), *x.shape[1:]))
        if kind == "AVERAGE_POOL_2D":  # a sum counts what is padded as zero, so it is padded beforehand
            x, padding = emit_pad(low, x, ((0, 0), *around, (0, 0))), "VALID"
        else:
            x, padding = _max_padding(low, x, around, window, strides)
        shape = (x.shape[0], *sizes_after(x, padding, window, strides), x.shape[3])
        y: Value = low.emit(
            kind, [x], shape, padding=padding, stride_w=strides[1], stride_h=strides[0], filter_width=window[1],
            filter_height=window[0], fused_activation_function="NONE",
        )  # fmt: skip
        if kind == "AVERAGE_POOL_2D":
            y = low.emit("MUL", [y, np.asarray(np.prod(window), np.float32)], shape)
        return emit_reshape(low, y, shape_of(eqn))

    return rule


def _window(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Sizes, strides and padding of the windows along height and width.

    Raises:
      CannotLowerError: it is dilated, or pools over other dims.
    """
    params = {key: tuple(eqn.params[key]) for key in ("window_dimensions", "window_strides", "padding")}
    if any(d != 1 for key in ("base_dilation", "window_dilation") for d in eqn.params[key]):
        raise CannotLowerError("is dilated, which TFLite's pools are not")
    rank = len(params["window_dimensions"])
    over = [dim for dim in range(rank) if params["window_dimensions"][dim] > 1 or params["window_strides"][dim] > 1]
    if rank not in (3, 4) or not set(over) <= set(range(1, rank - 1)):
        raise CannotLowerError("pools over other dims than the middle ones of [n, (h,) w, c]")
    window, strides = ((1,) * (4 - rank) + params[key][1:-1] for key in ("window_dimensions", "window_strides"))
    return window, strides, ((0, 0),) * (4 - rank) + params["padding"][1:-1]


def _max_padding(low: Lowering, x: Value, around: Any, window: Any, strides: Any) -> tuple[Value, str]:
    """SAME where it is that; else the least float around x, not the zeros that a convolution wants."""
    y, padding = padding_of(low, x, around, window, strides)
    if padding == "SAME" or y is x:
        return y, padding
    if low.ops and isinstance(y, Tensor) and low.ops[-1].output is y:
        low.ops.pop()  # PAD with zeros is not what a maximum wants
    return padding_of(low, x, around, window, strides, LEAST)


def _average_of_inside(match: Match) -> list[Op] | None:
    """An average that does not count the padding: the sum over the window times 1 / (elements inside)."""
    pool, x = match.ops["pool"], match["x"]
    window = [pool.options["filter_height"], pool.options["filter_width"]]
    strides = [pool.options["stride_h"], pool.options["stride_w"]]
    around = [tuple(map(int, pair)) for pair in match["widths"].values]
    same = [same_padding(*sizes) for sizes in zip(x.shape[1:3], window, strides, strict=True)]
    if around != [(0, 0), *same, (0, 0)] or pool.options["padding"] != "VALID":
        return None
    inside = [_inside(*sizes) for sizes in zip(x.shape[1:3], window, strides, strict=True)]
    factor = np.prod(window) / np.multiply.outer(*inside)
    wide = np.broadcast_to(match["c"].values, (1, *pool.output.shape[1:]))
    if not np.allclose(wide, factor[None, :, :, None], rtol=1e-5):
        return None
    return [change_op(pool, [x], match.op.output, padding="SAME")]


def _inside(size: int, window: int, stride: int) -> np.ndarray:
    """How many elements of each window lie inside, along one dim."""
    before = same_padding(size, window, stride)[0]
    starts = np.arange(-(-size // stride)) * stride - before
    return np.minimum(starts + window, size) - np.maximum(starts, 0)


def _evaluate(op: Op, xs: Any) -> Any:
    options = op.options
    window = (1, options["filter_height"], options["filter_width"], 1)
    strides = (1, options["stride_h"], options["stride_w"], 1)
    if op.kind == "MAX_POOL_2D":
        return apply_activation(op, lax.reduce_window(xs[0], -jnp.inf, lax.max, window, strides, options["padding"]))
    add = lambda x: lax.reduce_window(x, 0.0, lax.add, window, strides, options["padding"])  # noqa: E731
    return apply_activation(op, add(xs[0]) / add(jnp.ones_like(xs[0])))


_PADDED_POOL = node("AVERAGE_POOL_2D", node("PAD", "x", Const("widths")), name="pool")

OPERATORS = (
    Operator(
        "AVERAGE_POOL_2D", OPTIONS, versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")}, evaluate=_evaluate,
        quantised=SameScale(), primitives={"reduce_window_sum": _pool("AVERAGE_POOL_2D")},
        recognised=(Rewrite("average without the padding", node("MUL", _PADDED_POOL, Const("c")), _average_of_inside),),
    ),
    Operator(
        "MAX_POOL_2D", OPTIONS, versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")}, evaluate=_evaluate,
        quantised=SameScale(), primitives={"reduce_window_max": _pool("MAX_POOL_2D")},
    ),
    Operator("L2_POOL_2D", OPTIONS),
)  # fmt: skip
