"""Convolutions and products of matrices."""

from typing import Any

import numpy as np

from multipod.micro.graph import Tensor
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Rule, Value
from multipod.micro.lowering.shapes import padded, reshaped, sliced, transposed


def convolution(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
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
    x = _two_dims(low, transposed(low, inputs[0], image))
    kernel = inputs[1].transpose((numbers.rhs_spec[0], *numbers.rhs_spec[2:], numbers.rhs_spec[1]))  # [out, h, w, in]
    kernel = kernel if spatial == 2 else kernel[:, None]
    wide = [((0, 0), *params["padding"]) if spatial == 1 else params["padding"]][0]
    strides, into, dilation = ((1, *params[key]) if spatial == 1 else tuple(params[key])
                               for key in ("window_strides", "lhs_dilation", "rhs_dilation"))  # fmt: skip
    if into != (1, 1):
        if strides != (1, 1) or dilation != (1, 1) or params["feature_group_count"] != 1:
            raise CannotLowerError("is a transposed convolution with strides, dilation or groups besides")
        y = _transpose_conv(low, x, kernel, wide, into)
    else:
        y = _conv(low, x, kernel, wide, strides, dilation, params["feature_group_count"])
    n, _, w, c = y.shape
    y = y if spatial == 2 else reshaped(low, y, (n, w, c))
    return transposed(low, y, tuple(np.argsort(_order(numbers.out_spec))))


def _order(spec: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation to [n, spatial..., c]."""
    return (spec[0], *spec[2:], spec[1])


def _two_dims(low: Lowering, x: Value) -> Value:
    if len(x.shape) == 4:
        return x
    n, w, c = x.shape
    return reshaped(low, x, (n, 1, w, c))


def _conv(low: Lowering, x: Value, kernel: np.ndarray, around: Any, strides: Any, dilation: Any, groups: int) -> Tensor:
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


def sizes_after(x: Value, padding: str, reach: Any, strides: Any) -> tuple[int, ...]:
    """Height and width of what windows of this reach make of x, with TFLite's `padding`."""
    lost = [size - 1 if padding == "VALID" else 0 for size in reach]
    return tuple(-(-(full - less) // step) for full, less, step in zip(x.shape[1:3], lost, strides, strict=True))


def same_padding(size: int, reach: int, stride: int) -> tuple[int, int]:
    """What TFLite's SAME adds before and after: as little as gives ceil(size / stride), the odd one after."""
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


def padding_of(low: Lowering, x: Value, around: Any, reach: Any, strides: Any, fill: float = 0.0) -> tuple[Value, str]:
    """TFLite's word for this padding, and x padded beforehand where it has none."""
    around = tuple(map(tuple, around))
    if not any(map(any, around)):
        return x, "VALID"
    same = tuple(same_padding(*sizes) for sizes in zip(x.shape[1:3], reach, strides, strict=True))
    if fill == 0 and around == same:
        return x, "SAME"
    return padded(low, x, ((0, 0), *around, (0, 0)), fill), "VALID"


def _transpose_conv(low: Lowering, x: Value, kernel: np.ndarray, around: Any, strides: Any) -> Value:
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
    return padded(low, y, ((0, 0), *cut, (0, 0)))


def dot_general(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """FULLY_CONNECTED where one side is constant, else BATCH_MATMUL; result [batch, rest of left, rest of right]."""
    (over_left, over_right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    left, right = inputs
    if eqn.outvars[0].aval.dtype.name != "float32":
        raise CannotLowerError("multiplies integers")
    free_left = [d for d in range(len(left.shape)) if d not in (*over_left, *batch_left)]
    free_right = [d for d in range(len(right.shape)) if d not in (*over_right, *batch_right)]
    shape = tuple(eqn.outvars[0].aval.shape)
    if not batch_left and isinstance(right, np.ndarray):
        return _fully_connected(low, left, right, (free_left, free_right, over_left, over_right), shape)
    if not batch_left and isinstance(left, np.ndarray):
        swapped = _fully_connected(
            low, right, left, (free_right, free_left, over_right, over_left),
            tuple([right.shape[d] for d in free_right] + [left.shape[d] for d in free_left]),
        )  # fmt: skip
        rows = len(free_right)
        return transposed(low, swapped, (*range(rows, rows + len(free_left)), *range(rows)))
    sizes = [x.shape[d] for x, dims in ((left, batch_left), (left, free_left), (right, free_right)) for d in dims]
    count = int(np.prod([left.shape[d] for d in over_left]))
    batch = int(np.prod([left.shape[d] for d in batch_left]))
    rows, columns = (int(np.prod([x.shape[d] for d in dims])) for x, dims in ((left, free_left), (right, free_right)))
    turn = _in_order((*batch_right, *free_right, *over_right), right.shape)
    a = transposed(low, left, (*batch_left, *free_left, *over_left))
    b = transposed(
        low, right, (*batch_right, *(free_right if turn else over_right), *(over_right if turn else free_right))
    )
    a = reshaped(low, a, (batch, rows, count))
    b = reshaped(low, b, (batch, columns, count) if turn else (batch, count, columns))
    product = low.emit("BATCH_MATMUL", [a, b], (batch, rows, columns), adj_x=False, adj_y=turn)
    assert tuple(sizes) == shape
    return reshaped(low, product, shape)


def _in_order(permutation: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a transpose moves nothing but dims of size 1."""
    moved = [dim for dim in permutation if shape[dim] > 1]
    return moved == sorted(moved)


def _fully_connected(low: Lowering, x: Value, weights: np.ndarray, dims: Any, shape: tuple[int, ...]) -> Value:
    """x [..., over] times constant weights; TFLite's are [out, in]."""
    free_x, free_w, over_x, over_w = dims
    x = transposed(low, x, (*free_x, *over_x))
    count = int(np.prod([weights.shape[d] for d in over_w]))
    matrix = weights.transpose((*free_w, *over_w)).reshape(-1, count)
    rows = tuple(x.shape[: len(free_x)])
    if len(over_x) != 1 or len(rows) > 3 or not rows:
        rows = (int(np.prod(rows)),)
    x = reshaped(low, x, (*rows, count))
    out = matrix.shape[0]
    bias = np.zeros(out, np.float32)
    options: dict[str, Any] = {"fused_activation_function": "NONE", "weights_format": 0, "keep_num_dims": len(rows) > 1}
    y = low.emit("FULLY_CONNECTED", [x, np.ascontiguousarray(matrix), bias], (*rows, out), **options)
    return reshaped(low, y, shape)


__all__ = ["RULES", "same_padding", "sliced"]
RULES: dict[str, Rule] = {"conv_general_dilated": convolution, "dot_general": dot_general}
