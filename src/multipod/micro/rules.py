"""The rewrite rules, as tables: what JAX writes on the left, what TFLite has a kernel for on the right.

Tables, applied one after the other, each until nothing changes: `TIDY` brings equal things into one form, `RECOGNISE`
finds functions in it (softmax, gelu, means; most of these rules are in the operators' records), `FOLD` moves constants
into the operator before, `FINISH` activations.
"""

from dataclasses import replace

import numpy as np

from multipod.micro.graph import Graph, Op, Tensor, constant, merge_equal
from multipod.micro.layout_rules import LAYOUT
from multipod.micro.lowering.constants import shrink
from multipod.micro.lowering.padding import same_padding
from multipod.micro.match import Builder, Const, Match, Rewrite, change_op, make_op, node, rewrite
from multipod.micro.operators.operator import Weighted
from multipod.micro.operators.slices import TRUSTED_INDEX
from multipod.micro.operators.table import OPERATORS, weights_of

WEIGHTED = "|".join(name for name, operator in OPERATORS.items() if isinstance(operator.quantised, Weighted))
FUSING = "|".join(name for name, operator in OPERATORS.items() if operator.fuses)


def simplify(graph: Graph) -> Graph:
    """The graph after all rules."""
    for table in (TIDY, RECOGNISE, FOLD, [*TIDY, *FOLD, *FINISH]):
        graph = merge_equal(rewrite(graph, table))
    return graph


# --- builders -------------------------------------------------------------------------------------------------------


def _division(match: Match) -> list[Op] | None:
    c = match["c"].values
    if c.dtype != np.float32 or (c == 0).any():
        return None
    return [make_op("MUL", [match["x"], constant(1 / c)], match.op.output, match.op.source)]


def _difference(match: Match) -> list[Op] | None:
    if match["c"].dtype != "float32":
        return None
    return [make_op("ADD", [match["x"], constant(-match["c"].values)], match.op.output, match.op.source)]


def _two_constants(kind: str) -> Builder:
    combine = np.multiply if kind == "MUL" else np.add

    def build(match: Match) -> list[Op] | None:
        c = shrink(combine(match["c"].values, match["d"].values))
        if np.broadcast_shapes(match["x"].shape, c.shape) != match.op.output.shape:
            return None
        return [make_op(kind, [match["x"], constant(c)], match.op.output, match.op.source)]

    return build


def _identity(number: float) -> Builder:
    """The other operand, if the constant is all `number` and does not widen it."""

    def build(match: Match) -> Tensor | None:
        same = match["x"].shape == match.op.output.shape and (match["c"].values == number).all()
        return match["x"] if same else None

    return build


def _drop_broadcast(match: Match) -> list[Op] | None:
    """Element-wise operators repeat elements themselves, where the other operand has the whole shape."""
    makers = match.ops["wide"]
    inputs = [makers.input(0) if tensor is makers.output else tensor for tensor in match.op.inputs]
    if np.broadcast_shapes(*(t.shape for t in inputs if t is not None)) != match.op.output.shape:
        return None
    return [replace(match.op, inputs=tuple(inputs))]


def _centred_variance(match: Match) -> list[Op] | None:
    """mean(x^2) - mean(x)^2 = mean((x - mean(x))^2).

    The first form, the usual one in layer norms, is a small difference of large numbers: in int8 little is left of it.
    """
    x, squares, mean = match["x"], match.ops["squares"], match.ops["mean"]
    if not np.array_equal(match["axes"].values, match["axes2"].values):
        return None
    kept = tuple(1 if dim in [int(axis) % len(x.shape) for axis in np.ravel(match["axes"].values)] else size
                 for dim, size in enumerate(x.shape))  # fmt: skip
    name, source = match.op.output.name, match.op.source
    average, apart, power = (Tensor(name + end, shape) for end, shape in
                             (("_mean", kept), ("_apart", x.shape), ("_square", x.shape)))  # fmt: skip
    return [
        change_op(mean, list(mean.inputs), average, keep_dims=True),
        make_op("SUB", [x, average], apart, source),
        make_op("SQUARE", [apart], power, source),
        change_op(squares, [power, squares.inputs[1]], match.op.output),
    ]


def _reduce_reshape(match: Match) -> list[Op] | None:
    """A reduction that drops the dims itself, where all that the reshape does is to drop them."""
    reduce, x = match.ops["reduce"], match["x"]
    axes = [int(axis) for axis in np.ravel(match["axes"].values)]
    if not reduce.options["keep_dims"] or not match.op.output.shape:
        return None
    if match.op.output.shape != tuple(size for dim, size in enumerate(x.shape) if dim not in axes):
        return None
    return [change_op(reduce, list(reduce.inputs), match.op.output, keep_dims=False)]


def _per_channel(c: Tensor, op: Op) -> np.ndarray | None:
    """A constant as one number for each output channel, if it is that."""
    out = op.output.shape[-1]
    value = shrink(c.values)
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != out):
        return None
    return np.broadcast_to(value, (out,)).astype(np.float32)


def _fold_scale(match: Match) -> list[Op] | None:
    """(w x + b) c = (w c) x + b c: batch norm's factor disappears into the weights."""
    op = match.ops["w"]
    c = _per_channel(match["c"], op)
    kernel = weights_of(op)
    assert kernel is not None
    weights, bias = op.input(kernel.weights), op.input(kernel.bias)
    if c is None or match.op.output.shape != op.output.shape or not weights.constant:
        return None
    shape = [1] * len(weights.shape)
    shape[kernel.channel_dim] = -1
    inputs = list(op.inputs)
    inputs[kernel.weights] = replace(weights, data=(weights.values * c.reshape(shape)).astype(np.float32))
    inputs[kernel.bias] = replace(bias, data=(bias.values * c).astype(np.float32))
    return [change_op(op, inputs, match.op.output)]


def _fold_bias(match: Match) -> list[Op] | None:
    """(w x + b) + c = w x + (b + c)."""
    op = match.ops["w"]
    c = _per_channel(match["c"], op)
    kernel = weights_of(op)
    assert kernel is not None
    bias = op.input(kernel.bias)
    if c is None or match.op.output.shape != op.output.shape:
        return None
    inputs = list(op.inputs)
    inputs[kernel.bias] = replace(bias, data=(bias.values + c).astype(np.float32))
    return [change_op(op, inputs, match.op.output)]


def _fold_input_scale(match: Match) -> list[Op] | None:
    """w (x c) + b = (w c) x + b for one number c, such as the 1/255 of images."""
    op, c = match.op, match["c"].values
    kernel = weights_of(op)
    assert kernel is not None
    weights = op.input(kernel.weights)
    if c.size != 1 or match["x"].shape != op.input(kernel.data).shape or not weights.constant:
        return None
    inputs = list(op.inputs)
    inputs[kernel.data] = match["x"]
    inputs[kernel.weights] = replace(weights, data=(weights.values * c.ravel()[0]).astype(np.float32))
    return [change_op(op, inputs, op.output)]


def _distribute(match: Match) -> list[Op] | None:
    """(x + a) m = x m + a m, so that what follows a normalisation is one product and one sum."""
    a, m = match["a"].values, match["m"].values
    if match["x"].shape != match.op.output.shape or a.dtype != np.float32:
        return None
    scaled = Tensor(match.op.output.name + "_scaled", match.op.output.shape)
    return [
        make_op("MUL", [match["x"], match["m"]], scaled, match.op.source),
        make_op("ADD", [scaled, constant(shrink(a * m))], match.op.output, match.op.source),
    ]


def _fuse(match: Match) -> list[Op]:
    op = match.ops["w"]
    return [change_op(op, list(op.inputs), match.op.output, fused_activation_function=match.op.kind)]


def _fold_padding(match: Match) -> list[Op] | None:
    """PAD and VALID in one, where together they are what SAME means."""
    op, x = match.op, match["x"]
    if op.options["padding"] != "VALID":
        return None
    kernel = op.input(1).shape[1:3]
    dilation = (op.options["dilation_h_factor"], op.options["dilation_w_factor"])
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    strides = (op.options["stride_h"], op.options["stride_w"])
    same = [same_padding(*sizes) for sizes in zip(x.shape[1:3], reach, strides, strict=True)]
    around = [tuple(map(int, pair)) for pair in match["widths"].values]
    if around != [(0, 0), *same, (0, 0)]:
        return None
    return [change_op(op, [x, *op.inputs[1:]], op.output, padding="SAME")]


def _convolution_of_patches(match: Match) -> list[Op] | None:
    """A dense layer on shifted copies of an image, side by side, is a convolution; so some write it in JAX."""
    op, parts = match.op, _flat_parts(match, match.ops["cat"])
    slices = [match.makers.get(part) for part in parts]
    if len(op.output.shape) != 4 or any(cut is None or cut.kind not in ("SLICE", "STRIDED_SLICE") for cut in slices):
        return None
    cuts = [cut for cut in slices if cut is not None]
    image, begins = cuts[0].input(0), [[int(v) for v in cut.input(1).values] for cut in cuts]
    strides = [[int(v) for v in cut.input(3).values] if cut.kind == "STRIDED_SLICE" else [1] * 4 for cut in cuts]
    height, width = (max(begin[dim] for begin in begins) + 1 for dim in (1, 2))
    raster = [[0, dy, dx, 0] for dy in range(height) for dx in range(width)]
    if begins != raster or any(cut.input(0) is not image for cut in cuts) or any(s != strides[0] for s in strides):
        return None
    n, rows, columns, channels = image.shape
    step = strides[0]
    size = (n, -(-(rows - height + 1) // step[1]), -(-(columns - width + 1) // step[2]))
    weights = op.input(1)
    if step[0] != 1 or step[3] != 1 or op.output.shape[:3] != size or not weights.constant:
        return None
    kernel = weights.values.reshape(weights.shape[0], height, width, channels)
    options = {
        "padding": "VALID", "stride_w": step[2], "stride_h": step[1], "dilation_w_factor": 1, "dilation_h_factor": 1,
        "fused_activation_function": op.options["fused_activation_function"],
    }  # fmt: skip
    return [Op("CONV_2D", (image, constant(kernel), op.inputs[2]), op.outputs, options, op.source)]


def _flat_parts(match: Match, op: Op) -> list[Tensor]:
    """The parts of a concatenation along the last dim, those of concatenations inside it among them."""
    if op.options["axis"] != len(op.output.shape) - 1:
        return [op.output]
    parts: list[Tensor] = []
    for tensor in op.tensors_in:
        maker = match.makers.get(tensor)
        inner = maker is not None and maker.kind == "CONCATENATION"
        parts += _flat_parts(match, maker) if inner and maker is not None else [tensor]
    return parts


def _over_root(match: Match) -> list[Op]:
    root = Tensor(match["v"].name + "_rsqrt", match["v"].shape)
    inverse = make_op("RSQRT", [match["v"]], root, match.op.source)
    return [inverse, make_op("MUL", [match["x"], root], match.op.output, match.op.source)]


# --- the tables -----------------------------------------------------------------------------------------------------

_PAD = node("PAD", "x", Const("widths"))

TIDY: list[Rewrite] = [
    Rewrite("divide by a constant", node("DIV", "x", Const("c")), _division),
    Rewrite("subtract a constant", node("SUB", "x", Const("c")), _difference),
    Rewrite("product of products", node("MUL", node("MUL", "x", Const("c")), Const("d")), _two_constants("MUL")),
    Rewrite("sum of sums", node("ADD", node("ADD", "x", Const("c")), Const("d")), _two_constants("ADD")),
    Rewrite("times one", node("MUL", "x", Const("c")), _identity(1.0)),
    Rewrite("plus zero", node("ADD", "x", Const("c")), _identity(0.0)),
    Rewrite("NaN is not equal to itself", node("SELECT_V2", node("NOT_EQUAL", "x", "x"), "a", "b"), lambda f: f["b"]
         if f["b"].shape == f.op.output.shape else None),
    Rewrite("x / sqrt(v)", node("DIV", "x", node("SQRT", "v"), name="div"), _over_root),
    *(Rewrite("broadcast in " + operator.name, node(operator.name, *operands), _drop_broadcast)
      for operator in OPERATORS.values() if operator.broadcasts
      for operands in ((node("BROADCAST_TO", "x", name="wide"),), ("y", node("BROADCAST_TO", "x", name="wide")))),
    *TRUSTED_INDEX,
    *LAYOUT,
]  # fmt: skip

RECOGNISE: list[Rewrite] = [
    *(rule for operator in OPERATORS.values() for rule in operator.recognised),
    Rewrite("squares are not below zero", node("RELU", node("MEAN|SUM", node("SQUARE", "x"))), lambda f: f.op.input(0)),
    Rewrite("variance", node("SUB", node("MEAN", node("SQUARE", "x"), Const("axes"), name="squares"),
                          node("SQUARE", node("MEAN", "x", Const("axes2"), name="mean"))), _centred_variance),
    *TIDY,
]  # fmt: skip

FOLD: list[Rewrite] = [
    Rewrite("scale into weights", node("MUL", node(WEIGHTED, once=True, name="w"), Const("c")), _fold_scale),
    Rewrite("sum into bias", node("ADD", node(WEIGHTED, once=True, name="w"), Const("c")), _fold_bias),
    Rewrite("scale of the input into weights",
         node("CONV_2D|DEPTHWISE_CONV_2D|FULLY_CONNECTED", node("MUL", "x", Const("c"), once=True)), _fold_input_scale),
    Rewrite("normalisation as product and sum", node("MUL", node("ADD", "x", Const("a"), once=True), Const("m")),
         _distribute),
    Rewrite("patches into convolution", node("FULLY_CONNECTED", node("CONCATENATION", name="cat")),
         _convolution_of_patches),
    Rewrite("padding into convolution", node("CONV_2D|DEPTHWISE_CONV_2D", _PAD), _fold_padding),
]  # fmt: skip

FINISH: list[Rewrite] = [
    Rewrite("activation into operator", node("RELU|RELU6|RELU_N1_TO_1", node(FUSING, once=True, name="w")), _fuse),
    Rewrite("reduction drops dims",
            node("RESHAPE", node("MEAN|SUM|REDUCE_MAX|REDUCE_MIN", "x", Const("axes"), once=True, name="reduce")),
            _reduce_reshape),
]  # fmt: skip
