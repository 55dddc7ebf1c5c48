"""Small int8 networks for tests and firmware, made by hand: the shapes of real ones, with weights by chance."""

import itertools

import numpy as np
from tflite_models import Graph, Op, Tensor, build


def _weights(rng: np.random.Generator, shape: list[int], channel: int) -> Tensor:
    scales = list(rng.uniform(0.004, 0.02, shape[channel]))
    return Tensor(shape, "int8", scales, 0, rng.integers(-127, 128, shape).astype(np.int8), channel)


def _bias(rng: np.random.Generator, channels: int) -> Tensor:
    return Tensor([channels], "int32", [0.0002], 0, rng.integers(-3000, 3000, channels).astype(np.int32))


def convolutional(size: int = 12) -> bytes:
    """Convolution, depthwise and pointwise convolution, a skip, pooling, a dense layer and softmax."""
    rng = np.random.default_rng(5)
    half = size // 2

    def act(shape: list[int]) -> Tensor:
        return Tensor(shape, "int8", [0.05], -3)

    tensors = [
        act([1, size, size, 1]), _weights(rng, [8, 3, 3, 1], 0), _bias(rng, 8), act([1, half, half, 8]),
        _weights(rng, [1, 3, 3, 8], 3), _bias(rng, 8), act([1, half, half, 8]),
        _weights(rng, [8, 1, 1, 8], 0), _bias(rng, 8), act([1, half, half, 8]), act([1, half, half, 8]),
        act([1, 1, 1, 8]), Tensor([2], "int32", data=np.array([1, 8], np.int32)), act([1, 8]),
        Tensor([4, 8], "int8", [0.01], 0, rng.integers(-127, 128, (4, 8)).astype(np.int8)), _bias(rng, 4), act([1, 4]),
        Tensor([1, 4], "int8", [1 / 256], -128),
    ]  # fmt: skip
    steps = [(4, "i", 1), (5, "i", 1)]
    ops = [
        Op(3, [0, 1, 2], [3], [(0, "b", 0), (1, "i", 2), (2, "i", 2), (3, "b", 1), *steps], 1),
        Op(
            4,
            [3, 4, 5],
            [6],
            [(0, "b", 0), (1, "i", 1), (2, "i", 1), (3, "i", 1), (4, "b", 3), (5, "i", 1), (6, "i", 1)],
            2,
        ),
        Op(3, [6, 7, 8], [9], [(0, "b", 0), (1, "i", 1), (2, "i", 1), (3, "b", 0), *steps], 1),
        Op(0, [3, 9], [10], [(0, "b", 1)], 11),
        Op(
            1, [10], [11], [(0, "b", 1), (1, "i", half), (2, "i", half), (3, "i", half), (4, "i", half), (5, "b", 0)], 5
        ),
        Op(22, [11, 12], [13]),
        Op(9, [13, 14, 15], [16], [(0, "b", 0)], 8),
        Op(25, [16], [17], [(0, "f", 1.0)], 9),
    ]
    return build(Graph(tensors, ops, [0], [17]))


def dense(sizes: tuple[int, ...] = (20, 16, 10)) -> bytes:
    """Fully connected layers, as an auto-encoder has them."""
    rng = np.random.default_rng(6)
    tensors, ops = [Tensor([1, sizes[0]], "int8", [0.05], -3)], []
    for depth, channels in itertools.pairwise(sizes):
        last = len(tensors) - 1
        tensors += [
            Tensor([channels, depth], "int8", [0.01], 0, rng.integers(-127, 128, (channels, depth)).astype(np.int8))
        ]
        tensors += [_bias(rng, channels), Tensor([1, channels], "int8", [0.05], -3)]
        ops.append(Op(9, [last, last + 1, last + 2], [last + 3], [(0, "b", 1)], 8))
    return build(Graph(tensors, ops, [0], [len(tensors) - 1]))


def networks() -> dict[str, bytes]:
    """Every network by its name."""
    return {"convolutional": convolutional(), "dense": dense()}
