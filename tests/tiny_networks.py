"""The four networks of MLPerf Tiny (Banbury et al., 2021, arXiv:2106.07597), in Flax NNX with weights by chance.

`width` and the image sizes may be made smaller than the benchmark's, for tests.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def _norm(features: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """A batch norm as after a training: statistics that are not 0 and 1."""
    rng = np.random.default_rng(features)
    norm = nnx.BatchNorm(features, use_running_average=True, rngs=rngs)
    norm.mean[...] = jnp.asarray(rng.normal(size=features) * 0.2, jnp.float32)
    norm.var[...] = jnp.asarray(rng.uniform(0.5, 1.5, features), jnp.float32)
    return norm


class ConvNorm(nnx.Module):
    """Convolution and batch norm; depthwise where `features` is None."""

    def __init__(
        self,
        inputs: int,
        features: int | None,
        kernel: Sequence[int],
        stride: int,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
    ) -> None:
        groups = inputs if features is None else 1
        features = features or inputs
        self.conv = nnx.Conv(inputs, features, kernel, stride, feature_group_count=groups, use_bias=bias, rngs=rngs)
        self.norm = _norm(features, rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.conv(x))


class Separable(nnx.Module):
    """A depthwise and a pointwise convolution, each with batch norm and ReLU."""

    def __init__(self, inputs: int, features: int, stride: int, rngs: nnx.Rngs) -> None:
        self.depthwise = ConvNorm(inputs, None, (3, 3), stride, rngs)
        self.pointwise = ConvNorm(inputs, features, (1, 1), 1, rngs)

    def __call__(self, x: Any) -> Any:
        return jax.nn.relu(self.pointwise(jax.nn.relu(self.depthwise(x))))


class MobileNet(nnx.Module):
    """MobileNetV1, for visual wake words at width 0.25 on 96 by 96 pixels."""

    def __init__(self, width: float, rngs: nnx.Rngs) -> None:
        sizes = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
        inputs = int(32 * width)
        self.first = ConvNorm(3, inputs, (3, 3), 2, rngs)
        blocks = []
        for features, stride in sizes:
            blocks.append(Separable(inputs, int(features * width), stride, rngs))
            inputs = int(features * width)
        self.blocks = nnx.List(blocks)
        self.last = nnx.Linear(inputs, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return jax.nn.softmax(self.last(nnx.avg_pool(x, x.shape[1:3]).reshape(1, -1)))


class KeywordNet(nnx.Module):
    """DS-CNN, for keywords in 49 steps of 10 coefficients."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = ConvNorm(1, width, (10, 4), 2, rngs, bias=True)
        self.blocks = nnx.List([Separable(width, width, 1, rngs) for _ in range(4)])
        self.last = nnx.Linear(width, 12, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return jax.nn.softmax(self.last(nnx.avg_pool(x, x.shape[1:3]).reshape(1, -1)))


class Residual(nnx.Module):
    """Two convolutions beside the identity, or beside one where the size changes."""

    def __init__(self, inputs: int, features: int, stride: int, rngs: nnx.Rngs) -> None:
        self.one = ConvNorm(inputs, features, (3, 3), stride, rngs, bias=True)
        self.two = ConvNorm(features, features, (3, 3), 1, rngs, bias=True)
        self.beside = None if stride == 1 else nnx.Conv(inputs, features, (1, 1), stride, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = self.two(jax.nn.relu(self.one(x)))
        return jax.nn.relu(y + (x if self.beside is None else self.beside(x)))


class ResNet8(nnx.Module):
    """For CIFAR-10."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = ConvNorm(3, width, (3, 3), 1, rngs, bias=True)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nnx.List([Residual(*size, rngs) for size in sizes])
        self.last = nnx.Linear(4 * width, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return jax.nn.softmax(self.last(nnx.avg_pool(x, x.shape[1:3]).reshape(1, -1)))


class AutoEncoder(nnx.Module):
    """Fully connected, for sounds of machines: what it cannot repeat is an anomaly."""

    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs) -> None:
        sizes = [inputs, *[width] * 4, 8, *[width] * 4]
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.norms = nnx.List([_norm(size, rngs) for size in sizes[1:]])
        self.last = nnx.Linear(sizes[-1], inputs, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = jax.nn.relu(norm(layer(x)))
        return self.last(x)


@dataclass(frozen=True)
class Network:
    """A network and the shape of its input."""

    make: Callable[[nnx.Rngs], Callable[[Any], Any]]
    shape: tuple[int, ...]

    def examples(self, count: int) -> list[np.ndarray]:
        """Inputs by chance."""
        return [np.random.default_rng(seed).normal(size=self.shape).astype(np.float32) for seed in range(count)]


FULL = {
    "visual wake words: MobileNetV1 0.25": Network(lambda rngs: MobileNet(0.25, rngs), (1, 96, 96, 3)),
    "keywords: DS-CNN": Network(lambda rngs: KeywordNet(64, rngs), (1, 49, 10, 1)),
    "images: ResNet-8": Network(lambda rngs: ResNet8(16, rngs), (1, 32, 32, 3)),
    "anomalies: auto-encoder": Network(lambda rngs: AutoEncoder(640, 128, rngs), (1, 640)),
}
SMALL = {
    "keywords": Network(lambda rngs: KeywordNet(8, rngs), (1, 17, 10, 1)),
    "images": Network(lambda rngs: ResNet8(4, rngs), (1, 16, 16, 3)),
    "anomalies": Network(lambda rngs: AutoEncoder(40, 16, rngs), (1, 40)),
}
