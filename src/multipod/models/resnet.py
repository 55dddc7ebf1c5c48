"""ResidualBlock networks for images (He et al., 2015, arXiv:1512.03385): the published five, and a small one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.models.images import IMAGE_DIMS, check_fields, check_image
from multipod.nn.images.batch_norm import Moving, Tile, TileBatchNorm
from multipod.nn.images.conv_norm import ConvNorm, Dtype, Style
from multipod.nn.images.convolution import convolution
from multipod.nn.logical_axes import with_logical_constraint
from multipod.nn.model import FlaxModel
from multipod.nn.remat import REMATS, Remat, call_layer
from multipod.pytrees import Batch

ACTIVATIONS = {"relu": nnx.relu, "silu": nnx.silu}
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks in each of the four stages, for each depth: basic blocks up to 34 layers, bottlenecks from 50."""


@dataclass(frozen=True)
class ResNet(FlaxModel):
    """ResNet v1.5 for large images: a 7x7 stem and a pool, both of stride 2, four stages, global average pooling.

    v1.5 is where a bottleneck has its stride in the 3x3 convolution, not in the first 1x1. A shortcut that changes
    shape is a normalised 1x1 convolution (option B). All windows are padded evenly, as in torchvision; TensorFlow
    pads the pool on one side only.

    As published for large batches (Goyal et al., 2017, arXiv:1706.02677, section 5.1): kernels are normal by
    fan-out, the scale of the last norm of each block begins at zero, the head is normal with deviation 0.01, batch
    norm has epsilon 1e-5 and momentum 0.9.

    Attributes:
      depth: 18, 34, 50, 101 or 152.
      channels: colour channels of the image.
      classes: number of classes.
      width: features of the first stage, 64 as published; each later stage has twice those of the one before it.
      batch_norm_tile: devices, or examples, that share statistics, see `multipod.nn.images.batch_norm.Tile`.
      batch_norm_moving: what evaluation normalises with, see `multipod.nn.images.batch_norm.Moving`.
      batch_norm_tiles: with `kept`, how many tiles the mesh holds.
      batch_norm_momentum: of the moving moments.
      dtype: of convolutions and activations. Parameters, batch norm and the head are float32 with either.
      remat: what each block keeps for the backward pass.
      fold_stem: compute the 7x7 stem of stride 2 as 4x4 of stride 1 over blocks of 2x2 pixels (space-to-depth): the
        same parameters and values, for matrix units that 3 channels would leave empty.

    Raises:
      RecipeError: a field out of range, or, when called, images with other channels.
    """

    input_dims = IMAGE_DIMS

    depth: Literal[18, 34, 50, 101, 152] = 50
    channels: int = 3
    classes: int = 1000
    width: int = 64
    batch_norm_tile: Tile = "all"
    batch_norm_moving: Moving = "pooled"
    batch_norm_tiles: int = 1
    batch_norm_momentum: float = 0.9
    dtype: Dtype = "float32"
    remat: Remat = "none"
    fold_stem: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            choices={"depth": BLOCKS, "dtype": ("float32", "bfloat16"), "remat": REMATS},
            least={"channels": 1, "classes": 1, "width": 1},
            rates=("batch_norm_momentum",),
        )

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _DeepResNet(self, rngs)

    def forward(self, module: nnx.Module, batch: Batch) -> jax.Array:
        """Logits [examples, classes], float32, for batch["image"], [examples, height, width, channels]."""
        return module(check_image(self, batch["image"]))

    @property
    def style(self) -> Style:
        """What all its convolutions share."""
        moving, tiles = self.batch_norm_moving, self.batch_norm_tiles
        return Style(self.batch_norm_tile, self.batch_norm_momentum, 1e-5, "symmetric", self.dtype, moving, tiles)


@dataclass(frozen=True)
class SmallResNet(FlaxModel):
    """A residual network for small images: a 3x3 stem, basic blocks in stages, global average pooling.

    Attributes:
      channels: colour channels of the image.
      classes: number of classes.
      width: features of the first stage; each later stage has twice those of the one before it at half the size.
      blocks: basic blocks in each stage.
      batch_norm_tile: devices, or examples, that share statistics, see `multipod.nn.images.batch_norm.Tile`.
      batch_norm_moving: what evaluation normalises with, see `multipod.nn.images.batch_norm.Moving`.
      batch_norm_tiles: with `kept`, how many tiles the mesh holds.
      activation: `relu` as in the paper, or the smooth `silu` (arXiv:1702.03118), with which training does
        not enlarge rounding errors (docs/design/order.md).
    """

    input_dims = IMAGE_DIMS

    channels: int = 1
    classes: int = 10
    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)
    batch_norm_tile: Tile = "all"
    batch_norm_moving: Moving = "pooled"
    batch_norm_tiles: int = 1
    activation: Literal["relu", "silu"] = "relu"

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _ResNet(self, rngs)

    def forward(self, module: nnx.Module, batch: Batch) -> jax.Array:
        """Logits [examples, classes] for batch["image"], [examples, height, width, channels]."""
        return module(batch["image"])


def _norm(spec: SmallResNet, rngs: nnx.Rngs) -> Callable[[int], TileBatchNorm]:
    moving, tiles = spec.batch_norm_moving, spec.batch_norm_tiles
    return partial(TileBatchNorm, tile=spec.batch_norm_tile, moving=moving, tiles=tiles, rngs=rngs)


class _Block(nnx.Module):
    """Two 3x3 convolutions beside the identity, or beside a 1x1 convolution where the shape changes."""

    def __init__(self, spec: SmallResNet, features_in: int, features: int, stride: int, rngs: nnx.Rngs) -> None:
        norm = _norm(spec, rngs)
        self.activate = ACTIVATIONS[spec.activation]
        conv = partial(nnx.Conv, use_bias=False, conv_general_dilated=convolution, rngs=rngs)
        self.conv1 = conv(features_in, features, (3, 3), strides=stride)
        self.norm1 = norm(features)
        self.conv2 = conv(features, features, (3, 3))
        self.norm2 = norm(features)
        same = features_in == features and stride == 1
        self.shortcut = None if same else conv(features_in, features, (1, 1), strides=stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.activate(self.norm1(with_logical_constraint(self.conv1(x), "height", "width", None)))
        y = self.norm2(with_logical_constraint(self.conv2(y), "height", "width", None))
        return self.activate(y + (x if self.shortcut is None else self.shortcut(x)))


class _ResNet(nnx.Module):
    def __init__(self, spec: SmallResNet, rngs: nnx.Rngs) -> None:
        self.activate = ACTIVATIONS[spec.activation]
        conv = partial(nnx.Conv, use_bias=False, conv_general_dilated=convolution, rngs=rngs)
        self.stem = conv(spec.channels, spec.width, (3, 3))
        self.norm = _norm(spec, rngs)(spec.width)
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


class ResidualBlock(nnx.Module):
    """relu(body(x) + shortcut(x)): two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the features at the end.

    A bottleneck has its stride in the 3x3; with `stride_first` in the first 1x1, as in the paper.
    """

    def __init__(
        self,
        style: Style,
        bottleneck: bool,
        features_in: int,
        features: int,
        stride: int,
        *,
        stride_first: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        conv = partial(ConvNorm, style, rngs=rngs)
        if not bottleneck:
            out, first = features, conv(features_in, features, 3, stride=stride, activate=nnx.relu)
            layers = [first, conv(features, out, 3, zero=True)]
        else:
            strides = (stride, 1) if stride_first else (1, stride)
            out, first = 4 * features, conv(features_in, features, 1, stride=strides[0], activate=nnx.relu)
            middle = conv(features, features, 3, stride=strides[1], activate=nnx.relu)
            layers = [first, middle, conv(features, out, 1, zero=True)]
        self.body = nnx.List(layers)
        same = features_in == out and stride == 1
        self.shortcut = None if same else conv(features_in, out, 1, stride=stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The block's output, of its features and stride."""
        y = x
        for layer in self.body:
            y = layer(y)
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class _DeepResNet(nnx.Module):
    def __init__(self, spec: ResNet, rngs: nnx.Rngs) -> None:
        self.stem = ConvNorm(
            spec.style, spec.channels, spec.width, 7, stride=2, activate=nnx.relu, fold=spec.fold_stem, rngs=rngs
        )
        blocks, features = [], spec.width
        for stage, count in enumerate(BLOCKS[spec.depth]):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(
                    ResidualBlock(spec.style, spec.depth >= 50, features, spec.width << stage, stride, rngs=rngs)
                )
                features = (spec.width << stage) * (1 if spec.depth < 50 else 4)
        self.remat = spec.remat
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, spec.classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.stem(image)
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = call_layer(block, x, remat=self.remat)
        return self.head(x.mean(axis=(1, 2), dtype=jnp.float32))
