"""Masks of objects: a square one for each box, pasted into the image or cut anew for another box."""

import jax
import jax.numpy as jnp


def paste_masks(masks: jax.Array, boxes: jax.Array, height: int, width: int) -> jax.Array:
    """Each square mask, stretched over its box, in an image of zeros: [n, m, m] and [n, 4] to [n, height, width].

    Values are those of torchvision's `paste_masks_in_image`: a border of zeros is added, the box grows by as much, its
    corners are cut to whole pixels, the last of which is inside, and the mask is interpolated bilinearly. Probabilities
    stay such; cut them at 0.5 afterwards. Every mask costs height * width * m multiply-adds.

    Args:
      masks: [n, m, m], rows first.
      boxes: [n, 4] in pixels, inside the image or not.
      height: of the image.
      width: likewise.
    """
    side = masks.shape[-1]
    centre, half = (boxes[:, :2] + boxes[:, 2:]) * 0.5, (boxes[:, 2:] - boxes[:, :2]) * 0.5 * ((side + 2) / side)
    low, high = jnp.trunc(centre - half), jnp.trunc(centre + half)
    rows = _stretch(low[:, 1], high[:, 1], side, height)
    columns = _stretch(low[:, 0], high[:, 0], side, width)
    return jnp.einsum("nyi,nij,nxj->nyx", rows, masks, columns)


def crop_masks(masks: jax.Array, boxes: jax.Array, rois: jax.Array, size: int) -> jax.Array:
    """The part of each mask that lies in a region, at size x size points: [n, m, m] to [n, size, size].

    The points are the centres of size x size bins of the region; the mask is interpolated bilinearly between the
    centres of its pixels and is 0 outside its box. A training target is where this is at least 0.5.

    Args:
      masks: [n, m, m], each stretched over its box.
      boxes: [n, 4], of the masks.
      rois: [n, 4], the regions, in the same units.
      size: points along each side.
    """
    rows = _cut(boxes[:, 1], boxes[:, 3], rois[:, 1], rois[:, 3], masks.shape[-2], size)
    columns = _cut(boxes[:, 0], boxes[:, 2], rois[:, 0], rois[:, 2], masks.shape[-1], size)
    return jnp.einsum("nyi,nij,nxj->nyx", rows, masks.astype(jnp.float32), columns)


def _stretch(low: jax.Array, high: jax.Array, side: int, length: int) -> jax.Array:
    """[n, length, side]: how much of each row of a mask with a border of zeros a pixel of the image takes."""
    pixel = jnp.arange(length, dtype=jnp.float32)
    sides = jnp.maximum(high - low + 1, 1)[:, None]
    place = (pixel - low[:, None] + 0.5) * ((side + 2) / sides) - 0.5
    weights = _between(jnp.clip(place, 0, side + 1) - 1, side)
    return jnp.where(((pixel >= low[:, None]) & (pixel <= high[:, None]))[..., None], weights, 0)


def _cut(low: jax.Array, high: jax.Array, roi_low: jax.Array, roi_high: jax.Array, side: int, size: int) -> jax.Array:
    along = (jnp.arange(size) + 0.5) / size
    point = roi_low[:, None] + along * (roi_high - roi_low)[:, None]
    length = jnp.maximum(high - low, 1e-6)[:, None]
    return _between((point - low[:, None]) / length * side - 0.5, side)


def _between(place: jax.Array, side: int) -> jax.Array:
    """[..., side]: weights of linear interpolation at `place`; pixels outside are 0."""
    return jnp.maximum(1 - jnp.abs(place[..., None] - jnp.arange(side)), 0)
