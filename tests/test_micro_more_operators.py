"""The operators that TFLM's own models do not use: the C runtime against TFLM's reference kernels, bit for bit."""

import ctypes
import itertools
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multipod.micro import Interpreter, library
from multipod.micro.operators.table import OPERATORS
from multipod.micro.schema import NUMBERS

pytest.importorskip("flatbuffers")
pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro's wheel is not installed")
from tflite_models import Graph, Op, Tensor, build
from tflite_operators import Case, biases, check, operator, quantised, weights, whole

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def case(label: str, name: str, tensors: list[Tensor], inputs: list[int], outputs: int = 1, **options: Any) -> Case:
    """A case of one operator; those of `inputs` get numbers by chance."""
    return label, lambda: (operator(name, tensors, inputs, outputs, **options), [tensors[k] for k in inputs])


def table(rows: list[list[int]]) -> Tensor:
    return Tensor([len(rows), len(rows[0])], "int32", data=np.array(rows, np.int32))


def sums() -> Iterator[Case]:
    for dtype, count in itertools.product(("float32", "int8"), (2, 4)):
        one = quantised([2, 5], dtype, 0.03, 4)
        yield case(
            f"ADD_N-{dtype}-{count}", "ADD_N", [one] * count + [quantised([2, 5], dtype, 0.09, -7)], [*range(count)]
        )
    for dtype, axis, exclusive, reverse in itertools.product(("float32", "int8"), (0, -1, 1), (0, 1), (0, 1)):
        tensors = [quantised([3, 4, 5], dtype, 0.03, 4), whole(axis), quantised([3, 4, 5], dtype, 0.11, -7)]
        yield case(
            f"CUMSUM-{dtype}-{axis}-{exclusive}-{reverse}", "CUMSUM", tensors, [0], exclusive=exclusive, reverse=reverse
        )


def fills() -> Iterator[Case]:
    for dtype in ("float32", "int32", "int8"):
        yield case(f"FILL-{dtype}", "FILL", [whole(2, 3), Tensor([], dtype), Tensor([2, 3], dtype)], [1])
    for dtype in ("float32", "int32", "int64", "int8"):
        yield case(f"ZEROS_LIKE-{dtype}", "ZEROS_LIKE", [Tensor([2, 3], dtype), Tensor([2, 3], dtype)], [0])
    yield case("SHAPE", "SHAPE", [Tensor([3, 1, 4]), Tensor([3], "int32")], [0], out_type=2)


def lookups() -> Iterator[Case]:
    for dtype in ("float32", "int8"):
        for indices in ([[1, 2], [0, 0], [2, 3]], [[2], [0]], [[1, 3, 4], [0, 2, 1]]):
            shape = [len(indices), *[3, 4, 5][len(indices[0]) :]]
            yield case(
                f"GATHER_ND-{dtype}-{len(indices[0])}",
                "GATHER_ND",
                [Tensor([3, 4, 5], dtype), table(indices), Tensor(shape, dtype)],
                [0],
            )
    rng = np.random.default_rng(4)
    rows = {
        "float32": Tensor([6, 3], data=rng.normal(size=(6, 3)).astype(np.float32)),
        "int8": Tensor([6, 3], "int8", [0.03], 0, rng.integers(-128, 128, (6, 3)).astype(np.int8)),
    }
    for a, b in (("float32", "float32"), ("int8", "int8"), ("int8", "float32")):
        # an output comes last, so the ids are a constant: TFLM's own Python binding sets no int32 ids out of range
        yield case(
            f"EMBEDDING_LOOKUP-{a}-{b}",
            "EMBEDDING_LOOKUP",
            [whole(4, 0, 5, 4), rows[a], quantised([4, 3], b)],
            [],
        )
    for dtype, start in itertools.product(("float32", "int8", "int16", "int32"), ([1, 2], [-3, 9], [0, 0])):
        tensors = [Tensor([4, 5], dtype), Tensor([2, 3], dtype), whole(*start), Tensor([4, 5], dtype)]
        yield case(f"DYNAMIC_UPDATE_SLICE-{dtype}-{start}", "DYNAMIC_UPDATE_SLICE", tensors, [0, 1])
    yield case("whole", "DYNAMIC_UPDATE_SLICE", [Tensor([4, 5]), Tensor([4, 5]), whole(1, 2), Tensor([4, 5])], [0, 1])


def images() -> Iterator[Case]:
    for dtype in ("float32", "int8"):
        # what lies outside the image is left to chance by TFLM's int8 kernel: see the test below
        pads, wide, line = ([[0, 0], [1, 2]], 6, [[1, 2]]) if dtype == "float32" else ([[0, 0], [0, 0]], 9, [[0, 0]])
        image, parts = quantised([2, 4, wide, 3], dtype), quantised([12, 2, 3, 3], dtype)
        yield case(f"image-{dtype}", "SPACE_TO_BATCH_ND", [image, whole(2, 3), table(pads), parts], [0])
        row, cuts = quantised([4, wide, 3], dtype), quantised([12, 3, 3], dtype)
        yield case(f"line-{dtype}", "SPACE_TO_BATCH_ND", [row, whole(3), table(line), cuts], [0])
        image = quantised([2, 3, 6, 3], dtype)
        yield case(f"back-{dtype}", "BATCH_TO_SPACE_ND", [parts, whole(2, 3), table([[1, 0], [1, 2]]), image], [0])
        row = quantised([4, 6, 3], dtype)
        yield case(f"line-back-{dtype}", "BATCH_TO_SPACE_ND", [cuts, whole(3), table([[1, 2]]), row], [0])
    for size, (corners, half) in itertools.product(([7, 4], [2, 9], [1, 1]), ((0, 0), (1, 0), (0, 1))):
        for name, types in {
            "RESIZE_BILINEAR": ("float32", "int8"),
            "RESIZE_NEAREST_NEIGHBOR": ("float32", "int8", "int16"),
        }.items():
            for dtype in types:
                tensors = [quantised([2, 3, 5, 2], dtype), whole(*size), quantised([2, *size, 2], dtype)]
                options = {"align_corners": corners, "half_pixel_centers": half}
                yield case(f"{name}-{dtype}-{size}-{corners}{half}", name, tensors, [0], **options)


def activations() -> Iterator[Case]:
    rng = np.random.default_rng(6)
    for dtype, shape in itertools.product(("float32", "int8", "int16"), ([1, 1, 3], [2, 4, 3], [1])):
        numbers = rng.integers(-128, 128, shape).astype(np.int8)
        alpha = Tensor(shape, "int8", [0.01], 3, numbers)
        if dtype == "float32":
            alpha = Tensor(shape, data=(numbers / 128).astype(np.float32))
        tensors = [quantised([2, 4, 3], dtype, 0.04, 9), alpha, quantised([2, 4, 3], dtype, 0.03, -4)]
        yield case(f"PRELU-{dtype}-{shape}", "PRELU", tensors, [0])
    for name, scale, (out, zero) in [
        ("HARD_SWISH", 0.04, (0.03, -4)), ("HARD_SWISH", 0.3, (0.2, -100)), ("HARD_SWISH", 0.011, (0.01, 5)),
        ("ELU", 0.04, (0.03, -4)), ("ABS", 0.04, (0.04, -4)), ("ABS", 0.04, (0.03, -100)),
        ("LOG_SOFTMAX", 0.04, (1 / 16, 127)), ("LOG_SOFTMAX", 0.3, (1 / 16, 127)),
        ("L2_NORMALIZATION", 0.03, (1 / 128, 0)),
    ]:  # fmt: skip
        one = quantised([3, 100], "int8", scale, -9)
        options = {"fused_activation_function": 0} if name == "L2_NORMALIZATION" else {}
        yield case(f"{name}-int8-{scale}", name, [one, quantised([3, 100], "int8", out, zero)], [0], **options)
    yield case("ABS-int16", "ABS", [quantised([50], "int16", 0.01), quantised([50], "int16", 0.007)], [0])
    # numbers below the zero point are an error in both
    yield case("RSQRT-int8", "RSQRT", [quantised([90], "int8", 0.05, -128), quantised([90], "int8", 0.01, -128)], [0])
    for scale, beta in ((0.0003, 1.0), (0.002, 0.5)):
        tensors = [quantised([3, 50], "int16", scale), quantised([3, 50], "int16", 1 / 32768)]
        yield case(f"SOFTMAX-int16-{scale}", "SOFTMAX", tensors, [0], beta=beta)
    for dtype in ("int8", "int32"):
        for k, (a, b) in enumerate([([2, 60], [2, 60]), ([2, 60], [60]), ([1], [60])]):
            divisor = np.where(rng.integers(0, 2, b) == 0, rng.integers(-127, -4, b), rng.integers(5, 127, b))
            two = Tensor(b, dtype, [0.011] if dtype == "int8" else [], 4 * (dtype == "int8"), divisor.astype(dtype))
            one = quantised(a, dtype, 0.03, 4) if dtype == "int8" else Tensor(a, dtype)
            shape = np.broadcast_shapes(a, b)
            out = quantised(shape, dtype, 0.05, -3) if dtype == "int8" else Tensor(shape, dtype)
            options = {"fused_activation_function": k % 2 if dtype == "int8" else 0}
            yield case(f"DIV-{dtype}-{k}", "DIV", [one, two, out], [0], **options)
    pair = [quantised([4, 9], "int16", scale) for scale in (0.0002, 0.0003)]
    yield case("SQUARED_DIFFERENCE-int16", "SQUARED_DIFFERENCE", [*pair, quantised([4, 9], "int16", 0.002)], [0, 1])


def matrices() -> Iterator[Case]:
    """Grouped convolutions, int16 and float32 forms of what TFLM's own models have in int8."""
    rng = np.random.default_rng(7)
    for dtype, (h, w), bits in [("int8", (3, 2), 8), ("int8", (2, 1), 8), ("int8", (1, 1), 4), ("int16", (3, 2), 8),
                                ("float32", (3, 2), 8)]:  # fmt: skip
        tensors = [
            quantised([2, 5, 6, 4], dtype), weights(rng, [6, h, w, 2], dtype, 0, bits), biases(rng, 6, dtype),
            quantised([2, 5, 6, 6], dtype, 0.05, -9),
        ]  # fmt: skip
        options = {"padding": 0, "stride_w": 1, "stride_h": 1, "dilation_w_factor": 1, "dilation_h_factor": 1}
        yield case(f"groups-{dtype}-{h}{w}", "CONV_2D", tensors, [0], **options)
    for turned, padding in itertools.product((0, 1), (0, 1)):
        one = quantised([2, 4, 3] if turned else [2, 3, 4], "int16", 0.0003)
        two = quantised([2, 4, 5], "int16", 0.0002)
        tensors = [one, two, quantised([2, 3, 5], "int16", 0.0006)]
        yield case(f"BATCH_MATMUL-int16-{turned}", "BATCH_MATMUL", tensors, [0, 1], adj_x=turned)
        size = 8 if padding == 0 else 9
        wide = biases(rng, 3, "int16")
        bias = wide if turned else Tensor([3], "int16", [0.0002], 0, np.asarray(wide.data).astype(np.int16))
        tensors = [
            whole(2, size, size, 3), weights(rng, [3, 3, 3, 5], "int8", 0), quantised([2, 4, 4, 5], "int16"), bias,
            quantised([2, size, size, 3], "int16", 0.05),
        ]  # fmt: skip
        options = {"padding": padding, "stride_w": 2, "stride_h": 2}
        yield case(f"TRANSPOSE_CONV-int16-{turned}-{padding}", "TRANSPOSE_CONV", tensors, [2], **options)


def states() -> Iterator[Case]:
    """SVDF of float32 and LSTM of int16: state from run to run."""
    rng = np.random.default_rng(8)
    for rank, activation, batch in ((1, 0, 1), (2, 1, 2)):
        tensors = [
            Tensor([batch, 5]), weights(rng, [4 * rank, 5], "float32", None),
            weights(rng, [4 * rank, 3], "float32", None), biases(rng, 4, "float32"),
            Tensor([batch, 12 * rank], variable=True), Tensor([batch, 4]),
        ]  # fmt: skip
        yield case(f"SVDF-{rank}", "SVDF", tensors, [0], rank=rank, fused_activation_function=activation)
    for time_major in (0, 1):
        yield f"LSTM-{time_major}", lambda major=time_major: lstm(major)


def lstm(time_major: int) -> tuple[bytes, list[Tensor]]:
    rng = np.random.default_rng(9)
    batch, steps, depth, units = 2, 3, 5, 4
    x = quantised([steps, batch, depth] if time_major else [batch, steps, depth], "int16", 1 / 32768)
    tensors = [x]
    tensors += [weights(rng, [units, depth], "int16", None) for _ in range(4)]
    tensors += [weights(rng, [units, units], "int16", None) for _ in range(4)]
    tensors += [Tensor([units], "int64", [1e-6], 0, rng.integers(-9999, 9999, units)) for _ in range(4)]
    tensors += [Tensor([batch, units], "int16", [1 / 32768], variable=True)]
    tensors += [Tensor([batch, units], "int16", [2**-11], variable=True)]
    tensors += [quantised([*x.shape[:2], units], "int16", 1 / 32768)]
    inputs = [*range(9), -1, -1, -1, 9, 10, 11, 12, -1, -1, 13, 14, -1, -1, -1, -1]
    fields = [(0, "b", 4), (1, "f", 10.0), (2, "f", 0.0), (3, "?", time_major)]
    return build(Graph(tensors, [Op(44, inputs, [15], fields, 71)], [0], [15])), [x]


def rest() -> Iterator[Case]:
    """What no other table has. Roots and logarithms of negative numbers are NaN in both."""
    for name in ("LOG", "SQRT", "RSQRT"):
        yield case(name, name, [Tensor([40]), Tensor([40])], [0])
    for name, dtype in (("GREATER", "int8"), ("LESS_EQUAL", "float32")):
        one = quantised([4, 9], dtype, 0.03, 4)
        yield case(name, name, [one, one, Tensor([4, 9], "bool")], [0, 1])
    yield case("REDUCE_ALL", "REDUCE_ALL", [Tensor([9, 2], "bool"), whole(1), Tensor([9], "bool")], [0], keep_dims=0)
    options = {"padding": 0, "stride_w": 2, "stride_h": 1, "filter_width": 3, "filter_height": 2}
    yield case("L2_POOL_2D", "L2_POOL_2D", [Tensor([1, 5, 6, 2]), Tensor([1, 5, 3, 2])], [0], **options)


def test_every_operator_of_tflm_is_in_the_table():
    """A kernel for each operator with a number; the three others are taken apart."""
    runtime = library.load()
    names = re.findall(r"X\((mpm_\w+)\)", (library.source_folder() / "src" / "kernels.h").read_text())
    found = {ctypes.c_int16.in_dll(runtime, name).value for name in names}
    assert {name for name in OPERATORS if name in NUMBERS and NUMBERS[name] not in found} == {
        "RELU_N1_TO_1",
        "GELU",
        "SIGN",
    }


FAMILIES = {
    "sums": sums, "fills": fills, "lookups": lookups, "images": images, "activations": activations,
    "matrices": matrices, "states": states, "rest": rest,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_tflm(family, capfd):
    check(FAMILIES[family]())


def test_space_to_batch_fills_with_the_zero_point():
    """TFLite does so too; TFLM's kernel fills with a number that it has not set."""
    tensors = [quantised([1, 2, 3, 1]), whole(1, 2), table([[0, 0], [1, 0]]), quantised([2, 2, 2, 1])]
    x = np.arange(6, dtype=np.int8).reshape(1, 2, 3, 1)
    (output,) = Interpreter(operator("SPACE_TO_BATCH_ND", tensors, [0])).run(x)
    np.testing.assert_array_equal(output[..., 0], [[[5, 1], [5, 4]], [[0, 2], [3, 5]]])
