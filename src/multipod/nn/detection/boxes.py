"""Boxes: area, overlap, clipping, and the code in which detectors predict them.

A box is [x0, y0, x1, y1], corner with the least of both first, as in torchvision; any number of dims stand in front of
the 4. Units are the caller's: pixels, or shares of the image's sides. x grows along the width, y along the height. A
box whose sides are not in order is empty: its area is 0.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LEAST_SIDE = 1e-20
"""What a side of 0 is coded as, so that padding has finite codes and gradients."""
RATIO_LIMIT = math.log(1000 / 16)
"""The largest logarithm of a predicted side over its anchor's: 1,000 pixels from 16, as in Mask R-CNN."""


def box_area(boxes: jax.Array) -> jax.Array:
    """The area of each box: [..., 4] to [...]; 0 for an empty one."""
    sides = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    return sides[..., 0] * sides[..., 1]


def box_iou(first: jax.Array, second: jax.Array) -> jax.Array:
    """Intersection over union of every pair: [..., n, 4] and [..., m, 4] to [..., n, m]; 0 between two empty boxes.

    torchvision's `box_iou` is NaN there. The gradient is finite everywhere.
    """
    low = jnp.maximum(first[..., :, None, :2], second[..., None, :, :2])
    high = jnp.minimum(first[..., :, None, 2:], second[..., None, :, 2:])
    sides = jnp.maximum(high - low, 0)
    shared = sides[..., 0] * sides[..., 1]
    union = box_area(first)[..., :, None] + box_area(second)[..., None, :] - shared
    return jnp.where(union > 0, shared / jnp.where(union > 0, union, 1), 0)


def clip_boxes(boxes: jax.Array, height: jax.Array | float, width: jax.Array | float) -> jax.Array:
    """The part of each box inside an image whose sides go from 0 to `height` and `width`: [..., 4].

    Boxes outside the image become empty ones on its border.
    """
    limit = jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(side, boxes.dtype) for side in (width, height) * 2)), -1)
    return jnp.clip(boxes, 0, limit)


def flip_boxes(boxes: jax.Array, width: jax.Array | float) -> jax.Array:
    """Boxes of the image mirrored left to right: [..., 4]."""
    x0, y0, x1, y1 = (boxes[..., k] for k in range(4))
    return jnp.stack([width - x1, y0, width - x0, y1], -1)


def corners_to_centres(boxes: jax.Array) -> jax.Array:
    """[x0, y0, x1, y1] to [cx, cy, width, height]."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return jnp.concatenate([boxes[..., :2] + sides / 2, sides], -1)


def centres_to_corners(boxes: jax.Array) -> jax.Array:
    """[cx, cy, width, height] to [x0, y0, x1, y1]."""
    half = boxes[..., 2:] / 2
    return jnp.concatenate([boxes[..., :2] - half, boxes[..., :2] + half], -1)


@dataclass(frozen=True)
class BoxCode:
    """How a box is told relative to an anchor: shifts of the centre over the anchor's sides, logarithms of the sides.

    With sides w = x1 - x0 + pixel and centres cx = x0 + w / 2 (and so for h, cy), a for the anchor:

        (wx (cx - cxa) / wa, wy (cy - cya) / ha, ww ln(w / wa), wh ln(h / ha))

    Attributes:
      weights: (wx, wy, ww, wh). SSD and Mask R-CNN's second stage: (10, 10, 5, 5), which is 1 over the "variances"
        0.1 and 0.2; the RPN: 1 each.
      pixel: 0; or 1, where corners are the first and last pixel of a box, as in Detectron. Google's RPN encodes with 0
        and decodes with 1: use two codes for that.
      limit: the largest logarithm that is decoded, before weights; None for none.

    Source: arXiv:1311.2524, equations 1 to 4 (Appendix C).
    """

    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    pixel: float = 0.0
    limit: float | None = RATIO_LIMIT

    def encode(self, boxes: jax.Array, anchors: jax.Array) -> jax.Array:
        """The code of `boxes` relative to `anchors`: both [..., 4], float32.

        Sides of 0, of padding for example, are coded as `LEAST_SIDE`.
        """
        centre, sides = self._centre_and_sides(boxes)
        anchor_centre, anchor_sides = self._centre_and_sides(anchors)
        anchor_sides = jnp.maximum(anchor_sides, LEAST_SIDE)
        shift = (centre - anchor_centre) / anchor_sides
        growth = jnp.log(jnp.maximum(sides, LEAST_SIDE)) - jnp.log(anchor_sides)
        return jnp.concatenate([shift, growth], -1) * jnp.asarray(self.weights, jnp.float32)

    def decode(self, codes: jax.Array, anchors: jax.Array) -> jax.Array:
        """The boxes that `codes` tell relative to `anchors`: both [..., 4], float32."""
        centre, sides = self._centre_and_sides(anchors)
        codes = codes.astype(jnp.float32) / jnp.asarray(self.weights, jnp.float32)
        growth = codes[..., 2:] if self.limit is None else jnp.minimum(codes[..., 2:], self.limit)
        centre, half = centre + codes[..., :2] * sides, jnp.exp(growth) * sides / 2
        return jnp.concatenate([centre - half, centre + half - self.pixel], -1)

    def _centre_and_sides(self, boxes: jax.Array) -> tuple[jax.Array, jax.Array]:
        boxes = jnp.asarray(boxes, jnp.float32)
        sides = boxes[..., 2:] - boxes[..., :2] + self.pixel
        return boxes[..., :2] + sides / 2, sides


SSD_CODE = BoxCode((10.0, 10.0, 5.0, 5.0), limit=None)
RPN_CODE = BoxCode()
SECOND_STAGE_CODE = BoxCode((10.0, 10.0, 5.0, 5.0))
"""Of Mask R-CNN's box head as torchvision has it; the reference's has `pixel` 1."""
