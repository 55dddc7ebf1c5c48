"""Mask R-CNN on a ResNet with a feature pyramid: boxes, classes and masks of objects (arXiv:1703.06870)."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from multipod.models.images import IMAGE_DIMS, check_fields, check_image, without_crowds
from multipod.models.resnet import BLOCKS, ResidualBlock
from multipod.nn.by_example import example_stream, keys_of_rows
from multipod.nn.detection.anchors import Anchors, Reading
from multipod.nn.detection.boxes import BoxCode
from multipod.nn.detection.detections import FoundObjects
from multipod.nn.detection.losses import mask_loss, region_losses, rpn_losses
from multipod.nn.detection.pyramid import FeaturePyramid
from multipod.nn.detection.roi_align import Border, RoiAlign, Way, pyramid_level, stride_scales
from multipod.nn.detection.rpn import Proposals, RpnHead, propose, rpn_targets
from multipod.nn.detection.second_stage import BoxHead, MaskHead, mask_targets, of_wanted, refine, sample_regions
from multipod.nn.images.conv_norm import ConvNorm, Dtype, Style
from multipod.nn.logical_axes import axes_of_dim, with_logical_constraint
from multipod.nn.model import FlaxModel
from multipod.nn.remat import REMATS, Remat, call_layer
from multipod.pytrees import Batch

READINGS = ("torchvision", "reference", "google")
LOSSES = ("rpn_objectness_loss", "rpn_box_loss", "class_loss", "box_loss", "mask_loss")


@dataclass(frozen=True)
class MaskRcnn(FlaxModel):
    """Mask R-CNN R50-FPN. As it stands it has 44,401,393 parameters, and computes what torchvision's does.

    All sizes are fixed, and what is missing is masked. As published the ResNet's norms are frozen, and the stem and the
    first stage have no gradients (`frozen`); leave them out of weight decay too.

    Attributes:
      classes: with the background, which is 0.
      depth: of the ResNet: 18 or 34 (basic blocks), 50 or 101.
      channels: colour channels of the image.
      width: features of the ResNet's first stage.
      features: of the pyramid and the mask head.
      hidden: of the box head.
      sizes: the side of each level's square anchor, in pixels.
      reading: whom anchors, box codes, strides and levels follow. `torchvision`: see `Anchors`; a bottleneck's stride
        in its 3x3; levels 2 to 5. `reference`: the stride in the first 1x1, Detectron's anchors, corners that are
        pixels (`BoxCode.pixel`), loss of boxes quadratic up to 1. `google`: so too, with its own anchors, the RPN's
        offsets encoded without and decoded with the pixel, regions read from levels 2 to 6.
      proposals: regions of an image, in evaluation and in training.
      each: anchors of a level looked at, in evaluation and in training.
      rpn_sample: anchors of an image that the RPN's loss counts, and how many of them with objects at most.
      sample: likewise of regions and the second stage.
      detections: most of an image.
      least_score: a detection's score is above it.
      pairs: pairs of region and class looked at for detections; 0: all, as torchvision; Google: 1,000.
      roi_align: `gather` or `einsum`.
      frozen: as published, for a ResNet that was trained before. False: all of it learns, with batch norm; for one that
        begins with random weights.
      dtype: of convolutions and activations. Parameters, norms, logits, offsets and losses are float32 with either.
      remat: what each block of the ResNet keeps for the backward pass.

    Source: arXiv:1703.06870 and arXiv:1612.03144.

    Raises:
      RecipeError: a field out of range, or, when called, images with other channels.
    """

    input_dims = IMAGE_DIMS

    classes: int = 91
    depth: Literal[18, 34, 50, 101] = 50
    channels: int = 3
    width: int = 64
    features: int = 256
    hidden: int = 1024
    sizes: tuple[float, ...] = (32, 64, 128, 256, 512)
    reading: Reading = "torchvision"
    proposals: tuple[int, int] = (1000, 1000)
    each: tuple[int, int] = (1000, 2000)
    rpn_sample: tuple[int, int] = (256, 128)
    sample: tuple[int, int] = (512, 128)
    detections: int = 100
    least_score: float = 0.05
    pairs: int = 0
    roi_align: Way = "gather"
    frozen: bool = True
    dtype: Dtype = "float32"
    remat: Remat = "none"

    def __post_init__(self) -> None:
        check_fields(
            self,
            choices={
                "depth": (18, 34, 50, 101),
                "reading": READINGS,
                "roi_align": ("gather", "einsum"),
                "dtype": ("float32", "bfloat16"),
                "remat": REMATS,
            },
            least={"classes": 2, "channels": 1, "width": 1, "features": 1, "hidden": 1, "detections": 1, "pairs": 0},
        )

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _MaskRcnn(self, rngs)

    def forward(self, module: "_MaskRcnn", batch: Batch) -> dict[str, jax.Array]:
        """Losses of each example where the batch has objects; in evaluation also what was found.

        Of the batch: `image` [examples, height, width, channels]; perhaps `extent` [examples, 2], its height and width
        without padding; with objects `box` [examples, truths, 4] in pixels, `label` [examples, truths], from 1, 0 for
        padding, `object_mask` [examples, truths, m, m], each stretched over its box, and perhaps `crowd`, bool
        [examples, truths], which are left out.

        Returns:
          `LOSSES`, and `loss`, their sum, each float32 [examples]; and what was found, by falling score, then zeros:
          `box` [examples, detections, 4] in pixels, `score`, `label` and `kept`, [examples, detections], and `mask`
          [examples, detections, 28, 28], probabilities over the box (`multipod.nn.detection.masks.paste_masks`).
        """
        image = check_image(self, batch["image"])
        maps = module.pyramid(image)
        logits, offsets = module.rpn(maps)
        extent = batch.get("extent", jnp.broadcast_to(jnp.array(image.shape[1:3]), (len(image), 2)))
        anchors = [jnp.asarray(level) for level in self.anchors.levels(*image.shape[1:3])]
        outputs: dict[str, jax.Array] = {}
        if "box" in batch:
            regions = self._propose(logits, offsets, anchors, extent, training=True)
            losses = module.losses(maps, (logits, offsets), anchors, regions, batch)
            outputs |= {"loss": sum(losses.values(), start=jnp.zeros(len(image), jnp.float32))} | losses
        if module.deterministic:
            regions = self._propose(logits, offsets, anchors, extent, training=False)
            outputs |= module.detect(maps, regions, extent)
        return outputs

    @property
    def anchors(self) -> Anchors:
        """What the RPN's offsets are relative to."""
        return Anchors(sizes=self.sizes, reading=self.reading)

    @property
    def style(self) -> Style:
        """What the ResNet's convolutions share."""
        epsilon = 1e-4 if self.reading == "google" else 1e-5
        return Style("all", 0.9, epsilon, "symmetric", self.dtype, frozen=self.frozen)

    def code(self, *, weights: tuple[float, float, float, float], decoded: bool = True) -> BoxCode:
        """The box code with `weights`; Google's RPN encodes otherwise than it decodes."""
        own = self.reading == "torchvision" or (self.reading == "google" and weights[0] == 1 and not decoded)
        return BoxCode(weights, pixel=0.0 if own else 1.0)

    def _propose(
        self,
        logits: list[jax.Array],
        offsets: list[jax.Array],
        anchors: list[jax.Array],
        extent: jax.Array,
        *,
        training: bool,
    ) -> Proposals:
        code = self.code(weights=_RPN)
        each, count = self.each[training], self.proposals[training]
        return jax.vmap(lambda a, b, c: propose(a, b, anchors, c, each=each, count=count, code=code))(
            logits, offsets, extent
        )


_RPN = (1.0, 1.0, 1.0, 1.0)
_SECOND = (10.0, 10.0, 5.0, 5.0)


class _MaskRcnn(nnx.Module):
    def __init__(self, spec: MaskRcnn, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.deterministic = False  # `eval` sets it
        self.draws = example_stream(rngs)
        self.stem = ConvNorm(spec.style, spec.channels, spec.width, 7, stride=2, activate=nnx.relu, rngs=rngs)
        blocks, widths, features = [], [], spec.width
        for stage, count in enumerate(BLOCKS[spec.depth]):
            for number in range(count):
                stride = 2 if stage and not number else 1
                first = spec.reading != "torchvision"
                narrow = spec.width << stage
                wide = spec.depth >= 50
                blocks.append(ResidualBlock(spec.style, wide, features, narrow, stride, stride_first=first, rngs=rngs))
                features = 4 * narrow if wide else narrow
            widths.append(features)
        self.blocks = nnx.List(blocks)
        self.fpn = FeaturePyramid(widths, spec.features, dtype=spec.dtype, rngs=rngs)
        self.rpn = RpnHead(spec.features, spec.anchors.shapes, dtype=spec.dtype, rngs=rngs)
        self.box_head = BoxHead(49 * spec.features, spec.hidden, spec.classes, dtype=spec.dtype, rngs=rngs)
        self.mask_head = MaskHead(spec.features, spec.classes, dtype=spec.dtype, rngs=rngs)

    def pyramid(self, image: jax.Array) -> list[jax.Array]:
        """The maps of levels 2 to 6."""
        x = nnx.max_pool(self.stem(image), (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        ends = np.cumsum(BLOCKS[self.spec.depth])
        maps: list[jax.Array] = []
        for number, block in enumerate(self.blocks):
            x = call_layer(block, with_logical_constraint(x, "height", "width", None), remat=self.spec.remat)
            if number + 1 in ends:
                # What lies below the second stage is as it was trained before.
                x = jax.lax.stop_gradient(x) if self.spec.frozen and not maps else x
                maps.append(x)
        return self.fpn(maps)

    def losses(
        self,
        maps: list[jax.Array],
        predicted: tuple[list[jax.Array], list[jax.Array]],
        anchors: list[jax.Array],
        proposals: Proposals,
        batch: Batch,
    ) -> dict[str, jax.Array]:
        """The five losses of each example."""
        spec, every = self.spec, jnp.concatenate(anchors)
        keys = [keys_of_rows(self.draws(), len(proposals.box)) for _ in range(2)]
        beta = 1 / 9 if spec.reading == "torchvision" else 1.0
        second = spec.code(weights=_SECOND)

        def of_rpn(logits: jax.Array, offsets: jax.Array, box: jax.Array, label: jax.Array, key: jax.Array) -> tuple:
            code = spec.code(weights=_RPN, decoded=False)
            size, most = spec.rpn_sample
            targets = rpn_targets(every, box, label > 0, key, code=code, sample=size, most_positive=most)
            return rpn_losses(logits, offsets, targets)

        def draw(proposals: Proposals, box: jax.Array, label: jax.Array, key: jax.Array) -> tuple:
            regions = sample_regions(
                proposals, box, label, key, code=second, sample=spec.sample[0], most_positive=spec.sample[1]
            )
            return regions, jax.tree.map(lambda x: x[: spec.sample[1]], regions)

        box, label = batch["box"].astype(jnp.float32), without_crowds(batch)
        logits, offsets = (jnp.concatenate(parts, 1) for parts in predicted)
        objectness, rpn_box = jax.vmap(of_rpn)(logits, offsets, box, label, keys[0])
        regions, positives = jax.vmap(draw)(proposals, box, label, keys[1])
        found = self.box_head(self._read(maps, regions.box, 7))
        classes, boxes = jax.vmap(lambda a, b, c: region_losses(a, b, c, beta=beta))(*found, regions)
        masks = self._masks(maps, positives.box, positives.positive)
        wanted = jax.vmap(lambda a, b, c: mask_targets(a, b, c, 28))(batch["object_mask"], box, positives)
        mask = jax.vmap(mask_loss)(masks, wanted, positives.label, positives.positive)
        return dict(zip(LOSSES, (objectness, rpn_box, classes, boxes, mask), strict=True))

    def detect(self, maps: list[jax.Array], proposals: Proposals, extent: jax.Array) -> dict[str, jax.Array]:
        """What was found in each example."""
        spec = self.spec
        logits, offsets = self.box_head(self._read(maps, proposals.box, 7))

        def of_image(logits: jax.Array, offsets: jax.Array, proposals: Proposals, extent: jax.Array) -> FoundObjects:
            return refine(
                logits,
                offsets,
                proposals,
                extent,
                count=spec.detections,
                least_score=spec.least_score,
                pairs=spec.pairs,
                code=spec.code(weights=_SECOND),
            )

        found = jax.vmap(of_image)(logits, offsets, proposals, extent)
        own = jax.nn.one_hot(found.label, spec.classes)
        masks = jax.nn.sigmoid(jnp.einsum("nryxc,nrc->nryx", self._masks(maps, found.box, found.kept), own))
        return {"box": found.box, "score": found.score, "label": found.label, "kept": found.kept, "mask": masks}

    def _masks(self, maps: list[jax.Array], boxes: jax.Array, wanted: jax.Array) -> jax.Array:
        """Mask logits [examples, regions, 28, 28, classes] of the boxes that are wanted, bool [examples, regions]."""

        split = bool(axes_of_dim("height"))

        def draw(boxes: jax.Array) -> jax.Array:
            regions = self._read(maps, boxes, 14)
            # A dim that is split can be merged only from the outside: XLA would gather the regions of several images.
            regions = regions.swapaxes(0, 1) if split else regions
            logits = self.mask_head(regions.reshape(-1, *regions.shape[2:]))
            logits = logits.reshape(*regions.shape[:2], *logits.shape[1:])
            return logits.swapaxes(0, 1) if split else logits

        # Regions that lie on several devices go through at once.
        return draw(boxes) if split else of_wanted(draw, boxes, wanted)

    def _read(self, maps: list[jax.Array], boxes: jax.Array, size: int) -> jax.Array:
        """The features of regions, [examples, regions, size, size, features]: each from the level of its size."""
        highest = 6 if self.spec.reading == "google" else 5
        border: Border = "zero" if self.spec.reading == "google" else "clamp"
        align = RoiAlign(size, border=border, way=self.spec.roi_align)

        def of_image(maps: list[jax.Array], boxes: jax.Array) -> jax.Array:
            level = pyramid_level(boxes, highest=highest) - 2
            return align.of_pyramid(maps, boxes, level, scales=stride_scales(2, highest))

        # Devices that share an image share its regions here, not their rows.
        return with_logical_constraint(jax.vmap(of_image)(maps[: highest - 1], boxes), "height", None, None, None)
