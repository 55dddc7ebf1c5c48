"""Mask R-CNN's second stage: regions are classified, their boxes refined, their masks drawn (arXiv:1703.06870)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.nn.detection.boxes import SECOND_STAGE_CODE, BoxCode, clip_boxes
from multipod.nn.detection.detections import FoundObjects, found
from multipod.nn.detection.hard_negatives import largest_of
from multipod.nn.detection.masks import crop_masks
from multipod.nn.detection.matching import BACKGROUND, SECOND_STAGE_MATCHING, TwoThresholds
from multipod.nn.detection.nms import nms
from multipod.nn.detection.pyramid import BiasedConv
from multipod.nn.detection.rpn import SMALL_NORMAL, Proposals
from multipod.nn.images.conv_norm import FAN_OUT, Dtype

TINY_NORMAL = nnx.initializers.normal(0.001)


class BoxHead(nnx.Module):
    """Two dense layers on the features of a region; then logits of the classes, and offsets of a box for each class."""

    def __init__(
        self, features_in: int, hidden: int, classes: int, *, dtype: Dtype = "float32", rngs: nnx.Rngs
    ) -> None:
        wide = jnp.dtype(dtype)
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
        self.first = nnx.Linear(features_in, hidden, kernel_init=init, dtype=wide, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, kernel_init=init, dtype=wide, rngs=rngs)
        self.logits = nnx.Linear(hidden, classes, kernel_init=SMALL_NORMAL, dtype=wide, rngs=rngs)
        self.offsets = nnx.Linear(hidden, 4 * classes, kernel_init=TINY_NORMAL, dtype=wide, rngs=rngs)

    def __call__(self, regions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [..., classes] and offsets [..., classes, 4], float32, of regions [..., size, size, features]."""
        x = regions.reshape(*regions.shape[:-3], -1)
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        offsets = self.offsets(x).astype(jnp.float32)
        return self.logits(x).astype(jnp.float32), offsets.reshape(*offsets.shape[:-1], -1, 4)


class MaskHead(nnx.Module):
    """Four 3x3 convolutions, a doubling by a transposed 2x2 of stride 2, and a 1x1 to a mask for each class.

    Attributes:
      double: [features, 2, 2, features]: what each pixel gives to the four that it becomes.
    """

    def __init__(self, features: int, classes: int, *, dtype: Dtype = "float32", rngs: nnx.Rngs) -> None:
        conv = partial(BiasedConv, features, init=FAN_OUT, whole=True, dtype=dtype, rngs=rngs)
        self.convs = nnx.List([conv(features, 3) for _ in range(4)])
        normal = nnx.initializers.normal((2 / (4 * features)) ** 0.5)
        self.double = nnx.Param(normal(rngs.params(), (features, 2, 2, features)))
        self.double_bias = nnx.Param(jnp.zeros(features))
        self.logits = conv(classes, 1)
        self.dtype = jnp.dtype(dtype)

    def __call__(self, regions: jax.Array) -> jax.Array:
        """Logits [regions, 2 size, 2 size, classes], float32, of regions [regions, size, size, features]."""
        x = regions
        for conv in self.convs:
            x = nnx.relu(conv(x))
        n, h, w, features = x.shape
        x = jnp.einsum("nhwc,cyxd->nhywxd", x.astype(self.dtype), self.double[...].astype(self.dtype))
        x = nnx.relu(x.reshape(n, 2 * h, 2 * w, features) + self.double_bias[...].astype(self.dtype))
        return self.logits(x).astype(jnp.float32)


def of_wanted(
    function: Callable[[jax.Array], jax.Array], boxes: jax.Array, wanted: jax.Array, *, chunk: int = 16
) -> jax.Array:
    """`function(boxes)`, [images, n, ...], where only what comes of some boxes is looked at; the rest may be zeros.

    On CPU the others take no time: boxes go through in chunks, and a chunk of which none is wanted is left out.
    Elsewhere many small steps one after the other take longer than one large one.

    Args:
      function: of boxes [images, any, 4]; each by itself.
      boxes: [images, n, 4].
      wanted: bool [images, n]; best those in front.
      chunk: boxes of an image. Where it does not divide n, all go through.
    """
    images, n, _ = boxes.shape
    if n % chunk:
        return function(boxes)

    def in_chunks(boxes: jax.Array, wanted: jax.Array) -> jax.Array:
        shape = jax.eval_shape(function, boxes[:, :chunk])
        skip = lambda _: jnp.zeros(shape.shape, shape.dtype)  # noqa: E731
        chunks = boxes.reshape(images, -1, chunk, 4).swapaxes(0, 1), wanted.reshape(images, -1, chunk).any((0, 2))
        found = jax.lax.map(lambda one: jax.lax.cond(one[1], function, skip, one[0]), chunks)
        return found.swapaxes(0, 1).reshape(images, n, *shape.shape[2:])

    return jax.lax.platform_dependent(boxes, wanted, cpu=in_chunks, default=lambda boxes, _: function(boxes))


class Regions(NamedTuple):
    """A sample of regions of one image, those that found an object first.

    Attributes:
      box: [sample, 4].
      label: int32 [sample], of the object; 0 for background.
      positive: bool [sample], true for no more than `most_positive`, which come first.
      counts: bool [sample]; false for those that only fill up.
      match: int32 [sample], which object; 0 where there is none.
      offsets: float32 [sample, 4], the object's box in the code; 0 where not positive.
    """

    box: jax.Array
    label: jax.Array
    positive: jax.Array
    counts: jax.Array
    match: jax.Array
    offsets: jax.Array


def sample_regions(
    proposals: Proposals,
    truth: jax.Array,
    labels: jax.Array,
    key: jax.Array,
    *,
    matching: TwoThresholds = SECOND_STAGE_MATCHING,
    code: BoxCode = SECOND_STAGE_CODE,
    sample: int = 512,
    most_positive: int = 128,
) -> Regions:
    """Draws regions of one image to train the second stage with; the objects' own boxes are among the candidates.

    Args:
      proposals: of the image.
      truth: [truths, 4].
      labels: int [truths], from 1; 0 for padding.
      key: of the sample.
      matching: of regions and objects.
      code: of the offsets.
      sample: how many regions.
      most_positive: of them at most.
    """
    valid = labels > 0
    boxes = jax.lax.stop_gradient(jnp.concatenate([proposals.box, truth]))
    candidate = jnp.concatenate([proposals.kept, valid])
    match = jnp.where(candidate, matching(boxes, truth, valid), BACKGROUND)
    draw = jax.random.uniform(key, match.shape)
    positive = largest_of(draw, (match >= 0) & candidate, jnp.int32(most_positive))
    background = largest_of(draw, (match == BACKGROUND) & candidate, sample - positive.sum())
    _, rows = jax.lax.top_k(2.0 * positive + background, min(sample, len(boxes)))
    rows = jnp.pad(rows, (0, sample - len(rows)))
    filled = jnp.arange(sample) < min(sample, len(boxes))
    boxes, match = boxes[rows], jnp.maximum(match[rows], 0)
    positive = positive[rows] & filled
    return Regions(
        boxes,
        jnp.where(positive, labels[match], 0).astype(jnp.int32),
        positive,
        positive | (background[rows] & filled),
        match,
        jnp.where(positive[:, None], code.encode(truth[match], boxes), 0),
    )


def mask_targets(masks: jax.Array, truth: jax.Array, regions: Regions, size: int) -> jax.Array:
    """What the masks of an image's regions are trained for: float32 [regions, size, size], zeros and ones.

    Args:
      masks: bool [truths, m, m], each stretched over its box.
      truth: [truths, 4].
      regions: of the image.
      size: of the targets.
    """
    cut = crop_masks(masks[regions.match], truth[regions.match], regions.box, size)
    return (cut >= 0.5).astype(jnp.float32)


def refine(
    logits: jax.Array,
    offsets: jax.Array,
    proposals: Proposals,
    extent: jax.Array,
    *,
    count: int = 100,
    least_score: float = 0.05,
    overlap: float = 0.5,
    pairs: int = 0,
    code: BoxCode = SECOND_STAGE_CODE,
) -> FoundObjects:
    """The detections of one image: every region with every class, suppressed within the class, the best of all.

    Args:
      logits: [regions, classes], class 0 background.
      offsets: [regions, classes, 4].
      proposals: the regions.
      extent: [2], height and width of the image without its padding, to which boxes are clipped.
      count: how many are returned.
      least_score: a score must be above it.
      overlap: above this IoU a box is suppressed by a better one of its class.
      pairs: how many pairs of a region and a class are looked at, the best; 0: all.
      code: of the offsets.
    """
    classes = logits.shape[-1]
    scores = jnp.where(proposals.kept[:, None], jax.nn.softmax(logits)[:, 1:], 0).reshape(-1)
    best, rows = jax.lax.top_k(scores, min(pairs or len(scores), len(scores)))
    place, label = rows // (classes - 1), rows % (classes - 1) + 1
    box = clip_boxes(code.decode(offsets[place, label], proposals.box[place]), extent[0], extent[1])
    valid = (best > least_score) & (box[:, 2:] - box[:, :2] >= 1e-2).all(-1)
    chosen = nms(box, best, overlap, count=count, valid=valid, groups=label, tile=512)
    kept = chosen >= 0
    return found(box[chosen], best[chosen], label[chosen], place[chosen], kept, count)
