"""SSD on a ResNet, as in MLPerf Training: one network finds objects of all sizes at once (arXiv:1512.02325)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.models.images import IMAGE_DIMS, check_fields, check_image, without_crowds
from multipod.models.resnet import BLOCKS, ResidualBlock
from multipod.nn.detection.boxes import SSD_CODE, clip_boxes
from multipod.nn.detection.default_boxes import DefaultBoxes
from multipod.nn.detection.detections import FoundObjects, best_of_each_class
from multipod.nn.detection.hard_negatives import Ties
from multipod.nn.detection.losses import ssd_losses
from multipod.nn.detection.matching import GOOGLE_SSD, REFERENCE_SSD
from multipod.nn.detection.pyramid import BiasedConv
from multipod.nn.images.batch_norm import Moving, Tile
from multipod.nn.images.conv_norm import ConvNorm, Dtype, Style
from multipod.nn.logical_axes import with_logical_constraint
from multipod.nn.model import FlaxModel
from multipod.nn.remat import REMATS, Remat, call_layer
from multipod.pytrees import Batch

Reading = Literal["reference", "google"]
"""Whose SSD it is: that of the MLPerf reference, or that of Google's submissions to v0.6 and v0.7."""
READINGS = ("reference", "google")
GLOROT = nnx.initializers.glorot_uniform()


@dataclass(frozen=True)
class Ssd(FlaxModel):
    """SSD-ResNet: three stages of a ResNet, extra layers on top, and two convolutions on each of six maps.

    The ResNet has basic blocks; its third stage has stride 1, so that 300 pixels become maps of 38, 19, 10, 5, 3 and 1.
    As it stands it has 19,972,534 parameters.

    Attributes:
      depth: of the ResNet, 18 or 34.
      channels: colour channels of the image.
      classes: with the background, which is 0.
      width: features of the ResNet's first stage.
      boxes: the default boxes, and with them the image's side and the maps.
      extra: for each map behind the first: features of its 1x1, of its 3x3, and the stride of that; where the stride is
        1 nothing is padded.
      reading: `google` has a 1x1 head on the map of one cell (19,276,214 parameters), pads the pool, and the extra
        layers of stride 2, at the end only, and matches otherwise (`ssd_loss`).
      ties: of hard negatives, see `multipod.nn.detection.hard_negatives.hard_negatives`.
      least_score: a detection's score is above it.
      batch_norm_tile: devices, or examples, that share statistics, see `multipod.nn.images.batch_norm.Tile`.
      batch_norm_moving: what evaluation normalises with, see `multipod.nn.images.batch_norm.Moving`.
      batch_norm_tiles: with `kept`, how many tiles the mesh holds.
      dtype: of convolutions and activations. Parameters, batch norm, logits and offsets are float32 with either.
      remat: what each block keeps for the backward pass.
      fold_stem: as in `multipod.models.resnet.ResNet`.

    Raises:
      RecipeError: a field out of range, or, when called, images with other channels.
    """

    input_dims = IMAGE_DIMS

    depth: Literal[18, 34] = 34
    channels: int = 3
    classes: int = 81
    width: int = 64
    boxes: DefaultBoxes = field(default_factory=DefaultBoxes)
    extra: tuple[tuple[int, int, int], ...] = (
        (256, 512, 2),
        (256, 512, 2),
        (128, 256, 2),
        (128, 256, 1),
        (128, 256, 1),
    )
    reading: Reading = "reference"
    ties: Ties = "exact"
    least_score: float = 0.05
    batch_norm_tile: Tile = "all"
    batch_norm_moving: Moving = "pooled"
    batch_norm_tiles: int = 1
    dtype: Dtype = "float32"
    remat: Remat = "none"
    fold_stem: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            choices={
                "depth": (18, 34),
                "reading": READINGS,
                "dtype": ("float32", "bfloat16"),
                "remat": REMATS,
            },
            least={"channels": 1, "classes": 2, "width": 1},
        )

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Ssd(self, rngs)

    def forward(self, module: "_Ssd", batch: Batch) -> dict[str, jax.Array]:
        """`logits` [examples, boxes, classes] and `offsets` [examples, boxes, 4], float32, in the boxes' order.

        Where the batch has objects also what `ssd_loss` gives; in evaluation what `ssd_detections` gives.
        """
        outputs = module(check_image(self, batch["image"]))
        if "box" in batch:
            outputs |= ssd_loss(outputs, batch, self.boxes, reading=self.reading, ties=self.ties)
        if module.deterministic:
            found = ssd_detections(outputs, self.boxes, least_score=self.least_score)
            outputs |= {"box": found.box, "score": found.score, "label": found.label}
        return outputs

    @property
    def style(self) -> Style:
        """What the ResNet's convolutions share."""
        moving, tiles = self.batch_norm_moving, self.batch_norm_tiles
        return Style(self.batch_norm_tile, 0.9, 1e-5, "symmetric", self.dtype, moving, tiles)


def ssd_loss(
    outputs: dict[str, jax.Array],
    batch: Batch,
    boxes: DefaultBoxes,
    *,
    reading: Reading = "reference",
    ratio: float = 3.0,
    ties: Ties = "exact",
) -> dict[str, jax.Array]:
    """`loss`, of which `class_loss` and `box_loss` are the parts, and `positives`: float32 [examples].

    Softmax over classes with hard negatives, smooth L1 of offsets, over the positives of an image.

    Args:
      outputs: of an `Ssd`, `logits` and `offsets`.
      batch: `box` [examples, truths, 4], in pixels, `label` [examples, truths], from 1, 0 for padding, and perhaps
        `crowd`, bool [examples, truths], which are left out.
      boxes: the model's.
      reading: `reference`: a match needs more than 0.5, and of two objects with one best box the last has it; `google`:
        0.5 is enough, and the first has it.
      ratio: negatives for each positive.
      ties: see `multipod.nn.detection.hard_negatives.hard_negatives`.
    """
    defaults = jnp.asarray(boxes.corners()) * boxes.pixels
    matching = REFERENCE_SSD if reading == "reference" else GOOGLE_SSD

    def of_image(logits: jax.Array, offsets: jax.Array, truth: jax.Array, labels: jax.Array) -> tuple:
        found = ssd_losses(logits, offsets, defaults, truth, labels, matching=matching, ratio=ratio, ties=ties)
        return found.total, found

    truth = batch["box"].astype(jnp.float32)
    loss, parts = jax.vmap(of_image)(outputs["logits"], outputs["offsets"], truth, without_crowds(batch))
    most = jnp.maximum(parts.positives, 1)
    return {
        "loss": loss,
        "class_loss": parts.classes / most,
        "box_loss": parts.boxes / most,
        "positives": parts.positives,
    }


def ssd_detections(
    outputs: dict[str, jax.Array],
    boxes: DefaultBoxes,
    *,
    each: int = 200,
    count: int = 200,
    least_score: float = 0.05,
    overlap: float = 0.5,
) -> FoundObjects:
    """What an `Ssd` found: `FoundObjects` with a first dim of examples, boxes in pixels, clipped to the image.

    Args:
      outputs: of the model.
      boxes: the model's.
      each: how many of a class are looked at.
      count: how many are returned.
      least_score: a score must be above it.
      overlap: from this IoU on a box is suppressed by a better one of its class.
    """
    defaults = jnp.asarray(boxes.corners()) * boxes.pixels

    def of_image(logits: jax.Array, offsets: jax.Array) -> FoundObjects:
        decoded = clip_boxes(SSD_CODE.decode(offsets, defaults), boxes.pixels, boxes.pixels)
        scores = jax.nn.softmax(logits.astype(jnp.float32))
        return best_of_each_class(decoded, scores, each=each, count=count, least_score=least_score, overlap=overlap)

    return jax.vmap(of_image)(outputs["logits"], outputs["offsets"])


class _Ssd(nnx.Module):
    def __init__(self, spec: Ssd, rngs: nnx.Rngs) -> None:
        google = spec.reading == "google"
        self.pool_padding: str | Sequence[tuple[int, int]] = "SAME" if google else ((1, 1), (1, 1))
        self.remat = spec.remat
        self.deterministic = False  # `eval` sets it
        self.stem = ConvNorm(
            spec.style, spec.channels, spec.width, 7, stride=2, activate=nnx.relu, fold=spec.fold_stem, rngs=rngs
        )
        blocks, features = [], spec.width
        for stage, count in enumerate(BLOCKS[spec.depth][:3]):
            for number in range(count):
                stride = 2 if stage == 1 and number == 0 else 1
                blocks.append(ResidualBlock(spec.style, False, features, spec.width << stage, stride, rngs=rngs))
                features = spec.width << stage
        self.blocks = nnx.List(blocks)
        layers, maps = [], [features]
        for squeezed, wide, stride in spec.extra:
            layers.append(_Extra(maps[-1], squeezed, wide, stride, google, spec.dtype, rngs))
            maps.append(wide)
        self.extra = nnx.List(layers)
        heads = zip(maps, spec.boxes.shapes, spec.boxes.grids, strict=True)
        self.heads = nnx.List(
            [
                _Head(width, shapes, spec.classes, min(grid, 3) if google else 3, spec.dtype, rngs)
                for width, shapes, grid in heads
            ]
        )

    def __call__(self, image: jax.Array) -> dict[str, jax.Array]:
        x = nnx.max_pool(self.stem(image), (3, 3), strides=(2, 2), padding=self.pool_padding)
        for block in self.blocks:
            x = call_layer(block, with_logical_constraint(x, "height", "width", None), remat=self.remat)
        maps = [x]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        found = [head(x) for head, x in zip(self.heads, maps, strict=True)]
        logits, offsets = (jnp.concatenate(parts, 1) for parts in zip(*found, strict=True))
        return {"logits": logits, "offsets": offsets}


class _Extra(nnx.Module):
    """relu(3x3(relu(1x1(x)))) with biases."""

    def __init__(
        self, features_in: int, squeezed: int, features: int, stride: int, google: bool, dtype: Dtype, rngs: nnx.Rngs
    ) -> None:
        around: str | tuple[tuple[int, int], tuple[int, int]] = "SAME" if google else ((1, 1), (1, 1))
        padding = "VALID" if stride == 1 else around
        self.squeeze = BiasedConv(features_in, squeezed, 1, init=GLOROT, dtype=dtype, rngs=rngs)
        self.expand = BiasedConv(
            squeezed, features, 3, stride=stride, padding=padding, init=GLOROT, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.expand(nnx.relu(self.squeeze(x))))


class _Head(nnx.Module):
    """Class logits [n, shapes * h * w, classes] and offsets [n, shapes * h * w, 4] of a map, float32, by shape."""

    def __init__(self, features: int, shapes: int, classes: int, size: int, dtype: Dtype, rngs: nnx.Rngs) -> None:
        self.shapes = shapes
        self.logits = BiasedConv(features, shapes * classes, size, init=GLOROT, dtype=dtype, rngs=rngs)
        self.offsets = BiasedConv(features, shapes * 4, size, init=GLOROT, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._by_shape(self.logits(x)), self._by_shape(self.offsets(x))

    def _by_shape(self, x: jax.Array) -> jax.Array:
        n, h, w, features = x.shape
        apart = x.astype(jnp.float32).reshape(n, h, w, self.shapes, features // self.shapes)
        return apart.transpose(0, 3, 1, 2, 4).reshape(n, self.shapes * h * w, -1)
