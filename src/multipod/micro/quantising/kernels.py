"""Which operators have integer kernels, and what these demand of the scales around them. From TFLM's own checks."""


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


FIXED: dict[str, dict[str, tuple[float, int]]] = {
    "SOFTMAX": {"int8": (1 / 256, -128), "int16": (1 / 32768, 0)},
    "LOGISTIC": {"int8": (1 / 256, -128), "int16": (1 / 32768, 0)},
    "TANH": {"int8": (1 / 128, 0), "int16": (1 / 32768, 0)},
    "LOG_SOFTMAX": {"int8": (16 / 256, 127)},
}
"""The one output scale and zero point that a kernel knows."""

SAME = _kinds(
    "RESHAPE TRANSPOSE PAD PADV2 SLICE STRIDED_SLICE GATHER MAX_POOL_2D AVERAGE_POOL_2D CONCATENATION MAXIMUM MINIMUM "
    "REDUCE_MAX REDUCE_MIN BROADCAST_TO REVERSE_V2 SELECT_V2 DYNAMIC_UPDATE_SLICE RELU6"
)
"""Operators that copy or choose stored numbers: all their float tensors have one scale."""

CLIPPED = frozenset(("MAXIMUM", "MINIMUM", "PADV2"))
"""Of these a constant bounds or fills: it does not widen the range, and is clipped to it."""

WEIGHTED = frozenset(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"))

FREE8 = _kinds(
    "ADD SUB MUL MEAN SUM RELU ELU HARD_SWISH LEAKY_RELU BATCH_MATMUL EQUAL NOT_EQUAL LESS LESS_EQUAL GREATER "
    "GREATER_EQUAL ARG_MAX ARG_MIN SQUARED_DIFFERENCE"
)
FREE16 = _kinds("ADD SUB MUL MEAN LEAKY_RELU BATCH_MATMUL")
"""Operators that take and give any scale, in int8 and in int16."""

SAME16 = SAME - {"GATHER", "REDUCE_MAX", "REDUCE_MIN", "RELU6"}

UNARY = _kinds(
    "EXP LOG RSQRT SQRT ABS SIN COS FLOOR CEIL ROUND ERF ERFC GELU LOG1P EXPM1 SIGN SOFTPLUS RECIPROCAL RELU_N1_TO_1"
)
"""Functions of one number without an int8 kernel in TFLM: each becomes a table of 256 bytes."""

JOINABLE = _kinds("ADD SUB MUL MAXIMUM MINIMUM LOGISTIC TANH RELU RELU6 ELU HARD_SWISH LEAKY_RELU TABLE") | UNARY
"""Functions that a table beside them takes in, where all but one of their inputs are constant numbers."""


def known(activations: str) -> frozenset[str]:
    """Operators with a kernel for these activations."""
    fixed = {kind for kind, grids in FIXED.items() if activations in grids}
    if activations == "int8":
        return FREE8 | SAME | WEIGHTED | fixed | {"TABLE"}
    return FREE16 | SAME16 | WEIGHTED | fixed
