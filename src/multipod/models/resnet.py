"""Residual networks for images (He et al., 2015, arXiv:1512.03385)."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
from flax import nnx

from multipod.nn.batch_norm import Tile, TileBatchNorm
from multipod.nn.convolution import convolution
from multipod.nn.model import Batch, FlaxModel

ACTIVATIONS = {"relu": nnx.relu, "silu": nnx.silu}


@dataclass(frozen=True)
class SmallResNet(FlaxModel):
    """A residual network for small images: a 3x3 stem, basic blocks in stages, global average pooling.

    Attributes:
      channels: colour channels of the image.
      classes: number of classes.
      width: features of the first stage; each later stage has twice those of the one before it at half the size.
      blocks: basic blocks in each stage.
      batch_norm_tile: devices that share batch-norm statistics, see `multipod.nn.batch_norm.Tile`.
      activation: `relu` as in the paper, or the smooth `silu` (arXiv:1702.03118), with which training does
        not enlarge rounding errors (docs/design/order.md).
    """

    channels: int = 1
    classes: int = 10
    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)
    batch_norm_tile: Tile = "all"
    activation: Literal["relu", "silu"] = "relu"

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _ResNet(self, rngs)

    def forward(self, module: nnx.Module, batch: Batch) -> jax.Array:
        """Logits [examples, classes] for batch["image"], [examples, height, width, channels]."""
        return module(batch["image"])


class _Block(nnx.Module):
    """Two 3x3 convolutions beside the identity, or beside a 1x1 convolution where the shape changes."""

    def __init__(self, spec: SmallResNet, features_in: int, features: int, stride: int, rngs: nnx.Rngs) -> None:
        tile = spec.batch_norm_tile
        self.activate = ACTIVATIONS[spec.activation]
        conv = partial(nnx.Conv, use_bias=False, conv_general_dilated=convolution, rngs=rngs)
        self.conv1 = conv(features_in, features, (3, 3), strides=stride)
        self.norm1 = TileBatchNorm(features, tile=tile, rngs=rngs)
        self.conv2 = conv(features, features, (3, 3))
        self.norm2 = TileBatchNorm(features, tile=tile, rngs=rngs)
        same = features_in == features and stride == 1
        self.shortcut = None if same else conv(features_in, features, (1, 1), strides=stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.activate(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return self.activate(y + (x if self.shortcut is None else self.shortcut(x)))


class _ResNet(nnx.Module):
    def __init__(self, spec: SmallResNet, rngs: nnx.Rngs) -> None:
        self.activate = ACTIVATIONS[spec.activation]
        self.stem = nnx.Conv(spec.channels, spec.width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = TileBatchNorm(spec.width, tile=spec.batch_norm_tile, rngs=rngs)
        blocks, features = [], spec.width
        for stage, count in enumerate(spec.blocks):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(_Block(spec, features, spec.width << stage, stride, rngs))
                features = spec.width << stage
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, spec.classes, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.activate(self.norm(self.stem(image)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))
