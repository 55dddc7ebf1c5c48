"""EfficientNet B0 to B7 (Tan and Le, 2019, arXiv:1905.11946): one small network, and a rule that scales it."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.errors import RecipeError, nearest
from multipod.models.images import IMAGE_DIMS, check_fields, check_image
from multipod.nn.by_example import Dropout
from multipod.nn.images.batch_norm import Moving, Tile
from multipod.nn.images.conv_norm import ConvNorm, Dtype, Style
from multipod.nn.images.squeeze_excite import SqueezeExcite
from multipod.nn.model import FlaxModel
from multipod.nn.remat import REMATS, Remat, call_layer
from multipod.pytrees import Batch


@dataclass(frozen=True)
class Scaling:
    """A published member of the family.

    Attributes:
      width: factor of the features.
      depth: factor of the blocks in a stage.
      pixels: height and width of the images that it was trained on. The network takes any.
      dropout: rate before the head.
    """

    width: float
    depth: float
    pixels: int
    dropout: float


SCALINGS = {
    "b0": Scaling(1.0, 1.0, 224, 0.2),
    "b1": Scaling(1.0, 1.1, 240, 0.2),
    "b2": Scaling(1.1, 1.2, 260, 0.3),
    "b3": Scaling(1.2, 1.4, 300, 0.3),
    "b4": Scaling(1.4, 1.8, 380, 0.4),
    "b5": Scaling(1.6, 2.2, 456, 0.4),
    "b6": Scaling(1.8, 2.6, 528, 0.5),
    "b7": Scaling(2.0, 3.1, 600, 0.5),
}
"""The published family, by name."""


@dataclass(frozen=True)
class _Stage:
    """Blocks of one shape; the first has the stride and changes the features."""

    repeats: int
    size: int
    stride: int
    expansion: int
    features: int


_STEM, _HEAD = 32, 1280
_STAGES = (
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)


@dataclass(frozen=True)
class EfficientNet(FlaxModel):
    """Inverted residual blocks with depthwise convolutions and squeeze-and-excitation, scaled from B0.

    `efficientnet("b5")` has the published numbers. Initialisers, padding (TensorFlow's `SAME`), batch norm (epsilon
    1e-3, momentum 0.99) and the rates of stochastic depth are those of the authors' TensorFlow code. PyTorch's versions
    have `padding="symmetric"`, and epsilon 1e-5 up to b4; timm's with names that begin with tf are the authors'.

    Attributes:
      width: factor of the features, rounded by `round_features`.
      depth: factor of the blocks in a stage, rounded by `round_repeats`.
      dropout: rate before the head.
      stochastic_depth: rate at which a residual block is left out for an example in training, if there were a block
        after the last (arXiv:1603.09382). The rate rises from 0 at the first block in proportion to the blocks
        before it; what remains is divided by 1 - rate.
      channels: colour channels of the image.
      classes: number of classes.
      batch_norm_tile: devices, or examples, that share statistics, see `multipod.nn.images.batch_norm.Tile`.
      batch_norm_moving: what evaluation normalises with, see `multipod.nn.images.batch_norm.Moving`.
      batch_norm_tiles: with `kept`, how many tiles the mesh holds.
      batch_norm_momentum: of the moving moments. 0.99 wants some hundreds of updates before an evaluation.
      padding: of convolutions with strides, see `multipod.nn.images.conv_norm.Style`.
      epsilon: of batch norms.
      dtype: of convolutions and activations. Parameters, batch norm and the head are float32 with either.
      remat: what each block keeps for the backward pass.

    Raises:
      RecipeError: a field out of range, or, when called, images with other channels.
    """

    input_dims = IMAGE_DIMS

    width: float = 1.0
    depth: float = 1.0
    dropout: float = 0.2
    stochastic_depth: float = 0.2
    channels: int = 3
    classes: int = 1000
    batch_norm_tile: Tile = "all"
    batch_norm_moving: Moving = "pooled"
    batch_norm_tiles: int = 1
    batch_norm_momentum: float = 0.99
    padding: Literal["same", "symmetric"] = "same"
    epsilon: float = 1e-3
    dtype: Dtype = "float32"
    remat: Remat = "none"

    def __post_init__(self) -> None:
        check_fields(
            self,
            choices={"dtype": ("float32", "bfloat16"), "padding": ("same", "symmetric"), "remat": REMATS},
            least={"width": 0.01, "depth": 0.01, "channels": 1, "classes": 1},
            rates=("dropout", "stochastic_depth", "batch_norm_momentum", "epsilon"),
        )

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _EfficientNet(self, rngs)

    def forward(self, module: nnx.Module, batch: Batch) -> jax.Array:
        """Logits [examples, classes], float32, for batch["image"], [examples, height, width, channels]."""
        return module(check_image(self, batch["image"]))

    @property
    def style(self) -> Style:
        """What all its convolutions share."""
        moving, tiles = self.batch_norm_moving, self.batch_norm_tiles
        tile, momentum = self.batch_norm_tile, self.batch_norm_momentum
        return Style(tile, momentum, self.epsilon, self.padding, self.dtype, moving, tiles)

    @property
    def stage_blocks(self) -> tuple[int, ...]:
        """The number of blocks in each of the seven stages; the first stage's blocks have no `expand`."""
        return tuple(round_repeats(stage.repeats, self.depth) for stage in _STAGES)


def efficientnet(name: str, **fields: Any) -> EfficientNet:
    """The member of the published family called `name`, `b0` to `b7`, with any field changed.

    Raises:
      RecipeError: no such member.
    """
    if name not in SCALINGS:
        raise RecipeError(f"EfficientNet has no member {name!r}. {nearest(name, SCALINGS)}")
    scaling = SCALINGS[name]
    own = {"width": scaling.width, "depth": scaling.depth, "dropout": scaling.dropout}
    return EfficientNet(**{**own, **fields})


def round_features(features: int, width: float) -> int:
    """`features` times `width`, to the nearest multiple of 8, or the next one where that would lose over a tenth."""
    scaled = features * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


def round_repeats(repeats: int, depth: float) -> int:
    """`repeats` times `depth`, rounded up."""
    return math.ceil(repeats * depth)


class _Block(nnx.Module):
    """MBConv: 1x1 to more features, depthwise, squeeze and excite, 1x1 to `features`; beside the identity if it can.

    The last convolution has no activation (arXiv:1801.04381). `rate` is that of leaving the block out.
    """

    def __init__(
        self,
        spec: EfficientNet,
        stage: _Stage,
        features_in: int,
        features: int,
        stride: int,
        rate: float,
        rngs: nnx.Rngs,
    ) -> None:
        inside = features_in * stage.expansion
        style, silu = spec.style, nnx.silu
        wider = stage.expansion > 1
        self.expand = ConvNorm(style, features_in, inside, 1, activate=silu, rngs=rngs) if wider else None
        self.depthwise = ConvNorm(
            style, inside, inside, stage.size, stride=stride, groups=inside, activate=silu, rngs=rngs
        )
        self.squeeze_excite = SqueezeExcite(inside, max(1, features_in // 4), dtype=spec.dtype, rngs=rngs)
        self.project = ConvNorm(style, inside, features, 1, rngs=rngs)
        self.residual = stride == 1 and features_in == features
        # One draw for an example, the same for all its pixels and features.
        self.drop = Dropout(rate, broadcast_dims=(1, 2, 3), rngs=rngs) if self.residual and rate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x if self.expand is None else self.expand(x)
        y = self.project(self.squeeze_excite(self.depthwise(y)))
        if not self.residual:
            return y
        return x + (y if self.drop is None else self.drop(y))


class _EfficientNet(nnx.Module):
    def __init__(self, spec: EfficientNet, rngs: nnx.Rngs) -> None:
        features = round_features(_STEM, spec.width)
        self.stem = ConvNorm(spec.style, spec.channels, features, 3, stride=2, activate=nnx.silu, rngs=rngs)
        shapes = [
            (stage, stage.stride if number == 0 else 1)
            for stage in _STAGES
            for number in range(round_repeats(stage.repeats, spec.depth))
        ]
        blocks = []
        for number, (stage, stride) in enumerate(shapes):
            rate, out = spec.stochastic_depth * number / len(shapes), round_features(stage.features, spec.width)
            blocks.append(_Block(spec, stage, features, out, stride, rate, rngs))
            features = out
        self.remat = spec.remat
        self.blocks = nnx.List(blocks)
        wide = round_features(_HEAD, spec.width)
        self.last = ConvNorm(spec.style, features, wide, 1, activate=nnx.silu, rngs=rngs)
        self.dropout = Dropout(spec.dropout, rngs=rngs)
        # Uniform within 1 / sqrt(classes), which is variance 1 / (3 classes).
        spread = nnx.initializers.variance_scaling(1 / 3, "fan_out", "uniform")
        self.head = nnx.Linear(wide, spec.classes, kernel_init=spread, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.stem(image)
        for block in self.blocks:
            x = call_layer(block, x, remat=self.remat)
        return self.head(self.dropout(self.last(x).mean(axis=(1, 2), dtype=jnp.float32)))
