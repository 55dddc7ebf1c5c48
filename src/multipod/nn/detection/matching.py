"""Which ground truth each box is trained to find: SSD's way and Mask R-CNN's.

Ground truth is padded to a fixed number of boxes; `valid` says which are real. All functions are for one image:
`jax.vmap` makes them functions of a batch.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from multipod.nn.detection.boxes import box_iou

BACKGROUND = -1
"""In a match: no ground truth, trained as background."""
IGNORED = -2
"""In a match: neither, not trained at all."""


@dataclass(frozen=True)
class BestOverlap:
    """SSD's matching: the ground truth of largest overlap if that is enough; and each ground truth has its best box.

    A ground truth's best box is matched to it whatever the overlap. Of ground truths of equal overlap a box takes the
    first, and so does a ground truth of boxes.

    Attributes:
      threshold: the least IoU.
      inclusive: whether the threshold itself is enough.
      last_wins: of several ground truths with the same best box, whether the last or the first has it.

    Source: arXiv:1512.02325, section 2.2.
    """

    threshold: float = 0.5
    inclusive: bool = False
    last_wins: bool = True

    def __call__(self, boxes: jax.Array, truth: jax.Array, valid: jax.Array) -> jax.Array:
        """For each box the number of its ground truth, or `BACKGROUND`: int32 [boxes].

        Args:
          boxes: [boxes, 4], in the units of `truth`.
          truth: [truths, 4].
          valid: bool [truths]; false for padding.
        """
        overlap = _overlaps(truth, boxes, valid)
        best = overlap.argmax(0)
        match = jnp.where(_reaches(overlap.max(0), self.threshold, self.inclusive), best, BACKGROUND)
        number = jnp.arange(len(truth))[:, None]
        forced = (overlap.argmax(1)[:, None] == jnp.arange(len(boxes))) & valid[:, None]
        owner = jnp.where(forced, number, -1).max(0) if self.last_wins else jnp.where(forced, number, len(truth)).min(0)
        return jnp.where(forced.any(0), owner, match).astype(jnp.int32)


REFERENCE_SSD = BestOverlap()
"""As the MLPerf reference matches."""
GOOGLE_SSD = BestOverlap(inclusive=True, last_wins=False)
"""As Google's MLPerf submissions match."""


@dataclass(frozen=True)
class TwoThresholds:
    """Mask R-CNN's matching: enough overlap is a match, too little is background, what lies between is ignored.

    Attributes:
      high: the least IoU of a match.
      low: below it a box is background.
      keep_best: also match the boxes that have the largest overlap of some ground truth (all of them, if several have
        it), if it is above 0; each to the ground truth of its own largest overlap, as torchvision and Detectron do.
      inclusive: whether `high` itself is a match.

    Source: arXiv:1506.01497, section 3.1.2.
    """

    high: float = 0.7
    low: float = 0.3
    keep_best: bool = True
    inclusive: bool = True

    def __call__(self, boxes: jax.Array, truth: jax.Array, valid: jax.Array) -> jax.Array:
        """For each box the number of its ground truth, `BACKGROUND` or `IGNORED`: int32 [boxes].

        Args:
          boxes: [boxes, 4], in the units of `truth`.
          truth: [truths, 4].
          valid: bool [truths]; false for padding.
        """
        overlap = _overlaps(truth, boxes, valid)
        best, most = overlap.argmax(0), overlap.max(0)
        match = jnp.where(_reaches(most, self.high, self.inclusive), best, IGNORED)
        match = jnp.where(most < self.low, BACKGROUND, match)
        if not self.inclusive and self.low == self.high:  # nothing lies between
            match = jnp.where(match == IGNORED, BACKGROUND, match)
        if self.keep_best:
            largest = overlap.max(1, keepdims=True)
            kept = ((overlap == largest) & (largest > 0)).any(0)
            match = jnp.where(kept, best, match)
        return match.astype(jnp.int32)


RPN_MATCHING = TwoThresholds()
SECOND_STAGE_MATCHING = TwoThresholds(0.5, 0.5, keep_best=False)
"""As torchvision and Detectron match proposals; Google's code wants more than 0.5: `inclusive` false."""


def _overlaps(truth: jax.Array, boxes: jax.Array, valid: jax.Array) -> jax.Array:
    """IoU [truths, boxes]; -1 for padding."""
    return jnp.where(valid[:, None], box_iou(truth, boxes), -1)


def _reaches(overlap: jax.Array, threshold: float, inclusive: bool) -> jax.Array:
    return overlap >= threshold if inclusive else overlap > threshold
