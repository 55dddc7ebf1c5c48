"""The region proposal network: where on a feature pyramid an object may be (arXiv:1506.01497, section 3.1)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.nn.detection.boxes import RPN_CODE, BoxCode, clip_boxes
from multipod.nn.detection.hard_negatives import largest_of
from multipod.nn.detection.matching import BACKGROUND, RPN_MATCHING, TwoThresholds
from multipod.nn.detection.nms import nms
from multipod.nn.detection.pyramid import BiasedConv
from multipod.nn.images.conv_norm import Dtype

SMALL_NORMAL = nnx.initializers.normal(0.01)


class RpnHead(nnx.Module):
    """Objectness and offsets of the anchors at every cell, from the same three convolutions on every level."""

    def __init__(self, features: int, shapes: int, *, dtype: Dtype = "float32", rngs: nnx.Rngs) -> None:
        self.conv = BiasedConv(features, features, 3, init=SMALL_NORMAL, dtype=dtype, rngs=rngs)
        self.objectness = BiasedConv(features, shapes, 1, init=SMALL_NORMAL, dtype=dtype, rngs=rngs)
        self.offsets = BiasedConv(features, 4 * shapes, 1, init=SMALL_NORMAL, dtype=dtype, rngs=rngs)

    def __call__(self, maps: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """For each level logits [n, anchors] and offsets [n, anchors, 4], float32; anchors by row, column, shape."""
        logits, offsets = [], []
        for level in maps:
            x = nnx.relu(self.conv(level))
            logits.append(self.objectness(x).astype(jnp.float32).reshape(len(x), -1))
            offsets.append(self.offsets(x).astype(jnp.float32).reshape(len(x), -1, 4))
        return logits, offsets


class Proposals(NamedTuple):
    """Regions of an image by falling score, padded.

    Attributes:
      box: float32 [count, 4]; zeros behind the last.
      kept: bool [count], false behind the last.
    """

    box: jax.Array
    kept: jax.Array


def propose(
    logits: Sequence[jax.Array],
    offsets: Sequence[jax.Array],
    anchors: Sequence[jax.Array],
    extent: jax.Array,
    *,
    each: int,
    count: int,
    overlap: float = 0.7,
    least_side: float = 1e-3,
    code: BoxCode = RPN_CODE,
) -> Proposals:
    """The best regions of one image: the best of each level, suppressed within it, and of these the best of all.

    No gradient flows through them.

    Args:
      logits: for each level [anchors].
      offsets: for each level [anchors, 4].
      anchors: for each level [anchors, 4].
      extent: [2], height and width of the image without its padding, to which boxes are clipped.
      each: how many of a level are looked at.
      count: how many are returned.
      overlap: above this IoU a region is suppressed by a better one of its level.
      least_side: a clipped region of a smaller side is dropped, in pixels.
      code: of the offsets.
    """
    boxes, scores, levels = [], [], []
    for number, (logit, offset, anchor) in enumerate(zip(logits, offsets, anchors, strict=True)):
        best, place = jax.lax.top_k(jax.lax.stop_gradient(logit), min(each, len(logit)))
        boxes.append(code.decode(jax.lax.stop_gradient(offset)[place], anchor[place]))
        scores.append(best)
        levels.append(jnp.full(len(place), number, jnp.int32))
    box, score = clip_boxes(jnp.concatenate(boxes), extent[0], extent[1]), jnp.concatenate(scores)
    large = (box[:, 2:] - box[:, :2] >= least_side).all(-1)
    rows = nms(box, score, overlap, count=count, valid=large, groups=jnp.concatenate(levels), tile=512)
    return Proposals(jnp.where((rows >= 0)[:, None], box[rows], 0), rows >= 0)


class RpnTargets(NamedTuple):
    """What the anchors of one image are trained for.

    Attributes:
      positive: bool [anchors], matched to an object.
      sampled: bool [anchors], chosen for the loss of objectness, positive or not.
      offsets: float32 [anchors, 4]; 0 where not positive.
    """

    positive: jax.Array
    sampled: jax.Array
    offsets: jax.Array


def rpn_targets(
    anchors: jax.Array,
    truth: jax.Array,
    valid: jax.Array,
    key: jax.Array,
    *,
    matching: TwoThresholds = RPN_MATCHING,
    code: BoxCode = RPN_CODE,
    sample: int = 256,
    most_positive: int = 128,
) -> RpnTargets:
    """Matches anchors [anchors, 4] to objects and draws a sample: up to `most_positive`, the rest background.

    Args:
      anchors: of all levels.
      truth: [truths, 4].
      valid: bool [truths]; false for padding.
      key: of the sample.
      matching: of anchors and objects.
      code: of the offsets.
      sample: anchors in the sample; fewer if there are not as many.
      most_positive: of them at most.
    """
    match = matching(anchors, truth, valid)
    positive = match >= 0
    draw = jax.random.uniform(key, match.shape)
    chosen = largest_of(draw, positive, jnp.int32(most_positive))
    background = largest_of(draw, match == BACKGROUND, sample - chosen.sum())
    offsets = jnp.where(positive[:, None], code.encode(truth[jnp.maximum(match, 0)], anchors), 0)
    return RpnTargets(positive, chosen | background, offsets)
