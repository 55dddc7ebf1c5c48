"""Losses of detectors on one image: SSD's, and the parts of Mask R-CNN's. `jax.vmap` makes them of a batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.nn.detection.boxes import SSD_CODE, BoxCode
from multipod.nn.detection.hard_negatives import Ties, hard_negatives
from multipod.nn.detection.matching import BestOverlap
from multipod.nn.detection.rpn import RpnTargets
from multipod.nn.detection.second_stage import Regions


class SsdLosses(NamedTuple):
    """The two sums of an image's loss, each [], not yet divided, and the number of positives."""

    classes: jax.Array
    boxes: jax.Array
    positives: jax.Array

    @property
    def total(self) -> jax.Array:
        """(classes + boxes) / positives; 0 for an image without positives."""
        return jnp.where(self.positives > 0, (self.classes + self.boxes) / jnp.maximum(self.positives, 1), 0)


def ssd_losses(
    logits: jax.Array,
    offsets: jax.Array,
    defaults: jax.Array,
    truth: jax.Array,
    labels: jax.Array,
    *,
    matching: BestOverlap,
    code: BoxCode = SSD_CODE,
    ratio: float = 3.0,
    ties: Ties = "exact",
) -> SsdLosses:
    """SSD's loss of one image, float32.

    Classes: softmax cross-entropy of the positives and of the `ratio` times as many negatives with the largest. Boxes:
    smooth L1 of the positives' offsets, summed.

    Args:
      logits: [boxes, classes], class 0 background.
      offsets: [boxes, 4], in the code.
      defaults: [boxes, 4], corners, in the units of `truth`.
      truth: [truths, 4].
      labels: int [truths], from 1; 0 for padding.
      matching: which default box finds which truth.
      code: of the offsets.
      ratio: negatives for each positive.
      ties: see `hard_negatives`.

    Source: arXiv:1512.02325, equations 1 to 3.
    """
    match = matching(defaults, truth, labels > 0)
    positive = match >= 0
    own = jnp.maximum(match, 0)
    costs = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), jnp.where(positive, labels[own], 0)
    )
    counted = positive | hard_negatives(costs, positive, ratio=ratio, ties=ties)
    distance = smooth_l1(offsets.astype(jnp.float32) - code.encode(truth[own], defaults)).sum(-1)
    return SsdLosses(
        jnp.where(counted, costs, 0).sum(), jnp.where(positive, distance, 0).sum(), positive.sum().astype(jnp.float32)
    )


def smooth_l1(x: jax.Array, beta: float = 1.0) -> jax.Array:
    """x^2 / (2 beta) up to beta, |x| - beta / 2 beyond. Huber's loss of the same limit is `beta` times this.

    Source: arXiv:1504.08083, equation 3, with torchvision's beta.
    """
    size = jnp.abs(x)
    return jnp.where(size < beta, 0.5 * jnp.square(x) / beta, size - 0.5 * beta)


def rpn_losses(
    logits: jax.Array, offsets: jax.Array, targets: RpnTargets, *, beta: float = 1 / 9
) -> tuple[jax.Array, jax.Array]:
    """Objectness and boxes of one image's anchors, each [], float32: over the sample, divided by its size.

    Sigmoid cross-entropy, and smooth L1 of the sampled positives, summed over the coordinates.

    Args:
      logits: [anchors].
      offsets: [anchors, 4].
      targets: of the image.
      beta: of smooth L1.
    """
    number = jnp.maximum(targets.sampled.sum(), 1)
    costs = optax.sigmoid_binary_cross_entropy(logits, targets.positive.astype(jnp.float32))
    distance = smooth_l1(offsets - targets.offsets, beta).sum(-1)
    objectness = jnp.where(targets.sampled, costs, 0).sum() / number
    return objectness, jnp.where(targets.sampled & targets.positive, distance, 0).sum() / number


def region_losses(
    logits: jax.Array, offsets: jax.Array, regions: Regions, *, beta: float = 1 / 9
) -> tuple[jax.Array, jax.Array]:
    """Classes and boxes of one image's regions, each [], float32: over those that count, divided by their number.

    Softmax cross-entropy, and smooth L1 of the positives, of the offsets of their own class.

    Args:
      logits: [regions, classes].
      offsets: [regions, classes, 4].
      regions: with their targets.
      beta: of smooth L1.
    """
    number = jnp.maximum(regions.counts.sum(), 1)
    costs = optax.softmax_cross_entropy_with_integer_labels(logits, regions.label)
    own = jax.nn.one_hot(regions.label, logits.shape[-1])
    distance = smooth_l1(jnp.einsum("rck,rc->rk", offsets, own) - regions.offsets, beta).sum(-1)
    classes = jnp.where(regions.counts, costs, 0).sum() / number
    return classes, jnp.where(regions.positive, distance, 0).sum() / number


def mask_loss(logits: jax.Array, targets: jax.Array, label: jax.Array, positive: jax.Array) -> jax.Array:
    """Sigmoid cross-entropy of the masks of each positive's own class, the mean over their pixels: [], float32.

    Args:
      logits: [regions, size, size, classes].
      targets: [regions, size, size].
      label: int [regions].
      positive: bool [regions].
    """
    own = jnp.einsum("ryxc,rc->ryx", logits, jax.nn.one_hot(label, logits.shape[-1]))
    costs = optax.sigmoid_binary_cross_entropy(own, targets).mean((1, 2))
    return jnp.where(positive, costs, 0).sum() / jnp.maximum(positive.sum(), 1)
