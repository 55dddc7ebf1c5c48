"""What each operator computes, in plain JAX: the readable reference, and what calibration and fine-tuning run.

Every operator works on real numbers, whatever its tensors are stored as. `evaluate` takes a hook that sees each
tensor's value and may replace it: rounding it to a grid there simulates a quantised model and can be differentiated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.micro.graph import Graph, Op, Tensor

Hook = Callable[[Tensor, jax.Array], jax.Array]
"""Gets a tensor and its value, and returns the value that goes on."""

Kernel = Callable[[Op, Sequence[Any]], Any]


def evaluate(
    graph: Graph,
    inputs: Sequence[Any],
    hook: Hook = lambda tensor, value: value,
    constants: Mapping[Tensor, Any] | None = None,
) -> dict[Tensor, Any]:
    """The value of every tensor that an operator makes, and of the inputs.

    `constants` replaces the values of some constants (weights under training). The hook sees inputs, constants that
    are float32 and outputs of operators, in that order of the run.
    """
    given = constants or {}
    values: dict[Tensor, Any] = {}

    def read(tensor: Tensor | None) -> Any:
        if tensor is None or tensor in values:
            return None if tensor is None else values[tensor]
        value = given.get(tensor, tensor.data)
        values[tensor] = hook(tensor, jnp.asarray(value)) if tensor.dtype == "float32" else value
        return values[tensor]

    values.update((tensor, hook(tensor, jnp.asarray(x))) for tensor, x in zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        arguments = [read(tensor) for tensor in op.inputs]
        outputs = KERNELS[op.kind](op, arguments)
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        for tensor, y in zip(op.outputs, outputs, strict=True):
            assert jnp.shape(y) == tensor.shape, (op.kind, jnp.shape(y), tensor.shape)
            values[tensor] = hook(tensor, y)
    values.update((tensor, read(tensor)) for tensor in graph.outputs)
    return {tensor: value for tensor, value in values.items() if not tensor.constant}


def run(graph: Graph, *inputs: Any) -> list[np.ndarray]:
    """The outputs of a graph for inputs."""
    values = jax.jit(lambda *xs: [evaluate(graph, xs)[tensor] for tensor in graph.outputs])(*inputs)
    return [np.asarray(value) for value in values]


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "NONE": lambda x: x,
    "RELU": lambda x: jnp.maximum(x, 0),
    "RELU6": lambda x: jnp.clip(x, 0, 6),
    "RELU_N1_TO_1": lambda x: jnp.clip(x, -1, 1),
    "TANH": jnp.tanh,
}


def _fused(op: Op, y: Any) -> Any:
    return ACTIVATIONS[op.options.get("fused_activation_function", "NONE")](y)


def _elementwise(function: Callable[..., Any]) -> Kernel:
    return lambda op, xs: _fused(op, function(*xs))


def _axes(xs: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.ravel(xs[1]))


def _reduce(function: Callable[..., Any]) -> Kernel:
    return lambda op, xs: function(xs[0], axis=_axes(xs), keepdims=op.options.get("keep_dims", False))


def _conv(op: Op, xs: Sequence[Any]) -> Any:
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
    return _fused(op, y if bias is None else y + bias)


def _transpose_conv(op: Op, xs: Sequence[Any]) -> Any:
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
    return _fused(op, y if bias is None else y + bias)


def _fully_connected(op: Op, xs: Sequence[Any]) -> Any:
    x, weights, bias = xs
    y = jnp.matmul(x, weights.T, precision="highest")
    return _fused(op, y if bias is None else y + bias)


def _batch_matmul(op: Op, xs: Sequence[Any]) -> Any:
    left = jnp.swapaxes(xs[0], -1, -2) if op.options.get("adj_x") else xs[0]
    right = jnp.swapaxes(xs[1], -1, -2) if op.options.get("adj_y") else xs[1]
    return jnp.matmul(left, right, precision="highest")


def _pool(op: Op, xs: Sequence[Any]) -> Any:
    options = op.options
    window = (1, options["filter_height"], options["filter_width"], 1)
    strides = (1, options["stride_h"], options["stride_w"], 1)
    if op.kind == "MAX_POOL_2D":
        return _fused(op, lax.reduce_window(xs[0], -jnp.inf, lax.max, window, strides, options["padding"]))
    add = lambda x: lax.reduce_window(x, 0.0, lax.add, window, strides, options["padding"])  # noqa: E731
    return _fused(op, add(xs[0]) / add(jnp.ones_like(xs[0])))


def _slice(op: Op, xs: Sequence[Any]) -> Any:
    return lax.dynamic_slice(xs[0], [int(start) for start in xs[1]], op.output.shape)


def _strided_slice(op: Op, xs: Sequence[Any]) -> Any:
    return xs[0][tuple(slice(*map(int, one)) for one in zip(*xs[1:], strict=True))]


def _pad(op: Op, xs: Sequence[Any]) -> Any:
    return jnp.pad(xs[0], np.asarray(xs[1]), constant_values=xs[2] if len(xs) > 2 else 0)


def _l2_normalization(op: Op, xs: Sequence[Any]) -> Any:
    return xs[0] * lax.rsqrt(jnp.maximum(jnp.sum(xs[0] * xs[0], axis=-1, keepdims=True), 1e-6))


def _while(op: Op, xs: Sequence[Any]) -> Any:
    cond, body = op.options["cond_subgraph_index"], op.options["body_subgraph_index"]
    call = lambda graph, loop: [evaluate(graph, loop)[tensor] for tensor in graph.outputs]  # noqa: E731
    start = [jnp.asarray(x) for x in xs]
    return lax.while_loop(lambda loop: call(cond, loop)[0].reshape(()), lambda loop: call(body, loop), start)


def _if(op: Op, xs: Sequence[Any]) -> Any:
    then, other = op.options["then_subgraph_index"], op.options["else_subgraph_index"]
    call = lambda graph: lambda *values: [evaluate(graph, values)[tensor] for tensor in graph.outputs]  # noqa: E731
    return lax.cond(jnp.reshape(xs[0], ()), call(then), call(other), *xs[1:])


def _dynamic_update(op: Op, xs: Sequence[Any]) -> Any:
    return lax.dynamic_update_slice(xs[0], xs[1], [xs[2][dim] for dim in range(len(op.input(0).shape))])


def _cumsum(op: Op, xs: Sequence[Any]) -> Any:
    return lax.cumsum(xs[0], int(np.ravel(xs[1])[0]), reverse=op.options.get("reverse", False))


def _table(op: Op, xs: Sequence[Any]) -> Any:
    function = op.options["function"]
    return evaluate(function, xs)[function.outputs[0]]


KERNELS: dict[str, Kernel] = {
    "ADD": _elementwise(jnp.add), "SUB": _elementwise(jnp.subtract), "MUL": _elementwise(jnp.multiply),
    "DIV": _elementwise(jnp.divide), "MAXIMUM": _elementwise(jnp.maximum), "MINIMUM": _elementwise(jnp.minimum),
    "SQUARED_DIFFERENCE": _elementwise(lambda x, y: (x - y) ** 2), "FLOOR_DIV": _elementwise(jnp.floor_divide),
    "FLOOR_MOD": _elementwise(jnp.mod),
    "EQUAL": _elementwise(jnp.equal), "NOT_EQUAL": _elementwise(jnp.not_equal), "LESS": _elementwise(jnp.less),
    "LESS_EQUAL": _elementwise(jnp.less_equal), "GREATER": _elementwise(jnp.greater),
    "GREATER_EQUAL": _elementwise(jnp.greater_equal), "LOGICAL_AND": _elementwise(jnp.logical_and),
    "LOGICAL_OR": _elementwise(jnp.logical_or), "LOGICAL_NOT": _elementwise(jnp.logical_not),
    "EXP": _elementwise(jnp.exp), "LOG": _elementwise(jnp.log), "TANH": _elementwise(jnp.tanh),
    "LOGISTIC": _elementwise(jax.nn.sigmoid), "RSQRT": _elementwise(lax.rsqrt), "SQRT": _elementwise(jnp.sqrt),
    "ABS": _elementwise(jnp.abs), "SIN": _elementwise(jnp.sin), "COS": _elementwise(jnp.cos),
    "FLOOR": _elementwise(jnp.floor), "CEIL": _elementwise(jnp.ceil), "ROUND": _elementwise(jnp.round),
    "SQUARE": _elementwise(jnp.square), "RELU": _elementwise(jax.nn.relu), "RELU6": _elementwise(ACTIVATIONS["RELU6"]),
    "ELU": _elementwise(jax.nn.elu), "HARD_SWISH": _elementwise(jax.nn.hard_swish),
    "ERF": _elementwise(lax.erf), "ERFC": _elementwise(lax.erfc), "LOG1P": _elementwise(jnp.log1p),
    "EXPM1": _elementwise(jnp.expm1), "SIGN": _elementwise(jnp.sign), "RECIPROCAL": _elementwise(lambda x: 1 / x),
    "SOFTPLUS": _elementwise(jax.nn.softplus),
    "GELU": lambda op, xs: jax.nn.gelu(xs[0], approximate=op.options["approximate"]),
    "LEAKY_RELU": lambda op, xs: jnp.where(xs[0] >= 0, xs[0], op.options["alpha"] * xs[0]),
    "SOFTMAX": lambda op, xs: jax.nn.softmax(op.options["beta"] * xs[0], axis=-1),
    "LOG_SOFTMAX": lambda op, xs: jax.nn.log_softmax(xs[0], axis=-1),
    "L2_NORMALIZATION": _l2_normalization,
    "SUM": _reduce(jnp.sum), "MEAN": _reduce(jnp.mean), "REDUCE_MAX": _reduce(jnp.max), "REDUCE_MIN": _reduce(jnp.min),
    "REDUCE_ALL": _reduce(jnp.all),
    "ARG_MAX": lambda op, xs: jnp.argmax(xs[0], int(xs[1])).astype(jnp.int32),
    "ARG_MIN": lambda op, xs: jnp.argmin(xs[0], int(xs[1])).astype(jnp.int32),
    "CUMSUM": _cumsum,
    "CONV_2D": _conv, "DEPTHWISE_CONV_2D": _conv, "TRANSPOSE_CONV": _transpose_conv,
    "FULLY_CONNECTED": _fully_connected, "BATCH_MATMUL": _batch_matmul, "AVERAGE_POOL_2D": _pool, "MAX_POOL_2D": _pool,
    "RESHAPE": lambda op, xs: jnp.reshape(xs[0], op.output.shape),
    "TRANSPOSE": lambda op, xs: jnp.transpose(xs[0], [int(dim) for dim in xs[1]]),
    "BROADCAST_TO": lambda op, xs: jnp.broadcast_to(xs[0], op.output.shape),
    "SLICE": _slice, "STRIDED_SLICE": _strided_slice, "PAD": _pad, "PADV2": _pad,
    "CONCATENATION": lambda op, xs: jnp.concatenate([jnp.asarray(x) for x in xs], op.options["axis"]),
    "REVERSE_V2": lambda op, xs: jnp.flip(xs[0], [int(axis) for axis in xs[1]]),
    "GATHER": lambda op, xs: jnp.take(xs[0], xs[1], axis=op.options["axis"], mode="clip"),
    "SELECT_V2": lambda op, xs: jnp.where(*xs),
    "CAST": lambda op, xs: jnp.asarray(xs[0]).astype(op.output.dtype),
    "DYNAMIC_UPDATE_SLICE": _dynamic_update, "WHILE": _while, "IF": _if,
    "TABLE": _table, "RELU_N1_TO_1": _elementwise(ACTIVATIONS["RELU_N1_TO_1"]),
    "QUANTIZE": lambda op, xs: xs[0], "DEQUANTIZE": lambda op, xs: xs[0],
}  # fmt: skip
