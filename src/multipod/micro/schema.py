"""The part of TFLite's flatbuffer schema (version 3) that the exporter writes: numbers of operators, fields, versions.

A flatbuffer table is a list of fields known by number; these tables say which number is what, and
`write.py` and `model_file.py` are short because of them. Source: `schema.fbs` of TensorFlow Lite, and the list of
runtime versions beside it (TensorFlow, 2026); the numbers never change, since old files must stay readable.
"""

from collections.abc import Mapping
from dataclasses import dataclass

IDENTIFIER = b"TFL3"
SCHEMA_VERSION = 3

TYPES = {
    "float32": 0, "float16": 1, "int32": 2, "uint8": 3, "int64": 4, "string": 5, "bool": 6, "int16": 7, "int8": 9,
    "float64": 10, "uint64": 12, "resource": 13, "uint32": 15, "uint16": 16, "int4": 17,
}  # fmt: skip
PADDING = {"SAME": 0, "VALID": 1}
ACTIVATIONS = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3, "TANH": 4}

OPERATORS = {
    "ADD": 0, "AVERAGE_POOL_2D": 1, "CONCATENATION": 2, "CONV_2D": 3, "DEPTHWISE_CONV_2D": 4, "DEPTH_TO_SPACE": 5,
    "DEQUANTIZE": 6, "EMBEDDING_LOOKUP": 7, "FLOOR": 8, "FULLY_CONNECTED": 9, "L2_NORMALIZATION": 11, "L2_POOL_2D": 12,
    "LOGISTIC": 14, "MAX_POOL_2D": 17, "MUL": 18, "RELU": 19, "RELU_N1_TO_1": 20, "RELU6": 21, "RESHAPE": 22,
    "RESIZE_BILINEAR": 23, "SOFTMAX": 25, "SPACE_TO_DEPTH": 26, "SVDF": 27, "TANH": 28, "CUSTOM": 32, "PAD": 34,
    "GATHER": 36, "BATCH_TO_SPACE_ND": 37, "SPACE_TO_BATCH_ND": 38, "TRANSPOSE": 39, "MEAN": 40, "SUB": 41, "DIV": 42,
    "SQUEEZE": 43, "UNIDIRECTIONAL_SEQUENCE_LSTM": 44, "STRIDED_SLICE": 45, "EXP": 47, "SPLIT": 49, "LOG_SOFTMAX": 50,
    "CAST": 53, "PRELU": 54, "MAXIMUM": 55, "ARG_MAX": 56, "MINIMUM": 57, "LESS": 58, "NEG": 59, "PADV2": 60,
    "GREATER": 61, "GREATER_EQUAL": 62, "LESS_EQUAL": 63, "SLICE": 65, "SIN": 66, "TRANSPOSE_CONV": 67,
    "EXPAND_DIMS": 70, "EQUAL": 71, "NOT_EQUAL": 72, "LOG": 73, "SUM": 74, "SQRT": 75, "RSQRT": 76, "SHAPE": 77,
    "ARG_MIN": 79, "REDUCE_MAX": 82, "PACK": 83, "LOGICAL_OR": 84, "LOGICAL_AND": 86, "LOGICAL_NOT": 87, "UNPACK": 88,
    "REDUCE_MIN": 89, "FLOOR_DIV": 90, "SQUARE": 92, "ZEROS_LIKE": 93, "FILL": 94, "FLOOR_MOD": 95,
    "RESIZE_NEAREST_NEIGHBOR": 97, "LEAKY_RELU": 98, "SQUARED_DIFFERENCE": 99, "MIRROR_PAD": 100, "ABS": 101,
    "SPLIT_V": 102, "CEIL": 104, "REVERSE_V2": 105, "ADD_N": 106, "GATHER_ND": 107, "COS": 108, "ELU": 111,
    "QUANTIZE": 114, "ROUND": 116, "HARD_SWISH": 117, "IF": 118, "WHILE": 119, "SELECT_V2": 123, "BATCH_MATMUL": 126,
    "CUMSUM": 128, "CALL_ONCE": 129, "BROADCAST_TO": 130, "REDUCE_ALL": 140, "VAR_HANDLE": 142, "READ_VARIABLE": 143,
    "ASSIGN_VARIABLE": 144, "BROADCAST_ARGS": 145, "DYNAMIC_UPDATE_SLICE": 151,
}  # fmt: skip
"""Every operator that TensorFlow Lite Micro has, custom ones aside, with its number in a file."""


@dataclass(frozen=True)
class Options:
    """The options table of an operator: its number in the union, and each field's number, type and default.

    Types: `int8`, `int32`, `bool`, `float32`; `padding`, `activation`, `dtype` are int8 that stand for a name;
    `graph` is an int32 that stands for a subgraph.
    """

    number: int
    fields: Mapping[str, tuple[int, str, float]]


def _convolution(number: int, *, depthwise: bool = False, dilated: bool = True) -> Options:
    names = ["padding", "stride_w", "stride_h"] + ["depth_multiplier"] * depthwise
    names += ["fused_activation_function"] + ["dilation_w_factor", "dilation_h_factor"] * dilated
    types = {"padding": ("padding", 0), "fused_activation_function": ("activation", 0)}
    types |= {"dilation_w_factor": ("int32", 1), "dilation_h_factor": ("int32", 1)}
    return Options(number, {name: (place, *types.get(name, ("int32", 0))) for place, name in enumerate(names)})


_FUSED = {"fused_activation_function": (0, "activation", 0)}
_REDUCE = Options(27, {"keep_dims": (0, "bool", 0)})
_POOL = Options(5, {
    "padding": (0, "padding", 0), "stride_w": (1, "int32", 0), "stride_h": (2, "int32", 0),
    "filter_width": (3, "int32", 0), "filter_height": (4, "int32", 0),
    "fused_activation_function": (5, "activation", 0),
})  # fmt: skip

OPTIONS = {
    "CONV_2D": _convolution(1),
    "DEPTHWISE_CONV_2D": _convolution(2, depthwise=True),
    "TRANSPOSE_CONV": _convolution(49, dilated=False),
    "AVERAGE_POOL_2D": _POOL,
    "MAX_POOL_2D": _POOL,
    "L2_POOL_2D": _POOL,
    "FULLY_CONNECTED": Options(8, {**_FUSED, "weights_format": (1, "int8", 0), "keep_num_dims": (2, "bool", 0)}),
    "SOFTMAX": Options(9, {"beta": (0, "float32", 0)}),
    "CONCATENATION": Options(10, {"axis": (0, "int32", 0), "fused_activation_function": (1, "activation", 0)}),
    "ADD": Options(11, {**_FUSED, "pot_scale_int16": (1, "bool", 1)}),
    "SUB": Options(28, {**_FUSED, "pot_scale_int16": (1, "bool", 1)}),
    "MUL": Options(21, _FUSED),
    "DIV": Options(29, _FUSED),
    "L2_NORMALIZATION": Options(12, _FUSED),
    "RESHAPE": Options(17, {}),
    "PAD": Options(22, {}),
    "PADV2": Options(43, {}),
    "GATHER": Options(23, {"axis": (0, "int32", 0), "batch_dims": (1, "int32", 0)}),
    "TRANSPOSE": Options(26, {}),
    **dict.fromkeys(("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_ALL"), _REDUCE),
    "STRIDED_SLICE": Options(32, {
        "begin_mask": (0, "int32", 0), "end_mask": (1, "int32", 0), "ellipsis_mask": (2, "int32", 0),
        "new_axis_mask": (3, "int32", 0), "shrink_axis_mask": (4, "int32", 0),
    }),
    "SLICE": Options(48, {}),
    "SPACE_TO_DEPTH": Options(19, {"block_size": (0, "int32", 0)}),
    "DEPTH_TO_SPACE": Options(94, {"block_size": (0, "int32", 0)}),
    "MIRROR_PAD": Options(77, {"mode": (0, "int8", 0)}),
    "SQUEEZE": Options(30, {}),
    "EXP": Options(33, {}),
    "SPLIT": Options(35, {"num_splits": (0, "int32", 0)}),
    "SPLIT_V": Options(79, {"num_splits": (0, "int32", 0)}),
    "LOG_SOFTMAX": Options(36, {}),
    "CAST": Options(37, {"in_data_type": (0, "dtype", 0), "out_data_type": (1, "dtype", 0)}),
    "MAXIMUM": Options(39, {}),
    "MINIMUM": Options(39, {}),
    "ARG_MAX": Options(40, {"output_type": (0, "dtype", 0)}),
    "ARG_MIN": Options(57, {"output_type": (0, "dtype", 0)}),
    "LEAKY_RELU": Options(75, {"alpha": (0, "float32", 0)}),
    "SQUARED_DIFFERENCE": Options(76, {}),
    "REVERSE_V2": Options(81, {}),
    "QUANTIZE": Options(89, {}),
    "HARD_SWISH": Options(91, {}),
    "IF": Options(92, {"then_subgraph_index": (0, "graph", 0), "else_subgraph_index": (1, "graph", 0)}),
    "WHILE": Options(93, {"cond_subgraph_index": (0, "graph", 0), "body_subgraph_index": (1, "graph", 0)}),
    "SELECT_V2": Options(98, {}),
    "BATCH_MATMUL": Options(101, {"adj_x": (0, "bool", 0), "adj_y": (1, "bool", 0)}),
    "CUMSUM": Options(102, {"exclusive": (0, "bool", 0), "reverse": (1, "bool", 0)}),
    "BROADCAST_TO": Options(104, {}),
    "DYNAMIC_UPDATE_SLICE": Options(117, {}),
    "PACK": Options(59, {"values_count": (0, "int32", 0), "axis": (1, "int32", 0)}),
    "RESIZE_BILINEAR": Options(15, {"align_corners": (2, "bool", 0), "half_pixel_centers": (3, "bool", 0)}),
    "RESIZE_NEAREST_NEIGHBOR": Options(74, {"align_corners": (0, "bool", 0), "half_pixel_centers": (1, "bool", 0)}),
    "ADD_N": Options(82, {}),
    "BATCH_TO_SPACE_ND": Options(24, {}),
    "SPACE_TO_BATCH_ND": Options(25, {}),
    "SHAPE": Options(55, {"out_type": (0, "dtype", 0)}),
    "ZEROS_LIKE": Options(67, {}),
    "FILL": Options(68, {}),
    "GATHER_ND": Options(83, {}),
    "CALL_ONCE": Options(103, {"init_subgraph_index": (0, "graph", 0)}),
    "READ_VARIABLE": Options(112, {}),
    "ASSIGN_VARIABLE": Options(113, {}),
    "UNPACK": Options(64, {"num": (0, "int32", 0), "axis": (1, "int32", 0)}),
    "SVDF": Options(6, {"rank": (0, "int32", 0), "fused_activation_function": (1, "activation", 0)}),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Options(71, {
        "fused_activation_function": (0, "activation", 0), "cell_clip": (1, "float32", 0),
        "proj_clip": (2, "float32", 0), "time_major": (3, "bool", 0),
    }),
}  # fmt: skip
"""Operators that have options. The others need none."""

VERSIONS: dict[str, dict[str, int]] = {
    "CONV_2D": {"int8": 3, "int16": 4, "int4": 7},
    "DEPTHWISE_CONV_2D": {"int8": 3, "int16": 5, "int4": 7},
    "TRANSPOSE_CONV": {"float32": 3, "int8": 3, "int16": 3},
    "FULLY_CONNECTED": {"float32": 5, "int8": 5, "int16": 7, "int4": 10, "per channel": 12},
    "ADD": {"int8": 2, "int16": 3}, "SUB": {"int8": 2, "int16": 5}, "MUL": {"int8": 2, "int16": 4},
    "AVERAGE_POOL_2D": {"int8": 2, "int16": 3}, "MAX_POOL_2D": {"int8": 2, "int16": 3},
    "CONCATENATION": {"int8": 2, "int16": 3}, "SOFTMAX": {"int8": 2, "int16": 3},
    "LOGISTIC": {"int8": 2, "int16": 3}, "TANH": {"int8": 2, "int16": 3},
    "PAD": {"int8": 2, "int16": 3}, "PADV2": {"int8": 2, "int16": 3}, "TRANSPOSE": {"int8": 2, "int16": 4},
    "MEAN": {"int8": 2, "int16": 3}, "SUM": {"int8": 2}, "REDUCE_MAX": {"int8": 2}, "REDUCE_MIN": {"int8": 2},
    "SLICE": {"int8": 2, "int16": 4}, "STRIDED_SLICE": {"int8": 2, "int16": 4, "bool": 3},
    "GATHER": {"int8": 2}, "SPLIT": {"int8": 2, "int16": 4}, "SPLIT_V": {"int8": 2, "int16": 2},
    "MAXIMUM": {"int8": 2, "int16": 3}, "MINIMUM": {"int8": 2, "int16": 3}, "RELU": {"int8": 2, "int16": 3},
    "RELU6": {"int8": 2, "int16": 3}, "LEAKY_RELU": {"int8": 2, "int16": 2}, "QUANTIZE": {"int8": 2, "int16": 2},
    "DEQUANTIZE": {"int8": 2, "int16": 3}, "BATCH_MATMUL": {"int8": 2, "int16": 3}, "BROADCAST_TO": {"float32": 2,
    "int8": 2, "int16": 2, "int32": 2, "bool": 2}, "CAST": {"int8": 2}, "REVERSE_V2": {"int8": 3, "int16": 3},
    "SELECT_V2": {"int8": 2, "int16": 2}, "DYNAMIC_UPDATE_SLICE": {"int8": 1}, "LOG_SOFTMAX": {"int8": 2},
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"), {"int8": 2}),  # noqa: RUF024
}  # fmt: skip
"""The version of an operator by the type of its first input (of its weights, if these are int4); else 1."""

RUNTIMES: dict[tuple[str, int], str] = {
    ("CONV_2D", 3): "1.14.0", ("CONV_2D", 4): "2.3.0", ("CONV_2D", 7): "2.11.0", ("DEPTHWISE_CONV_2D", 2): "1.12.0",
    ("DEPTHWISE_CONV_2D", 3): "1.14.0", ("DEPTHWISE_CONV_2D", 5): "2.3.0", ("DEPTHWISE_CONV_2D", 7): "2.11.0",
    ("TRANSPOSE_CONV", 3): "2.3.0", ("FULLY_CONNECTED", 5): "2.0.0", ("FULLY_CONNECTED", 7): "2.3.0",
    ("FULLY_CONNECTED", 10): "2.11.0", ("FULLY_CONNECTED", 12): "2.17.0",
    ("ADD", 2): "1.14.0", ("ADD", 3): "2.4.0", ("SUB", 2): "1.14.0", ("SUB", 5): "2.4.0", ("MUL", 2): "1.14.0",
    ("MUL", 4): "2.3.0", ("AVERAGE_POOL_2D", 2): "1.14.0", ("AVERAGE_POOL_2D", 3): "2.3.0",
    ("MAX_POOL_2D", 2): "1.14.0", ("MAX_POOL_2D", 3): "2.3.0", ("CONCATENATION", 2): "1.14.0",
    ("CONCATENATION", 3): "2.3.0", ("SOFTMAX", 2): "1.14.0", ("SOFTMAX", 3): "2.3.0", ("LOGISTIC", 1): "1.14.0",
    ("LOGISTIC", 2): "1.14.0", ("LOGISTIC", 3): "2.3.0", ("TANH", 1): "1.14.0", ("TANH", 2): "1.14.0",
    ("TANH", 3): "2.3.0", ("PAD", 2): "1.14.0", ("PAD", 3): "2.4.0", ("PADV2", 1): "1.9.0", ("PADV2", 2): "1.14.0",
    ("PADV2", 3): "2.4.0", ("TRANSPOSE", 1): "1.6.0", ("TRANSPOSE", 2): "1.14.0", ("TRANSPOSE", 4): "2.3.0",
    ("MEAN", 1): "1.6.0", ("MEAN", 2): "1.14.0", ("MEAN", 3): "2.4.0", ("SUM", 1): "1.10.0", ("SUM", 2): "1.15.0",
    ("REDUCE_MAX", 1): "1.11.0", ("REDUCE_MAX", 2): "1.14.0", ("REDUCE_MIN", 1): "1.11.0", ("REDUCE_MIN", 2): "1.14.0",
    ("SLICE", 1): "1.14.0", ("SLICE", 2): "1.14.0", ("SLICE", 4): "2.4.0", ("STRIDED_SLICE", 1): "1.6.0",
    ("STRIDED_SLICE", 2): "1.14.0", ("STRIDED_SLICE", 3): "2.1.0", ("STRIDED_SLICE", 4): "2.2.0",
    ("GATHER", 1): "1.6.0", ("GATHER", 2): "1.14.0", ("SPLIT", 2): "1.14.0", ("SPLIT", 4): "2.3.0",
    ("SPLIT_V", 1): "1.13.1", ("SPLIT_V", 2): "2.3.0", ("MAXIMUM", 1): "1.14.0", ("MAXIMUM", 2): "1.14.0",
    ("MAXIMUM", 3): "2.3.0", ("MINIMUM", 1): "1.14.0", ("MINIMUM", 2): "1.14.0", ("MINIMUM", 3): "2.3.0",
    ("RELU", 2): "2.1.0", ("RELU", 3): "2.5.0", ("RELU6", 2): "1.14.0", ("RELU6", 3): "2.5.0",
    ("LEAKY_RELU", 1): "1.13.1", ("LEAKY_RELU", 2): "2.3.0", ("QUANTIZE", 1): "1.14.0", ("QUANTIZE", 2): "1.15.0",
    ("DEQUANTIZE", 2): "1.14.0", ("DEQUANTIZE", 3): "1.15.0", ("BATCH_MATMUL", 1): "2.3.0",
    ("BATCH_MATMUL", 2): "2.3.0", ("BATCH_MATMUL", 3): "2.4.0", ("BROADCAST_TO", 2): "2.5.0", ("CAST", 2): "2.7.0",
    ("REVERSE_V2", 1): "1.14.0", ("REVERSE_V2", 3): "2.5.0", ("SELECT_V2", 1): "2.2.0", ("SELECT_V2", 2): "2.12.0",
    ("DYNAMIC_UPDATE_SLICE", 1): "2.9.0", ("LOG_SOFTMAX", 1): "1.14.0", ("LOG_SOFTMAX", 2): "1.14.0",
    ("CUMSUM", 1): "2.4.0", ("IF", 1): "1.15.0", ("WHILE", 1): "1.15.0", ("ELU", 1): "1.14.0",
    ("HARD_SWISH", 1): "1.15.0", ("REDUCE_ALL", 1): "2.6.0", ("COS", 1): "1.14.0", ("SIN", 1): "1.9.0",
    ("EXP", 1): "1.7.0", ("LOG", 1): "1.14.0", ("SQRT", 1): "1.10.0", ("RSQRT", 1): "1.10.0", ("ABS", 1): "1.13.0",
    ("NEG", 1): "1.9.0", ("SQUARE", 1): "1.12.0", ("ROUND", 1): "1.14.0", ("CEIL", 1): "1.14.0", ("FLOOR", 1): "1.9.0",
    ("ARG_MAX", 1): "1.9.0", ("ARG_MIN", 1): "1.9.0", ("LOGICAL_AND", 1): "1.11.0", ("LOGICAL_OR", 1): "1.11.0",
    ("LOGICAL_NOT", 1): "1.11.0", ("FLOOR_DIV", 1): "1.14.0", ("FLOOR_MOD", 1): "1.13.0",
    ("SQUARED_DIFFERENCE", 1): "1.13.1",
    **{(kind, number): "1.14.0" for number in (1, 2) for kind in
       ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")},
}  # fmt: skip
"""The first TensorFlow Lite runtime that knows a version of an operator; 1.5.0 for those not listed."""
FIRST_RUNTIME = "1.5.0"
