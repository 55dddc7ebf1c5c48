"""Operators that the runtime interprets and that are no function's: the exporter writes none but `detectors`'s."""

from multipod.micro.operators.operator import Operator, Options

_STATEFUL_LSTM = {
    "fused_activation_function": (0, "activation", 0), "cell_clip": (1, "float32", 0), "proj_clip": (2, "float32", 0),
    "time_major": (3, "bool", 0),
}  # fmt: skip

OPERATORS = (
    Operator("ADD_N", Options(82)),
    Operator("ASSIGN_VARIABLE", Options(113)),
    Operator("BATCH_TO_SPACE_ND", Options(24)),
    Operator("BROADCAST_ARGS"),
    Operator("CALL_ONCE", Options(103, {"init_subgraph_index": (0, "graph", 0)})),
    Operator("CUSTOM"),
    Operator("DETECTION_POSTPROCESS", custom="TFLite_Detection_PostProcess"),
    Operator("DEPTH_TO_SPACE", Options(94, {"block_size": (0, "int32", 0)})),
    Operator("EMBEDDING_LOOKUP"),
    Operator("EXPAND_DIMS"),
    Operator("FILL", Options(68)),
    Operator("GATHER_ND", Options(83)),
    Operator("MIRROR_PAD", Options(77, {"mode": (0, "int8", 0)})),
    Operator("NEG"),
    Operator("PACK", Options(59, {"values_count": (0, "int32", 0), "axis": (1, "int32", 0)})),
    Operator("PRELU"),
    Operator("READ_VARIABLE", Options(112)),
    Operator("RESIZE_BILINEAR", Options(15, {"align_corners": (2, "bool", 0), "half_pixel_centers": (3, "bool", 0)})),
    Operator(
        "RESIZE_NEAREST_NEIGHBOR", Options(74, {"align_corners": (0, "bool", 0), "half_pixel_centers": (1, "bool", 0)})
    ),
    Operator("SHAPE", Options(55, {"out_type": (0, "dtype", 0)})),
    Operator("SPACE_TO_BATCH_ND", Options(25)),
    Operator("SPACE_TO_DEPTH", Options(19, {"block_size": (0, "int32", 0)})),
    Operator("SPLIT", Options(35, {"num_splits": (0, "int32", 0)})),
    Operator("SPLIT_V", Options(79, {"num_splits": (0, "int32", 0)})),
    Operator("SQUEEZE", Options(30)),
    Operator("SVDF", Options(6, {"rank": (0, "int32", 0), "fused_activation_function": (1, "activation", 0)})),
    Operator("UNIDIRECTIONAL_SEQUENCE_LSTM", Options(71, _STATEFUL_LSTM)),
    Operator("UNPACK", Options(64, {"num": (0, "int32", 0), "axis": (1, "int32", 0)})),
    Operator("VAR_HANDLE"),
    Operator("ZEROS_LIKE", Options(67)),
)
