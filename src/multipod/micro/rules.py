"""The rewrite rules, as tables: what JAX writes on the left, what TFLite has a kernel for on the right.

Three tables, applied one after the other, each until nothing changes: `TIDY` brings equal things into one form,
`RECOGNISE` finds functions in it (softmax, gelu, means), `FOLD` moves constants and activations into the operator
before.
"""

import math
from dataclasses import replace

import numpy as np

from multipod.micro.graph import Graph, Op, Tensor, constant, merged
from multipod.micro.layout_rules import LAYOUT
from multipod.micro.lowering.elementwise import small
from multipod.micro.lowering.linear import same_padding
from multipod.micro.match import Builder, Const, Found, Rule, close, new, node, rewritten

COMPOSITES = ("ERF", "ERFC", "GELU", "LOG1P", "EXPM1", "SIGN", "SOFTPLUS", "RECIPROCAL")
"""Functions that TFLM has no operator for: taken apart in float32 (`composites.py`), 256-byte tables in int8."""

WEIGHTED = "CONV_2D|DEPTHWISE_CONV_2D|FULLY_CONNECTED|TRANSPOSE_CONV"
FUSING = "CONV_2D|DEPTHWISE_CONV_2D|FULLY_CONNECTED|ADD|SUB|MUL"
"""Operators that apply an activation to their result at no cost."""


def simplified(graph: Graph) -> Graph:
    """The graph after all rules."""
    for table in (TIDY, RECOGNISE, FOLD, [*TIDY, *FOLD, *FINISH]):
        graph = merged(rewritten(graph, table))
    return graph


def weight_place(op: Op) -> tuple[int, int, int]:
    """Of an operator with weights: which inputs are the data, the weights and the bias."""
    return (2, 1, 3) if op.kind == "TRANSPOSE_CONV" else (0, 1, 2)


def channel_axis(op: Op) -> int:
    """The dim of the weights that counts output channels."""
    return 3 if op.kind == "DEPTHWISE_CONV_2D" else 0


# --- builders -------------------------------------------------------------------------------------------------------


def _again(op: Op, inputs: list[Tensor | None], output: Tensor, **options: object) -> Op:
    return replace(op, inputs=tuple(inputs), outputs=(output,), options={**op.options, **options})


def _to(kind: str, *names: str, **options: object) -> Builder:
    """A builder of one operator of the named tensors."""
    return lambda found: [new(kind, [found[name] for name in names], found.op.output, found.op.source, **options)]


def _division(found: Found) -> list[Op] | None:
    c = found["c"].values
    if c.dtype != np.float32 or (c == 0).any():
        return None
    return [new("MUL", [found["x"], constant(1 / c)], found.op.output, found.op.source)]


def _difference(found: Found) -> list[Op] | None:
    if found["c"].dtype != "float32":
        return None
    return [new("ADD", [found["x"], constant(-found["c"].values)], found.op.output, found.op.source)]


def _two_constants(kind: str) -> Builder:
    combine = np.multiply if kind == "MUL" else np.add

    def build(found: Found) -> list[Op] | None:
        c = small(combine(found["c"].values, found["d"].values))
        if np.broadcast_shapes(found["x"].shape, c.shape) != found.op.output.shape:
            return None
        return [new(kind, [found["x"], constant(c)], found.op.output, found.op.source)]

    return build


def _identity(number: float) -> Builder:
    """The other operand, if the constant is all `number` and does not widen it."""

    def build(found: Found) -> Tensor | None:
        same = found["x"].shape == found.op.output.shape and (found["c"].values == number).all()
        return found["x"] if same else None

    return build


def _without_broadcast(found: Found) -> list[Op] | None:
    """Element-wise operators repeat elements themselves, where the other operand has the whole shape."""
    makers = found.ops["wide"]
    inputs = [makers.input(0) if tensor is makers.output else tensor for tensor in found.op.inputs]
    if np.broadcast_shapes(*(t.shape for t in inputs if t is not None)) != found.op.output.shape:
        return None
    return [replace(found.op, inputs=tuple(inputs))]


def _relu6(found: Found) -> list[Op] | None:
    pairs = {(0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}
    bounds = (found["low"].values, found["high"].values)
    for (low, high), kind in pairs.items():
        if (bounds[0] == low).all() and (bounds[1] == high).all() and all(b.size == 1 for b in bounds):
            return [new(kind, [found["x"]], found.op.output, found.op.source)]
    return None


def _leaky(found: Found) -> list[Op] | None:
    slope = found["a"].values
    if slope.size != 1 or not 0 < slope.ravel()[0] < 1:
        return None
    return [new("LEAKY_RELU", [found["x"]], found.op.output, found.op.source, alpha=float(slope.ravel()[0]))]


def _softmax(kind: str) -> Builder:
    """A softmax over the last dim; over another one between two transposes."""
    options = {"beta": 1.0} if kind == "SOFTMAX" else {}

    def build(found: Found) -> list[Op] | None:
        x, op = found["x"], found.op
        axes = [int(axis) % len(x.shape) for axis in np.ravel(found["axes"].values)]
        if len(axes) != 1 or (
            "axes2" in found.tensors and not np.array_equal(found["axes2"].values, found["axes"].values)
        ):
            return None
        last = len(x.shape) - 1
        if axes == [last]:
            return [new(kind, [x], op.output, op.source, **options)]
        order = [dim for dim in range(len(x.shape)) if dim != axes[0]] + axes
        turned = Tensor(x.name + "_t", tuple(x.shape[dim] for dim in order))
        result = Tensor(op.output.name + "_t", turned.shape)
        back = np.argsort(order).astype(np.int32)
        return [
            new("TRANSPOSE", [x, constant(np.asarray(order, np.int32))], turned, op.source),
            new(kind, [turned], result, op.source, **options),
            new("TRANSPOSE", [result, constant(back)], op.output, op.source),
        ]

    return build


def _beta(found: Found) -> list[Op] | None:
    """softmax(c x) = softmax with beta c, for one positive number c."""
    c = found["c"].values
    if c.size != 1 or c.ravel()[0] <= 0 or found["x"].shape != found.op.output.shape:
        return None
    return [_again(found.op, [found["x"]], found.op.output, beta=found.op.options["beta"] * float(c.ravel()[0]))]


def _mean(found: Found) -> list[Op] | None:
    x, total = found["x"], found.ops["sum"]
    count = np.prod([x.shape[int(axis)] for axis in np.ravel(found["axes"].values)])
    if not close(found["c"], 1 / count):
        return None
    return [_again(replace(total, kind="MEAN"), list(total.inputs), found.op.output)]


def _centred_variance(found: Found) -> list[Op] | None:
    """mean(x^2) - mean(x)^2 = mean((x - mean(x))^2).

    The first form, the usual one in layer norms, is a small difference of large numbers: in int8 little is left of it.
    """
    x, squares, mean = found["x"], found.ops["squares"], found.ops["mean"]
    if not np.array_equal(found["axes"].values, found["axes2"].values):
        return None
    kept = tuple(1 if dim in [int(axis) % len(x.shape) for axis in np.ravel(found["axes"].values)] else size
                 for dim, size in enumerate(x.shape))  # fmt: skip
    name, source = found.op.output.name, found.op.source
    average, apart, power = (Tensor(name + end, shape) for end, shape in
                             (("_mean", kept), ("_apart", x.shape), ("_square", x.shape)))  # fmt: skip
    return [
        _again(mean, list(mean.inputs), average, keep_dims=True),
        new("SUB", [x, average], apart, source),
        new("SQUARE", [apart], power, source),
        _again(squares, [power, squares.inputs[1]], found.op.output),
    ]


def _reduce_reshape(found: Found) -> list[Op] | None:
    """A reduction that drops the dims itself, where all that the reshape does is to drop them."""
    reduce, x = found.ops["reduce"], found["x"]
    axes = [int(axis) for axis in np.ravel(found["axes"].values)]
    if not reduce.options["keep_dims"] or not found.op.output.shape:
        return None
    if found.op.output.shape != tuple(size for dim, size in enumerate(x.shape) if dim not in axes):
        return None
    return [_again(reduce, list(reduce.inputs), found.op.output, keep_dims=False)]


def _average_of_inside(found: Found) -> list[Op] | None:
    """An average that does not count the padding: the sum over the window times 1 / (elements inside)."""
    pool, x = found.ops["pool"], found["x"]
    window = [pool.options["filter_height"], pool.options["filter_width"]]
    strides = [pool.options["stride_h"], pool.options["stride_w"]]
    around = [tuple(map(int, one)) for one in found["widths"].values]
    same = [same_padding(*sizes) for sizes in zip(x.shape[1:3], window, strides, strict=True)]
    if around != [(0, 0), *same, (0, 0)] or pool.options["padding"] != "VALID":
        return None
    inside = [_inside(*sizes) for sizes in zip(x.shape[1:3], window, strides, strict=True)]
    factor = np.prod(window) / np.multiply.outer(*inside)
    wide = np.broadcast_to(found["c"].values, (1, *pool.output.shape[1:]))
    if not np.allclose(wide, factor[None, :, :, None], rtol=1e-5):
        return None
    return [_again(pool, [x], found.op.output, padding="SAME")]


def _inside(size: int, window: int, stride: int) -> np.ndarray:
    before = same_padding(size, window, stride)[0]
    starts = np.arange(-(-size // stride)) * stride - before
    return np.minimum(starts + window, size) - np.maximum(starts, 0)


def _per_channel(c: Tensor, op: Op) -> np.ndarray | None:
    """A constant as one number for each output channel, if it is that."""
    out = op.output.shape[-1]
    value = small(c.values)
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != out):
        return None
    return np.broadcast_to(value, (out,)).astype(np.float32)


def _fold_scale(found: Found) -> list[Op] | None:
    """(w x + b) c = (w c) x + b c: batch norm's factor disappears into the weights."""
    op = found.ops["w"]
    c = _per_channel(found["c"], op)
    _, place_w, place_b = weight_place(op)
    if c is None or found.op.output.shape != op.output.shape or not op.input(place_w).constant:
        return None
    weights, bias = op.input(place_w), op.input(place_b)
    shape = [1] * len(weights.shape)
    shape[channel_axis(op)] = -1
    inputs = list(op.inputs)
    inputs[place_w] = replace(weights, data=(weights.values * c.reshape(shape)).astype(np.float32))
    inputs[place_b] = replace(bias, data=(bias.values * c).astype(np.float32))
    return [_again(op, inputs, found.op.output)]


def _fold_bias(found: Found) -> list[Op] | None:
    """(w x + b) + c = w x + (b + c)."""
    op = found.ops["w"]
    c = _per_channel(found["c"], op)
    place = weight_place(op)[2]
    if c is None or found.op.output.shape != op.output.shape:
        return None
    inputs = list(op.inputs)
    inputs[place] = replace(op.input(place), data=(op.input(place).values + c).astype(np.float32))
    return [_again(op, inputs, found.op.output)]


def _fold_input_scale(found: Found) -> list[Op] | None:
    """w (x c) + b = (w c) x + b for one number c, such as the 1/255 of images."""
    op, c = found.op, found["c"].values
    place_x, place_w, _ = weight_place(op)
    if c.size != 1 or found["x"].shape != op.input(place_x).shape or not op.input(place_w).constant:
        return None
    inputs = list(op.inputs)
    inputs[place_x] = found["x"]
    inputs[place_w] = replace(op.input(place_w), data=(op.input(place_w).values * c.ravel()[0]).astype(np.float32))
    return [_again(op, inputs, op.output)]


def _distribute(found: Found) -> list[Op] | None:
    """(x + a) m = x m + a m, so that what follows a normalisation is one product and one sum."""
    a, m = found["a"].values, found["m"].values
    if found["x"].shape != found.op.output.shape or a.dtype != np.float32:
        return None
    scaled = Tensor(found.op.output.name + "_scaled", found.op.output.shape)
    return [
        new("MUL", [found["x"], found["m"]], scaled, found.op.source),
        new("ADD", [scaled, constant(small(a * m))], found.op.output, found.op.source),
    ]


def _fuse(found: Found) -> list[Op]:
    op = found.ops["w"]
    return [_again(op, list(op.inputs), found.op.output, fused_activation_function=found.op.kind)]


def _fold_padding(found: Found) -> list[Op] | None:
    """PAD and VALID in one, where together they are what SAME means."""
    op, x = found.op, found["x"]
    if op.options["padding"] != "VALID":
        return None
    kernel = op.input(1).shape[1:3]
    dilation = (op.options["dilation_h_factor"], op.options["dilation_w_factor"])
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    strides = (op.options["stride_h"], op.options["stride_w"])
    same = [same_padding(*sizes) for sizes in zip(x.shape[1:3], reach, strides, strict=True)]
    around = [tuple(map(int, one)) for one in found["widths"].values]
    if around != [(0, 0), *same, (0, 0)]:
        return None
    return [_again(op, [x, *op.inputs[1:]], op.output, padding="SAME")]


def _convolution_of_patches(found: Found) -> list[Op] | None:
    """A dense layer on shifted copies of an image, side by side, is a convolution; so some write it in JAX."""
    op, parts = found.op, _flat_parts(found, found.ops["cat"])
    slices = [found.makers.get(part) for part in parts]
    if len(op.output.shape) != 4 or any(one is None or one.kind not in ("SLICE", "STRIDED_SLICE") for one in slices):
        return None
    cuts = [one for one in slices if one is not None]
    image, begins = cuts[0].input(0), [[int(v) for v in one.input(1).values] for one in cuts]
    strides = [[int(v) for v in one.input(3).values] if one.kind == "STRIDED_SLICE" else [1] * 4 for one in cuts]
    height, width = (max(begin[dim] for begin in begins) + 1 for dim in (1, 2))
    raster = [[0, dy, dx, 0] for dy in range(height) for dx in range(width)]
    if begins != raster or any(one.input(0) is not image for one in cuts) or any(s != strides[0] for s in strides):
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


def _flat_parts(found: Found, op: Op) -> list[Tensor]:
    """The parts of a concatenation along the last dim, those of concatenations inside it among them."""
    if op.options["axis"] != len(op.output.shape) - 1:
        return [op.output]
    parts: list[Tensor] = []
    for tensor in op.tensors_in:
        maker = found.makers.get(tensor)
        inner = maker is not None and maker.kind == "CONCATENATION"
        parts += _flat_parts(found, maker) if inner and maker is not None else [tensor]
    return parts


def _index(found: Found) -> list[Op] | None:
    """NumPy's negative indices count from the end; an index that a model computes does not."""
    if not np.all(found["zero"].values == 0):
        return None
    return [_again(found.op, [found["table"], found["i"]], found.op.output)]


def _index_reshaped(found: Found) -> list[Op] | None:
    flat = found.ops["flat"]
    if not np.all(found["zero"].values == 0):
        return None
    rows = replace(flat.output, name=flat.output.name + "_i")
    return [
        _again(flat, [found["i"], flat.inputs[1]], rows),
        _again(found.op, [found["table"], rows], found.op.output),
    ]


# --- the tables -----------------------------------------------------------------------------------------------------

_HALF, _ROOT_HALF = 0.5, math.sqrt(0.5)
_WRAP = node("SELECT_V2", node("LESS", "i", Const("zero")), node("ADD", "i", Const()), "i")
_CUBE = node("MUL", "x", node("SQUARE", "x"))
_TANH_GATE = node("TANH", node("MUL", node("ADD", "x", node("MUL", _CUBE, Const(number=0.044715))),
                               Const(number=math.sqrt(2 / math.pi))))  # fmt: skip
_ERF_GATE = node("ERF", node("MUL", "x", Const(number=_ROOT_HALF)))
_BELOW = node("MUL", "x", Const("a"))
_POSITIVE = node("GREATER|GREATER_EQUAL", "x", Const(number=0.0))
_SHIFTED6 = node("RELU6", node("ADD", "x", Const(number=3.0)))
_EXP = node("EXP", node("SUB", "x", node("REDUCE_MAX", "x", Const("axes"))), name="exp")
_PAD = node("PAD", "x", Const("widths"))

TIDY: list[Rule] = [
    Rule("divide by a constant", node("DIV", "x", Const("c")), _division),
    Rule("subtract a constant", node("SUB", "x", Const("c")), _difference),
    Rule("product of products", node("MUL", node("MUL", "x", Const("c")), Const("d")), _two_constants("MUL")),
    Rule("sum of sums", node("ADD", node("ADD", "x", Const("c")), Const("d")), _two_constants("ADD")),
    Rule("times one", node("MUL", "x", Const("c")), _identity(1.0)),
    Rule("plus zero", node("ADD", "x", Const("c")), _identity(0.0)),
    Rule("NaN is not equal to itself", node("SELECT_V2", node("NOT_EQUAL", "x", "x"), "a", "b"), lambda f: f["b"]
         if f["b"].shape == f.op.output.shape else None),
    Rule("x / sqrt(v)", node("DIV", "x", node("SQRT", "v"), name="div"), lambda f: _over_root(f)),
    *(Rule("broadcast in " + kind, node(kind, *operands), _without_broadcast)
      for kind in ("ADD", "SUB", "MUL", "DIV", "MAXIMUM", "MINIMUM", "EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL",
                   "GREATER", "GREATER_EQUAL")
      for operands in ((node("BROADCAST_TO", "x", name="wide"),), ("y", node("BROADCAST_TO", "x", name="wide")))),
    Rule("index that may be negative", node("GATHER", "table", _WRAP), _index),
    Rule("index that may be negative, reshaped",
         node("GATHER", "table", node("RESHAPE", _WRAP, name="flat")), _index_reshaped),
    *LAYOUT,
]  # fmt: skip

RECOGNISE: list[Rule] = [
    Rule("relu6", node("MINIMUM", node("MAXIMUM", "x", Const("low")), Const("high")), _relu6),
    Rule("relu6, the other way", node("MAXIMUM", node("MINIMUM", "x", Const("high")), Const("low")), _relu6),
    Rule("relu", node("MAXIMUM", "x", Const(number=0.0)), lambda f: None if f["x"].dtype != "float32" else
         [new("RELU", [f["x"]], f.op.output, f.op.source)]),
    Rule("relu6 of relu", node("MINIMUM", node("RELU", "x"), Const(number=6.0)), _to("RELU6", "x")),
    Rule("leaky relu", node("SELECT_V2", _POSITIVE, "x", _BELOW), _leaky),
    Rule("leaky relu as a maximum", node("MAXIMUM", "x", _BELOW), _leaky),
    Rule("elu", node("SELECT_V2", _POSITIVE, "x", node("EXPM1", node("SELECT_V2", _POSITIVE, Const(number=0.0), "x"))),
         _to("ELU", "x")),
    Rule("hard swish", node("MUL", "x", node("MUL", _SHIFTED6, Const(number=1 / 6))), _to("HARD_SWISH", "x")),
    Rule("hard swish, later", node("MUL", node("MUL", "x", _SHIFTED6), Const(number=1 / 6)), _to("HARD_SWISH", "x")),
    Rule("gelu by erfc", node("MUL", node("MUL", "x", Const(number=_HALF)),
                              node("ERFC", node("MUL", "x", Const(number=-_ROOT_HALF)))),
         _to("GELU", "x", approximate=False)),
    *(Rule(f"gelu by {name}, {where}", pattern, _to("GELU", "x", approximate=name == "tanh"))
      for name, gate in (("tanh", _TANH_GATE), ("erf", _ERF_GATE))
      for where, pattern in {
          "half inside": node("MUL", "x", node("MUL", node("ADD", gate, Const(number=1.0)), Const(number=_HALF))),
          "half first": node("MUL", node("MUL", "x", Const(number=_HALF)), node("ADD", gate, Const(number=1.0))),
          "half last": node("MUL", node("MUL", "x", node("ADD", gate, Const(number=1.0))), Const(number=_HALF)),
      }.items()),
    Rule("softplus", node("ADD", node("RELU", "x"),
                          node("LOG1P", node("EXP", node("MUL", node("ABS", "x"), Const(number=-1.0))))),
         _to("SOFTPLUS", "x")),
    Rule("logistic", node("DIV", Const(number=1.0),
                          node("ADD", node("EXP", node("MUL", "x", Const(number=-1.0))), Const(number=1.0))),
         _to("LOGISTIC", "x")),
    Rule("softmax", node("DIV", _EXP, node("SUM", _EXP, Const("axes2"))), _softmax("SOFTMAX")),
    Rule("softmax without a maximum", node("DIV", node("EXP", "x", name="exp"),
                                           node("SUM", node("EXP", "x", name="exp"), Const("axes"))),
         _softmax("SOFTMAX")),
    Rule("softmax of a multiple", node("SOFTMAX", node("MUL", "x", Const("c"))), _beta),
    Rule("log softmax", node("SUB", node("SUB", "x", node("REDUCE_MAX", "x", Const("axes"))),
                             node("LOG", node("SUM", _EXP, Const("axes2")))), _softmax("LOG_SOFTMAX")),
    Rule("mean", node("MUL", node("SUM", "x", Const("axes"), name="sum"), Const("c")), _mean),
    Rule("squares are not below zero", node("RELU", node("MEAN|SUM", node("SQUARE", "x"))), lambda f: f.op.input(0)),
    Rule("variance", node("SUB", node("MEAN", node("SQUARE", "x"), Const("axes"), name="squares"),
                          node("SQUARE", node("MEAN", "x", Const("axes2"), name="mean"))), _centred_variance),
    Rule("average without the padding", node("MUL", node("AVERAGE_POOL_2D", _PAD, name="pool"), Const("c")),
         _average_of_inside),
    *TIDY,
]  # fmt: skip

FOLD: list[Rule] = [
    Rule("scale into weights", node("MUL", node(WEIGHTED, once=True, name="w"), Const("c")), _fold_scale),
    Rule("sum into bias", node("ADD", node(WEIGHTED, once=True, name="w"), Const("c")), _fold_bias),
    Rule("scale of the input into weights",
         node("CONV_2D|DEPTHWISE_CONV_2D|FULLY_CONNECTED", node("MUL", "x", Const("c"), once=True)), _fold_input_scale),
    Rule("normalisation as product and sum", node("MUL", node("ADD", "x", Const("a"), once=True), Const("m")),
         _distribute),
    Rule("patches into convolution", node("FULLY_CONNECTED", node("CONCATENATION", name="cat")),
         _convolution_of_patches),
    Rule("padding into convolution", node("CONV_2D|DEPTHWISE_CONV_2D", _PAD), _fold_padding),
]  # fmt: skip

FINISH: list[Rule] = [
    Rule("activation into operator", node("RELU|RELU6|RELU_N1_TO_1", node(FUSING, once=True, name="w")), _fuse),
    Rule("reduction drops dims", node("RESHAPE", node("MEAN|SUM|REDUCE_MAX|REDUCE_MIN", "x", Const("axes"), once=True,
                                                      name="reduce")), _reduce_reshape),
]  # fmt: skip


def _over_root(found: Found) -> list[Op]:
    root = Tensor(found["v"].name + "_rsqrt", found["v"].shape)
    inverse = new("RSQRT", [found["v"]], root, found.op.source)
    return [inverse, new("MUL", [found["x"], root], found.op.output, found.op.source)]
