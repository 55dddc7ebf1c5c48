"""Models of one operator, and their comparison with TensorFlow Lite Micro's reference kernels."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tflite_models import Graph, Op, Tensor, build

from multipod.micro import Interpreter
from multipod.micro.operators.table import OPERATORS

runtime = pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro's wheel is not installed").runtime
Case = tuple[str, Callable[[], tuple[bytes, list[Tensor]]]]
LETTERS = {
    "int8": "b",
    "int32": "i",
    "bool": "?",
    "float32": "f",
    "padding": "b",
    "activation": "b",
    "dtype": "b",
    "graph": "i",
}
RANGES = {
    "int8": (-128, 127),
    "int16": (-32768, 32767),
    "int32": (-1000, 1000),
    "int64": (-1000, 1000),
    "uint8": (0, 255),
}


def operator(
    name: str, tensors: Sequence[Tensor], inputs: Sequence[int], outputs: int | Sequence[int] = 1, **options: Any
) -> bytes:
    """A model of one operator. Its tensors come first, then its outputs; `inputs` are those that are not constants."""
    known = OPERATORS[name].options
    fields = (
        [(known.fields[key][0], LETTERS[known.fields[key][1]], value) for key, value in options.items()]
        if known
        else []
    )
    made = [*range(len(tensors) - outputs, len(tensors))] if isinstance(outputs, int) else [*outputs]
    given = [k for k in range(len(tensors)) if k not in made]
    return build(
        Graph(tensors, [Op(OPERATORS[name].number, given, made, fields, known.number if known else 0)], inputs, made)
    )


def values(rng: np.random.Generator, tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "float32":
        return rng.uniform(-3, 3, tensor.shape).astype(np.float32)
    if tensor.dtype == "bool":
        return rng.integers(0, 2, tensor.shape).astype(bool)
    if tensor.dtype in ("uint32", "uint64"):  # of every size
        bits = np.iinfo(tensor.dtype).bits
        return rng.integers(0, 2**bits, tensor.shape, tensor.dtype) >> rng.integers(0, bits, tensor.shape, tensor.dtype)
    low, high = RANGES[tensor.dtype]
    return rng.integers(low, high + 1, tensor.shape).astype(tensor.dtype)


def same_as_tflm(model: bytes, inputs: Sequence[Tensor], rounds: int = 2) -> None:
    ours, theirs = Interpreter(model), runtime.Interpreter.from_bytes(model, arena_size=1 << 20)
    rng = np.random.default_rng(3)
    for _ in range(rounds):
        arrays = [values(rng, tensor) for tensor in inputs]
        for k, array in enumerate(arrays):
            theirs.set_input(array, k)
        theirs.invoke()
        for k, output in enumerate(ours.run(*arrays)):
            expected = np.array(theirs.get_output(k))
            if output.dtype == np.float32:
                np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
            else:
                np.testing.assert_array_equal(output, expected)


def quantised(shape: Sequence[int], dtype: str = "int8", scale: float = 0.02, zero: int = 5) -> Tensor:
    if dtype == "float32":
        return Tensor(shape)
    return Tensor(shape, dtype, [scale], zero if dtype == "int8" else 0)


def weights(rng: np.random.Generator, shape: Sequence[int], dtype: str, channel: int | None, bits: int = 8) -> Tensor:
    if dtype == "float32":
        return Tensor(shape, data=rng.normal(size=shape).astype(np.float32))
    scales = [0.01] if channel is None else list(rng.uniform(0.002, 0.03, shape[channel]))
    top = 2 ** (bits - 1) - 1
    array = rng.integers(-top, top + 1, shape).astype(np.int8)
    if bits == 4:
        flat = np.append(array.ravel(), np.int8(0)) if array.size % 2 else array.ravel()
        packed = (flat[::2] & 15) | ((flat[1::2] & 15) << 4)
        return Tensor(shape, "int4", scales, 0, packed.astype(np.uint8), channel or 0)
    return Tensor(shape, "int8", scales, 0, array, channel or 0)


def biases(rng: np.random.Generator, channels: int, dtype: str) -> Tensor:
    if dtype == "float32":
        return Tensor([channels], data=rng.normal(size=channels).astype(np.float32))
    wide = "int64" if dtype == "int16" else "int32"
    return Tensor([channels], wide, [0.0002], 0, rng.integers(-2000, 2000, channels).astype(wide))


def whole(*numbers: int) -> Tensor:
    return Tensor([len(numbers)], "int32", data=np.array(numbers, np.int32))


def check(cases: Iterator[Case]) -> None:
    """Runs all cases and lists those that differ."""
    wrong = []
    for name, made in cases:
        try:
            model, inputs = made()
            same_as_tflm(model, inputs)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error).strip()[:300]}")
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)
