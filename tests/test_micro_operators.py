"""Operator by operator: the C runtime against TensorFlow Lite Micro's reference kernels, bit for bit in integers."""

import itertools
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multipod.errors import MicroError
from multipod.micro import Interpreter
from multipod.micro.schema import NUMBERS

pytest.importorskip("flatbuffers")
pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro's wheel is not installed")
from tflite_models import Graph, Op, Tensor, build
from tflite_operators import Case, biases, check, operator, quantised, same_as_tflm, weights, whole

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def convolutions() -> Iterator[Case]:
    """Shapes, strides, dilations, paddings, activations, scales for each channel or for all, int4."""
    table = [  # name, input, filter height and width, channels out, stride, dilation, padding, activation, multiplier
        ("plain", [2, 7, 6, 3], (3, 3), 4, 1, 1, 0, 0), ("strided", [1, 8, 9, 5], (3, 2), 3, 2, 1, 0, 1),
        ("valid", [1, 9, 7, 2], (4, 3), 5, 2, 1, 1, 3), ("dilated", [1, 9, 9, 3], (3, 3), 2, 1, 2, 0, 0),
        ("pointwise", [2, 3, 5, 9], (1, 1), 7, 1, 1, 0, 3), ("pointwise-odd", [1, 3, 3, 6], (1, 1), 1, 1, 1, 1, 2),
        ("strided-pointwise", [1, 5, 5, 4], (1, 1), 6, 2, 1, 0, 0), ("tall", [1, 12, 1, 1], (10, 1), 8, 2, 1, 0, 1),
    ]  # fmt: skip
    for (label, shape, (h, w), channels, stride, dilation, padding, activation), dtype in itertools.product(
        table, ("int8", "float32", "int16")
    ):
        for depthwise in (False, True):
            yield f"{'depthwise' if depthwise else 'conv'}-{label}-{dtype}", lambda a=(
                shape, h, w, channels, stride, dilation, padding, activation, dtype, depthwise, 8
            ): convolution(*a)  # fmt: skip
    for depthwise in (False, True):
        yield f"int4-{depthwise}", lambda d=depthwise: convolution([1, 6, 5, 3], 3, 3, 4, 1, 1, 0, 0, "int8", d, 4)


def convolution(
    shape: list[int], h: int, w: int, channels: int, stride: int, dilation: int, padding: int, activation: int,
    dtype: str, depthwise: bool, bits: int,
) -> tuple[bytes, list[Tensor]]:  # fmt: skip
    rng = np.random.default_rng(1)
    if depthwise:
        channels = shape[3] * (1 if shape[3] > 1 else channels)
    sizes = [
        -(-size // stride) if padding == 0 else (size - (taps - 1) * dilation - 1 + stride) // stride
        for size, taps in zip(shape[1:3], (h, w), strict=True)
    ]
    filter_shape = [1, h, w, channels] if depthwise else [channels, h, w, shape[3]]
    tensors = [
        quantised(shape, dtype),
        weights(rng, filter_shape, dtype, 3 if depthwise else 0, bits),
        biases(rng, channels, dtype),
        quantised([shape[0], *sizes, channels], dtype, 0.05, -9),
    ]
    options = {"padding": padding, "stride_w": stride, "stride_h": stride, "fused_activation_function": activation}
    options |= {"dilation_w_factor": dilation, "dilation_h_factor": dilation}
    if depthwise:
        options["depth_multiplier"] = channels // shape[3]
    return operator("DEPTHWISE_CONV_2D" if depthwise else "CONV_2D", tensors, [0], **options), tensors[:1]


def dense() -> Iterator[Case]:
    for dtype, batch, channels, per_channel, bits, activation in [
        ("int8", 1, 9, False, 8, 0), ("int8", 3, 4, True, 8, 1), ("int8", 2, 5, False, 4, 3),
        ("int16", 2, 5, False, 8, 0), ("int16", 1, 6, True, 8, 1), ("float32", 3, 7, False, 8, 3),
    ]:  # fmt: skip

        def made(a: tuple = (dtype, batch, channels, per_channel, bits, activation)) -> tuple[bytes, list[Tensor]]:
            dtype, batch, channels, per_channel, bits, activation = a
            rng = np.random.default_rng(2)
            tensors = [
                quantised([batch, 11], dtype, 0.03, -7),
                weights(rng, [channels, 11], dtype, 0 if per_channel else None, bits),
                biases(rng, channels, dtype),
                quantised([batch, channels], dtype, 0.06, 3),
            ]
            return operator("FULLY_CONNECTED", tensors, [0], fused_activation_function=activation), tensors[:1]

        yield f"dense-{dtype}-{per_channel}-{bits}", made


def binaries() -> Iterator[Case]:
    shapes = [([2, 3, 4], [2, 3, 4]), ([2, 3, 4], [1, 3, 1]), ([2, 1, 4], [3, 1]), ([5], [1])]
    kinds = {
        "ADD": ("int8", "int16", "float32", "int32"), "SUB": ("int8", "int16", "float32"),
        "MUL": ("int8", "int16", "float32", "int32"), "DIV": ("float32",), "MAXIMUM": ("int8", "float32", "int32"),
        "MINIMUM": ("int8", "float32"), "SQUARED_DIFFERENCE": ("int8", "float32"), "FLOOR_DIV": ("float32",),
        "FLOOR_MOD": ("float32",), "EQUAL": ("int8", "float32", "int32"), "LESS": ("int8", "float32"),
        "GREATER_EQUAL": ("int32",), "NOT_EQUAL": ("bool",), "LOGICAL_AND": ("bool",), "LOGICAL_OR": ("bool",),
    }  # fmt: skip
    for name, types in kinds.items():
        for dtype, (k, (a, b)) in itertools.product(types, enumerate(shapes)):

            def made(x: tuple = (name, dtype, a, b, k)) -> tuple[bytes, list[Tensor]]:
                name, dtype, a, b, k = x
                common = dtype in ("int32", "bool")
                one = Tensor(a, dtype) if common else quantised(a, dtype, 0.03, 4)
                two = Tensor(b, dtype) if common else quantised(b, dtype, 0.03 if name == "MAXIMUM" else 0.011, 4)
                shape = np.broadcast_shapes(a, b)
                compares = NUMBERS[name] in (58, 61, 62, 63, 71, 72, 84, 86)
                out = (
                    Tensor(shape, "bool")
                    if compares
                    else Tensor(shape, dtype)
                    if common
                    else quantised(shape, dtype, 0.05, -3)
                )
                if name == "MAXIMUM" or name == "MINIMUM":
                    two = one if a == b else Tensor(b, one.dtype, one.scales, one.zero)
                    out = Tensor(shape, one.dtype, one.scales, one.zero)
                # TFLM forgets the activation of an int32 ADD that spreads its inputs; ours has it
                options = (
                    {"fused_activation_function": k % 2 * (not common)} if name in ("ADD", "SUB", "MUL", "DIV") else {}
                )
                if name in ("ADD", "SUB") and dtype == "int16":
                    options["pot_scale_int16"] = 0
                return operator(name, [one, two, out], [0, 1], **options), [one, two]

            yield f"{name}-{dtype}-{k}", made


def unaries() -> Iterator[Case]:
    table = {
        "RELU": ("int8", "int16", "float32"), "RELU6": ("int8", "float32"), "LEAKY_RELU": ("int8", "int16", "float32"),
        "LOGISTIC": ("int8", "int16", "float32"), "TANH": ("int8", "int16", "float32"), "ABS": ("float32",),
        "NEG": ("float32",), "SIN": ("float32",), "COS": ("float32",), "EXP": ("float32",), "SQUARE": ("float32",),
        "CEIL": ("float32",), "FLOOR": ("float32",), "ROUND": ("float32",), "HARD_SWISH": ("float32",),
        "ELU": ("float32",), "LOGICAL_NOT": ("bool",), "SOFTMAX": ("int8", "float32"), "L2_NORMALIZATION": ("float32",),
        "LOG_SOFTMAX": ("float32",),
    }  # fmt: skip
    for name, types in table.items():
        for dtype in types:

            def made(x: tuple = (name, dtype)) -> tuple[bytes, list[Tensor]]:
                name, dtype = x
                one, out = quantised([2, 3, 7], dtype, 0.04, 11), quantised([2, 3, 7], dtype, 0.03, -20)
                if dtype == "bool":
                    one = out = Tensor([2, 3, 7], "bool")
                if name in ("LOGISTIC", "SOFTMAX") and dtype == "int8":
                    out = quantised([2, 3, 7], dtype, 1 / 256, -128)
                if name == "TANH" and dtype == "int8":
                    out = quantised([2, 3, 7], dtype, 1 / 128, 0)
                if name in ("LOGISTIC", "TANH") and dtype == "int16":
                    one, out = quantised([2, 3, 7], dtype, 0.0003), quantised([2, 3, 7], dtype, 1 / 32768)
                if name == "RELU6":
                    out = Tensor(out.shape, dtype, one.scales, one.zero)
                options = {"SOFTMAX": {"beta": 1.0}, "LEAKY_RELU": {"alpha": 0.15}}.get(name, {})
                return operator(name, [one, out], [0], **options), [one]

            yield f"{name}-{dtype}", made


def movers() -> Iterator[Case]:
    """Operators that only move elements; the tensor's numbers are all different."""

    def of(name: str, tensors: list[Tensor], inputs: list[int], outputs: int = 1, **options: Any) -> Case:
        return name, lambda: (operator(name, tensors, inputs, outputs, **options), [tensors[k] for k in inputs])

    q = quantised
    yield of(
        "PAD",
        [q([2, 3, 4]), Tensor([3, 2], "int32", data=np.array([[1, 0], [2, 1], [0, 3]], np.int32)), q([3, 6, 7])],
        [0],
    )
    yield of("PADV2", [Tensor([2, 3]), Tensor([2, 2], "int32", data=np.array([[1, 0], [2, 1]], np.int32)),
                       Tensor([1], data=np.array([7.5], np.float32)), Tensor([3, 6])], [0])  # fmt: skip
    yield of("TRANSPOSE", [q([2, 3, 4, 5]), whole(0, 3, 1, 2), q([2, 5, 3, 4])], [0])
    yield of("CONCATENATION", [q([2, 3, 4]), q([2, 1, 4]), q([2, 4, 4])], [0, 1], axis=1)
    yield of(
        "STRIDED_SLICE", [Tensor([4, 5, 6]), whole(1, -1, 0), whole(4, 0, 6), whole(2, -1, 3), Tensor([2, 4, 2])], [0]
    )
    yield of("STRIDED_SLICE", [Tensor([4, 5]), whole(0, 2), whole(0, 3), whole(1, 1), Tensor([4])], [0],
             begin_mask=1, end_mask=1, shrink_axis_mask=2)  # fmt: skip
    yield of("SLICE", [Tensor([4, 5], "int32"), whole(1, 2), whole(2, -1), Tensor([2, 3], "int32")], [0])
    yield of("SPLIT", [whole(1), Tensor([3, 4]), Tensor([3, 2]), Tensor([3, 2])], [1], 2, num_splits=2)
    yield of("SPLIT_V", [Tensor([3, 5]), whole(1, 4), whole(1), Tensor([3, 1]), Tensor([3, 4])], [0], 2, num_splits=2)
    yield of("PACK", [Tensor([3, 4]), Tensor([3, 4]), Tensor([3, 2, 4])], [0, 1], values_count=2, axis=1)
    yield of("UNPACK", [Tensor([3, 2, 4]), Tensor([3, 4]), Tensor([3, 4])], [0], 2, num=2, axis=1)
    yield of("REVERSE_V2", [Tensor([3, 4, 2], "int32"), whole(1), Tensor([3, 4, 2], "int32")], [0])
    yield of("BROADCAST_TO", [Tensor([3, 1]), whole(2, 3, 4), Tensor([2, 3, 4])], [0])
    yield of("SPACE_TO_DEPTH", [Tensor([2, 4, 6, 3]), Tensor([2, 2, 3, 12])], [0], block_size=2)
    yield of("DEPTH_TO_SPACE", [Tensor([2, 2, 3, 12]), Tensor([2, 4, 6, 3])], [0], block_size=2)
    yield of(
        "MIRROR_PAD",
        [Tensor([3, 4]), Tensor([2, 2], "int32", data=np.array([[1, 2], [2, 1]], np.int32)), Tensor([6, 7])],
        [0],
        mode=0,
    )
    yield of(
        "MIRROR_PAD",
        [Tensor([3, 4]), Tensor([2, 2], "int32", data=np.array([[3, 0], [1, 4]], np.int32)), Tensor([6, 9])],
        [0],
        mode=1,
    )
    yield of("EXPAND_DIMS", [Tensor([3, 4]), whole(1), Tensor([3, 1, 4])], [0])
    yield of("SQUEEZE", [Tensor([3, 1, 4]), Tensor([3, 4])], [0])


def reductions() -> Iterator[Case]:
    for name, dtype in [("MEAN", "int8"), ("MEAN", "int16"), ("MEAN", "float32"), ("SUM", "int8"), ("SUM", "float32"),
                        ("REDUCE_MAX", "int8"), ("REDUCE_MIN", "float32")]:  # fmt: skip
        for k, (axes, shape) in enumerate([((1, 2), [2, 5]), ((-1,), [2, 3, 4]), ((0, 3), [3, 4])]):

            def made(x: tuple = (name, dtype, axes, shape)) -> tuple[bytes, list[Tensor]]:
                name, dtype, axes, shape = x
                scale, zero = (0.02, 5) if name.startswith("REDUCE") else (0.03, -4)
                tensors = [quantised([2, 3, 4, 5], dtype), whole(*axes), quantised(shape, dtype, scale, zero)]
                return operator(name, tensors, [0], keep_dims=0), tensors[:1]

            yield f"{name}-{dtype}-{k}", made
    for name in ("ARG_MAX", "ARG_MIN"):
        yield (
            name,
            lambda n=name: (
                operator(n, [Tensor([3, 5]), whole(1), Tensor([3], "int32")], [0], output_type=2),
                [Tensor([3, 5])],
            ),
        )


def pools_and_types() -> Iterator[Case]:
    for name, dtype in itertools.product(("AVERAGE_POOL_2D", "MAX_POOL_2D"), ("int8", "int16", "float32")):
        for padding in (0, 1):

            def made(x: tuple = (name, dtype, padding)) -> tuple[bytes, list[Tensor]]:
                name, dtype, padding = x
                shape = [2, 4, 3, 3] if padding == 0 else [2, 3, 2, 3]
                tensors = [quantised([2, 7, 6, 3], dtype), quantised(shape, dtype)]
                options = {"padding": padding, "stride_w": 2, "stride_h": 2, "filter_width": 3, "filter_height": 2}
                return operator(name, tensors, [0], **options, fused_activation_function=1), tensors[:1]

            yield f"{name}-{dtype}-{padding}", made
    for a, b in [("int8", "int8"), ("int16", "int8"), ("int8", "int16"), ("float32", "int8"), ("float32", "int16")]:
        one, out = quantised([3, 8], a, 0.03, 4), quantised([3, 8], b, 0.021, -6)
        yield f"QUANTIZE-{a}-{b}", lambda x=(one, out): (operator("QUANTIZE", [*x], [0]), [x[0]])
    for a in ("int8", "int16"):
        yield (
            f"DEQUANTIZE-{a}",
            lambda dtype=a: (
                operator("DEQUANTIZE", [quantised([3, 8], dtype), Tensor([3, 8])], [0]),
                [quantised([3, 8], dtype)],
            ),
        )


def choosers() -> Iterator[Case]:
    """CAST, GATHER, SELECT_V2 and BATCH_MATMUL."""
    for a, b in [("int8", "float32"), ("float32", "int32"), ("int32", "int8"), ("bool", "float32"), ("int16", "int32")]:
        yield (
            f"CAST-{a}-{b}",
            lambda x=a, y=b: (operator("CAST", [Tensor([3, 4], x), Tensor([3, 4], y)], [0]), [Tensor([3, 4], x)]),
        )
    for axis, shape in [(0, [2, 4, 5]), (1, [3, 2, 5])]:

        def gathered(x: tuple = (axis, shape)) -> tuple[bytes, list[Tensor]]:
            one = Tensor([3, 4, 5])
            return operator("GATHER", [one, whole(2, 0), Tensor(x[1])], [0], axis=x[0], batch_dims=0), [one]

        yield f"GATHER-{axis}", gathered

    def selected() -> tuple[bytes, list[Tensor]]:
        given = [Tensor([2, 3], "bool"), Tensor([2, 3]), Tensor([1, 3])]
        return operator("SELECT_V2", [*given, Tensor([2, 3])], [0, 1, 2]), given

    yield "SELECT_V2", selected
    for dtype, turn_a, turn_b in itertools.product(("int8", "float32"), (0, 1), (0, 1)):

        def multiplied(x: tuple = (dtype, turn_a, turn_b)) -> tuple[bytes, list[Tensor]]:
            dtype, turn_a, turn_b = x
            one = quantised([2, 4, 3] if turn_a else [2, 3, 4], dtype, 0.03, 5)
            two = quantised([2, 5, 4] if turn_b else [2, 4, 5], dtype, 0.02, -4)
            out = quantised([2, 3, 5], dtype, 0.1, 2)
            return operator("BATCH_MATMUL", [one, two, out], [0, 1], adj_x=turn_a, adj_y=turn_b), [one, two]

        yield f"BATCH_MATMUL-{dtype}-{turn_a}-{turn_b}", multiplied


def transposed() -> Iterator[Case]:
    """TRANSPOSE_CONV; the output's shape is its first input."""
    for dtype, padding in itertools.product(("int8", "float32"), (0, 1)):

        def made(x: tuple = (dtype, padding)) -> tuple[bytes, list[Tensor]]:
            dtype, padding = x
            rng = np.random.default_rng(4)
            size = 8 if padding == 0 else 9
            tensors = [
                whole(2, size, size, 3), weights(rng, [3, 3, 3, 5], dtype, 0), quantised([2, 4, 4, 5], dtype),
                biases(rng, 3, dtype), quantised([2, size, size, 3], dtype, 0.05, -9),
            ]  # fmt: skip
            options = {"padding": padding, "stride_w": 2, "stride_h": 2}
            return operator("TRANSPOSE_CONV", tensors, [2], **options), [tensors[2]]

        yield f"TRANSPOSE_CONV-{dtype}-{padding}", made


FAMILIES = {
    "convolutions": convolutions, "dense": dense, "binaries": binaries, "unaries": unaries, "movers": movers,
    "reductions": reductions, "pools": pools_and_types, "choosers": choosers, "transposed": transposed,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_tflm(family, capfd):
    check(FAMILIES[family]())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("RELU", "int16"), ("ABS", "int16"), ("SUB", "int16"), ("SUB", "int8"), ("RELU", "int8"), ("HARD_SWISH", "int8")],
)
def test_multipliers_of_random_scales_are_those_of_tflm(name, dtype):
    """20 triples of scales, 2,000 numbers each: a multiplier that is off in its last bits shows in int16."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        scale = float(rng.uniform(0.005, 0.05))
        shape, binary = [1, 2000], name == "SUB"
        scales = [scale] + [scale * float(rng.uniform(0.5, 2))] * binary + [scale * float(rng.uniform(0.8, 3))]
        tensors = [quantised(shape, dtype, one, int(rng.integers(-20, 20))) for one in scales]
        options = {"pot_scale_int16": False} if binary else {}
        given = [*range(len(tensors) - 1)]
        same_as_tflm(operator(name, tensors, given, **options), [tensors[k] for k in given], rounds=1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("LEAKY_RELU", "int8"), ("LEAKY_RELU", "int16"), ("RSQRT", "int8"), ("HARD_SWISH", "int8"),
     ("FULLY_CONNECTED", "int8"), ("MIRROR_PAD", "int8")],
)  # fmt: skip
def test_what_tflm_takes_is_taken(name, dtype):
    """Random scales over six powers of ten, slopes below zero, zero points of weights, five dims: 20 models each."""
    rng = np.random.default_rng(11)
    for _ in range(20):
        one, two = (float(10 ** rng.uniform(-4, -1)) for _ in range(2))
        zero = int(rng.integers(-100, 100))
        tensors, options = [quantised([1, 1000], dtype, one, zero), quantised([1, 1000], dtype, two, 3)], {}
        if name == "LEAKY_RELU":
            options = {"alpha": float(rng.uniform(-4, 0))}
        elif name == "RSQRT":  # whose input must not be below zero
            tensors = [quantised([1, 1000], dtype, one, -128), quantised([1, 1000], dtype, two * 1e-2, zero)]
        elif name == "HARD_SWISH":
            tensors = [quantised([1, 1000], dtype, one, zero), quantised([1, 1000], dtype, one * 1e3 * two, 3)]
        elif name == "FULLY_CONNECTED":
            filters = rng.integers(-128, 128, (9, 30)).astype(np.int8)
            filtered = [Tensor([9, 30], "int8", [0.01], zero, filters), biases(rng, 9, "int8")]
            tensors = [quantised([7, 30], scale=0.02), *filtered, quantised([7, 9], scale=0.3)]
        elif name == "MIRROR_PAD":
            shape, pads = [3, 2, 4, 2, 3], np.array([[1, 2], [0, 1], [2, 0], [1, 1], [0, 2]], np.int32)
            padded = [size + sum(pad) for size, pad in zip(shape, pads.tolist(), strict=True)]
            tensors = [quantised(shape), Tensor([5, 2], "int32", data=pads), quantised(padded)]
            options = {"mode": 0}
        same_as_tflm(operator(name, tensors, [0], **options), tensors[:1], rounds=1)


def test_wide_biases_may_lie_at_multiples_of_four(monkeypatch):
    """A flatbuffer aligns its vectors to no more, and five of TFLM's own models have them so."""
    rng = np.random.default_rng(2)
    tensors = [
        quantised([2, 11], "int16", 0.03), weights(rng, [5, 11], "int16", 0), biases(rng, 5, "int16"),
        quantised([2, 5], "int16", 0.06),
    ]  # fmt: skip
    content = tensors[2].data.tobytes()

    def four(b, data: bytes) -> int:
        b.StartVector(1, len(data), 4)
        b.head -= len(data)
        b.Bytes[b.head : b.head + len(data)] = data
        return b.EndVector()

    monkeypatch.setattr("tflite_models._data", four)
    found = set()
    for name in ("a", "four"):  # 4 bytes more, which moves what lies behind them
        op = Op(NUMBERS["FULLY_CONNECTED"], [0, 1, 2], [3], [(0, "b", 0)], 8)
        model = build(Graph(tensors, [op], [0], [3], {name: b"1234"}))
        found.add(model.find(content) % 8)
        same_as_tflm(model, tensors[:1])
    assert found == {0, 4}


def test_an_operator_that_is_not_known_is_named_before_its_tensors():
    """An operator of Ethos-U has scratch memory among its inputs, which nothing writes."""
    tensors = [quantised([1, 8]), quantised([1, 64]), quantised([1, 8])]
    model = build(Graph(tensors, [Op(32, [0, 1], [2], custom="ethos-u")], [0], [2]))
    with pytest.raises(MicroError, match="ethos-u") as refused:
        Interpreter(model)
    assert "before it is written" not in str(refused.value)


def test_a_kernel_that_asks_for_scratch_late_is_counted():
    """A convolution of a variable that is larger than all else, so that starting takes more memory than running."""
    rng, options = np.random.default_rng(0), {"padding": 1, "stride_w": 1, "stride_h": 1, "depth_multiplier": 1}
    for side in range(2, 13):
        state = Tensor([1, side, side, 1], "int8", [0.02], 0, variable=True)
        tensors = [state, weights(rng, state.shape, "int8", None), quantised([1, 1, 1, 1])]
        model = operator("DEPTHWISE_CONV_2D", tensors, [], **options)
        needed = Interpreter(model).arena_bytes
        np.testing.assert_array_equal(Interpreter(model, needed).run()[0], [[[[5]]]])
        with pytest.raises(MicroError, match=f"{needed:,}"):
            Interpreter(model, needed - 1)


def test_a_loop_ends_at_its_limit():
    one = Tensor([1], data=np.array([1.0], np.float32))
    test = Graph([Tensor([1]), one, Tensor([1], "bool")], [Op(NUMBERS["GREATER"], [0, 1], [2])], [0], [2])
    body = Graph([Tensor([1]), one, Tensor([1])], [Op(NUMBERS["SUB"], [0, 1], [2], [(0, "b", 0)], 28)], [0], [2])
    options = [(0, "i", 1), (1, "i", 2)]
    loop = Graph([Tensor([1]), Tensor([1])], [Op(NUMBERS["WHILE"], [0], [1], options, 93)], [0], [1])
    limited = Interpreter(build(loop, test, body), most_rounds=9)
    for _ in range(2):  # of each run
        np.testing.assert_array_equal(limited.run(np.array([10.0], np.float32))[0], [1.0])
        with pytest.raises(MicroError, match=r"op 0 \(WHILE\): WHILE has done as many rounds as it may"):
            limited.run(np.array([11.0], np.float32))


def test_a_saturated_bias_keeps_its_sign():
    """Rounding after the multiplication must not leave int32: 2147483637 * 2^-26 is 32, not -32."""
    scale = 0.99895 * 2.0**-26 * 0.05 / 0.02
    tensors = [
        quantised([1, 4], scale=0.02), Tensor([2, 4], "int8", [scale], 0, np.zeros((2, 4), np.int8)),
        Tensor([2], "int32", [0.02 * scale], 0, np.array([2147483637, -2147483637], np.int32)),
        quantised([1, 2], scale=0.05, zero=0),
    ]  # fmt: skip
    model = operator("FULLY_CONNECTED", tensors, [0])
    same_as_tflm(model, [tensors[0]])
    np.testing.assert_array_equal(Interpreter(model).run(np.zeros((1, 4), np.int8))[0], [[32, -32]])


def test_branches_and_loops():
    """IF adds or multiplies; WHILE doubles until a bound; both with subgraphs of their own, as TFLM runs them."""
    pair = [Tensor([3]), Tensor([3]), Tensor([3])]
    add = Graph(pair, [Op(NUMBERS["ADD"], [0, 1], [2], [(0, "b", 0)], 11)], [0, 1], [2])
    times = Graph(pair, [Op(NUMBERS["MUL"], [0, 1], [2], [(0, "b", 0)], 21)], [0, 1], [2])
    options = [(0, "i", 1), (1, "i", 2)]
    main = Graph([Tensor([1], "bool"), *pair], [Op(NUMBERS["IF"], [0, 1, 2], [3], options, 92)], [0, 1, 2], [3])
    same_as_tflm(build(main, add, times), [main.tensors[0], *pair[:2]], rounds=4)

    bound = Tensor([1], data=np.array([100.0], np.float32))
    test = Graph([Tensor([1]), bound, Tensor([1], "bool")], [Op(NUMBERS["LESS"], [0, 1], [2])], [0], [2])
    body = Graph([Tensor([1]), Tensor([1])], [Op(NUMBERS["ADD"], [0, 0], [1], [(0, "b", 0)], 11)], [0], [1])
    loop = Graph([Tensor([1]), Tensor([1])], [Op(NUMBERS["WHILE"], [0], [1], options, 93)], [0], [1])
    interpreter = Interpreter(build(loop, test, body))
    np.testing.assert_array_equal(interpreter.run(np.array([3.0], np.float32))[0], [192.0])
    np.testing.assert_array_equal(interpreter.run(np.array([101.0], np.float32))[0], [101.0])


def test_an_index_out_of_range_is_refused_while_running():
    model = operator("GATHER", [Tensor([3]), Tensor([2], "int32"), Tensor([2])], [0, 1], axis=0, batch_dims=0)
    x = np.arange(3, dtype=np.float32)
    with pytest.raises(MicroError, match=r"^op 0 \(GATHER\): an index is out of range\. Look at the indices"):
        Interpreter(model).run(x, np.array([0, 3], np.int32))
