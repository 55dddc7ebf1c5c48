"""Convolutions and products of matrices."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.micro.graph import Op, Quant, Tensor
from multipod.micro.lowering.constants import shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Value
from multipod.micro.lowering.moves import emit_pad, emit_reshape, emit_transpose
from multipod.micro.lowering.padding import padding_of, sizes_after
from multipod.micro.operators.arithmetic import FUSED
from multipod.micro.operators.operator import AnyScale, Operator, Options, Weighted
from multipod.micro.operators.values import apply_activation

# --- what is lowered ------------------------------------------------------------------------------------------------


def lower_convolution(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """CONV_2D, DEPTHWISE_CONV_2D or TRANSPOSE_CONV, with one or two spatial dims in any order of dims.

    TFLite's images are [n, h, w, c]; other orders are transposed, and neighbouring transposes cancel later.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    spatial = len(numbers.lhs_spec) - 2
    if spatial not in (1, 2):
        raise CannotLowerError(f"has {spatial} spatial dims; TFLite convolves one or two")
    if params["batch_group_count"] != 1:
        raise CannotLowerError("groups the batch")
    if isinstance(inputs[1], Tensor):
        raise CannotLowerError("has computed weights; TFLM wants constant ones")
    image = _order(numbers.lhs_spec)
    x = _two_dims(low, emit_transpose(low, inputs[0], image))
    kernel = inputs[1].transpose((numbers.rhs_spec[0], *numbers.rhs_spec[2:], numbers.rhs_spec[1]))  # [out, h, w, in]
    kernel = kernel if spatial == 2 else kernel[:, None]
    wide = [((0, 0), *params["padding"]) if spatial == 1 else params["padding"]][0]
    strides, into, dilation = ((1, *params[key]) if spatial == 1 else tuple(params[key])
                               for key in ("window_strides", "lhs_dilation", "rhs_dilation"))  # fmt: skip
    if into != (1, 1):
        if strides != (1, 1) or dilation != (1, 1) or params["feature_group_count"] != 1:
            raise CannotLowerError("is a transposed convolution with strides, dilation or groups besides")
        y = _emit_transposed(low, x, kernel, wide, into)
    else:
        y = _emit_conv(low, x, kernel, wide, strides, dilation, params["feature_group_count"])
    n, _, w, c = y.shape
    y = y if spatial == 2 else emit_reshape(low, y, (n, w, c))
    return emit_transpose(low, y, tuple(np.argsort(_order(numbers.out_spec))))


def _order(spec: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation to [n, spatial..., c]."""
    return (spec[0], *spec[2:], spec[1])


def _two_dims(low: Lowering, x: Value) -> Value:
    if len(x.shape) == 4:
        return x
    n, w, c = x.shape
    return emit_reshape(low, x, (n, 1, w, c))


def _emit_conv(
    low: Lowering, x: Value, kernel: np.ndarray, around: Any, strides: Any, dilation: Any, groups: int
) -> Tensor:
    out, height, width, _ = kernel.shape
    reach = [(size - 1) * step + 1 for size, step in zip((height, width), dilation, strict=True)]
    x, padding = padding_of(low, x, around, reach, strides)
    options = {
        "padding": padding, "stride_w": strides[1], "stride_h": strides[0], "fused_activation_function": "NONE",
        "dilation_w_factor": dilation[1], "dilation_h_factor": dilation[0],
    }  # fmt: skip
    size = sizes_after(x, padding, reach, strides)
    shape = (x.shape[0], *size, out)
    bias = np.zeros(out, np.float32)
    channels = x.shape[3]
    if groups == channels and groups > 1:  # output c * m + j reads channel c: TFLite's [1, h, w, c * m]
        kernel = kernel[..., 0].transpose(1, 2, 0)[None]
        multiplier = out // channels
        return low.emit("DEPTHWISE_CONV_2D", [x, kernel, bias], shape, depth_multiplier=multiplier, **options)
    return low.emit("CONV_2D", [x, np.ascontiguousarray(kernel), bias], shape, **options)


def _emit_transposed(low: Lowering, x: Value, kernel: np.ndarray, around: Any, strides: Any) -> Value:
    """A convolution of the input with zeros between its elements. TFLite wants the kernel turned round.

    TRANSPOSE_CONV with VALID gives all (size - 1) * stride + reach elements, of which padding by less than reach - 1
    cuts some off, and by more adds zeros.
    """
    flipped = np.ascontiguousarray(kernel[:, ::-1, ::-1])
    reach = kernel.shape[1:3]
    full = [(size - 1) * step + window for size, step, window in zip(x.shape[1:3], strides, reach, strict=True)]
    shape = (x.shape[0], *full, kernel.shape[0])
    bias = np.zeros(kernel.shape[0], np.float32)
    options = {"padding": "VALID", "stride_w": strides[1], "stride_h": strides[0], "fused_activation_function": "NONE"}
    dims = np.asarray(shape, np.int32)
    y = low.emit("TRANSPOSE_CONV", [dims, flipped, x, bias], shape, "float32", **options)
    cut = [(before - window + 1, after - window + 1) for (before, after), window in zip(around, reach, strict=True)]
    return emit_pad(low, y, ((0, 0), *cut, (0, 0)))


def lower_dot_general(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """FULLY_CONNECTED where one side is constant, else BATCH_MATMUL; result [batch, rest of left, rest of right]."""
    (over_left, over_right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    left, right = inputs
    if eqn.outvars[0].aval.dtype.name != "float32":
        raise CannotLowerError("multiplies integers")
    free_left = [d for d in range(len(left.shape)) if d not in (*over_left, *batch_left)]
    free_right = [d for d in range(len(right.shape)) if d not in (*over_right, *batch_right)]
    shape = shape_of(eqn)
    if not batch_left and isinstance(right, np.ndarray):
        return _emit_dense(low, left, right, (free_left, free_right, over_left, over_right), shape)
    if not batch_left and isinstance(left, np.ndarray):
        swapped = _emit_dense(
            low, right, left, (free_right, free_left, over_right, over_left),
            tuple([right.shape[d] for d in free_right] + [left.shape[d] for d in free_left]),
        )  # fmt: skip
        rows = len(free_right)
        return emit_transpose(low, swapped, (*range(rows, rows + len(free_left)), *range(rows)))
    sizes = [x.shape[d] for x, dims in ((left, batch_left), (left, free_left), (right, free_right)) for d in dims]
    count = int(np.prod([left.shape[d] for d in over_left]))
    batch = int(np.prod([left.shape[d] for d in batch_left]))
    rows, columns = (int(np.prod([x.shape[d] for d in dims])) for x, dims in ((left, free_left), (right, free_right)))
    turn = _in_order((*batch_right, *free_right, *over_right), right.shape)
    a = emit_transpose(low, left, (*batch_left, *free_left, *over_left))
    b = emit_transpose(
        low, right, (*batch_right, *(free_right if turn else over_right), *(over_right if turn else free_right))
    )
    a = emit_reshape(low, a, (batch, rows, count))
    b = emit_reshape(low, b, (batch, columns, count) if turn else (batch, count, columns))
    product = low.emit("BATCH_MATMUL", [a, b], (batch, rows, columns), adj_x=False, adj_y=turn)
    assert tuple(sizes) == shape
    return emit_reshape(low, product, shape)


def _in_order(permutation: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a transpose moves nothing but dims of size 1."""
    moved = [dim for dim in permutation if shape[dim] > 1]
    return moved == sorted(moved)


def _emit_dense(low: Lowering, x: Value, weights: np.ndarray, dims: Any, shape: tuple[int, ...]) -> Value:
    """x [..., over] times constant weights; TFLite's are [out, in]."""
    free_x, free_w, over_x, over_w = dims
    x = emit_transpose(low, x, (*free_x, *over_x))
    count = int(np.prod([weights.shape[d] for d in over_w]))
    matrix = weights.transpose((*free_w, *over_w)).reshape(-1, count)
    rows = tuple(x.shape[: len(free_x)])
    if len(over_x) != 1 or len(rows) > 3 or not rows:
        rows = (int(np.prod(rows)),)
    x = emit_reshape(low, x, (*rows, count))
    out = matrix.shape[0]
    bias = np.zeros(out, np.float32)
    options: dict[str, Any] = {"fused_activation_function": "NONE", "weights_format": 0, "keep_num_dims": len(rows) > 1}
    y = low.emit("FULLY_CONNECTED", [x, np.ascontiguousarray(matrix), bias], (*rows, out), **options)
    return emit_reshape(low, y, shape)


# --- what is computed -----------------------------------------------------------------------------------------------


def _conv(op: Op, xs: Any) -> Any:
    x, kernel, bias = xs
    options = op.options
    groups = x.shape[3] // kernel.shape[3]
    layout = ("NHWC", "OHWI", "NHWC")
    if op.kind == "DEPTHWISE_CONV_2D":
        groups, kernel = x.shape[3], kernel.transpose(3, 1, 2, 0)
    y = lax.conv_general_dilated(
        x,
        kernel,
        (options["stride_h"], options["stride_w"]),
        options["padding"],
        rhs_dilation=(options.get("dilation_h_factor", 1), options.get("dilation_w_factor", 1)),
        dimension_numbers=layout,
        feature_group_count=groups,
        precision="highest",
    )
    return apply_activation(op, y if bias is None else y + bias)


def _transpose_conv(op: Op, xs: Any) -> Any:
    _, kernel, x, bias = xs
    assert op.options["padding"] == "VALID"
    around = [(size - 1, size - 1) for size in kernel.shape[1:3]]
    y = lax.conv_general_dilated(
        x,
        kernel[:, ::-1, ::-1],
        (1, 1),
        around,
        lhs_dilation=(op.options["stride_h"], op.options["stride_w"]),
        dimension_numbers=("NHWC", "OHWI", "NHWC"),
        precision="highest",
    )
    return apply_activation(op, y if bias is None else y + bias)


def _fully_connected(op: Op, xs: Any) -> Any:
    x, weights, bias = xs
    y = jnp.matmul(x, weights.T, precision="highest")
    return apply_activation(op, y if bias is None else y + bias)


def _batch_matmul(op: Op, xs: Any) -> Any:
    left = jnp.swapaxes(xs[0], -1, -2) if op.options.get("adj_x") else xs[0]
    right = jnp.swapaxes(xs[1], -1, -2) if op.options.get("adj_y") else xs[1]
    return jnp.matmul(left, right, precision="highest")


# --- the records ----------------------------------------------------------------------------------------------------


def _options(number: int, *, depthwise: bool = False, dilated: bool = True) -> Options:
    names = ["padding", "stride_w", "stride_h"] + ["depth_multiplier"] * depthwise
    names += ["fused_activation_function"] + ["dilation_w_factor", "dilation_h_factor"] * dilated
    types = {"padding": ("padding", 0), "fused_activation_function": ("activation", 0)}
    types |= {"dilation_w_factor": ("int32", 1), "dilation_h_factor": ("int32", 1)}
    return Options(number, {name: (position, *types.get(name, ("int32", 0))) for position, name in enumerate(names)})


def _depthwise_variant(op: Op, dtype: str) -> str:
    steps = (op.options.get(f"dilation_{dim}_factor", 1) for dim in "hw")
    return "dilated" if dtype == "float32" and any(step != 1 for step in steps) else dtype


def _dense_variant(op: Op, dtype: str) -> str:
    quant: Quant | None = op.input(1).quant
    return "per channel" if quant is not None and quant.axis >= 0 else dtype


OPERATORS = (
    Operator(
        "CONV_2D", _options(1), evaluate=_conv, quantised=Weighted(), fuses=True,
        versions={"int8": (3, "1.14.0"), "int16": (4, "2.3.0"), "int4": (7, "2.11.0")},
        primitives={"conv_general_dilated": lower_convolution},
    ),
    Operator(
        "DEPTHWISE_CONV_2D", _options(2, depthwise=True), evaluate=_conv, quantised=Weighted(channel_dim=3),
        fuses=True, variant=_depthwise_variant,
        versions={"dilated": (2, "1.12.0"), "int8": (3, "1.14.0"), "int16": (5, "2.3.0"), "int4": (7, "2.11.0")},
    ),
    Operator(
        "TRANSPOSE_CONV", _options(49, dilated=False), evaluate=_transpose_conv,
        quantised=Weighted(data=2, weights=1, bias=3, int4=False),
    ),
    Operator(
        "FULLY_CONNECTED",
        Options(8, {**FUSED, "weights_format": (1, "int8", 0), "keep_num_dims": (2, "bool", 0)}),
        evaluate=_fully_connected, quantised=Weighted(), fuses=True, variant=_dense_variant,
        versions={"float32": (5, "2.0.0"), "int8": (5, "2.0.0"), "int16": (7, "2.3.0"), "int4": (10, "2.11.0"),
                  "per channel": (12, "2.17.0")},
        primitives={"dot_general": lower_dot_general},
    ),
    Operator(
        "BATCH_MATMUL", Options(101, {"adj_x": (0, "bool", 0), "adj_y": (1, "bool", 0)}), since="2.3.0",
        versions={"int8": (2, "2.3.0"), "int16": (3, "2.4.0")}, evaluate=_batch_matmul, quantised=AnyScale(),
    ),
)  # fmt: skip
