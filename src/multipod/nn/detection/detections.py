"""From a detector's scores and boxes to a list of detections of fixed length. For one image; `jax.vmap` for a batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from multipod.nn.detection.nms import nms


class FoundObjects(NamedTuple):
    """The detections of an image by falling score, padded.

    Attributes:
      box: float32 [count, 4]; zeros behind the last.
      score: float32 [count]; 0 behind the last.
      label: int32 [count], from 1; 0 behind the last.
      place: int32 [count], which of the boxes given; 0 behind the last.
      kept: bool [count], false behind the last.
    """

    box: jax.Array
    score: jax.Array
    label: jax.Array
    place: jax.Array
    kept: jax.Array


def best_of_each_class(
    boxes: jax.Array,
    probabilities: jax.Array,
    *,
    each: int = 200,
    count: int = 200,
    least_score: float = 0.05,
    overlap: float = 0.5,
    inclusive: bool = True,
) -> FoundObjects:
    """SSD's choice: the best of each class, suppressed within it, then the best of all classes.

    Args:
      boxes: [n, 4].
      probabilities: [n, classes], class 0 background.
      each: how many of a class are looked at.
      count: how many are returned.
      least_score: a score must be above it.
      overlap: the IoU that suppresses.
      inclusive: whether `overlap` itself does.

    Source: arXiv:1512.02325, section 3.1, with the numbers of the MLPerf reference.
    """
    each = min(each, len(boxes))
    scores, places = jax.lax.top_k(probabilities[:, 1:].T.astype(jnp.float32), each)

    def of_class(scores: jax.Array, places: jax.Array) -> jax.Array:
        return nms(
            boxes[places],
            scores,
            overlap,
            count=each,
            valid=scores > least_score,
            inclusive=inclusive,
            tile=each,
        )

    rows = jax.vmap(of_class)(scores, places)
    kept, rows = rows >= 0, jnp.maximum(rows, 0)
    scores = jnp.where(kept, jnp.take_along_axis(scores, rows, 1), -1).reshape(-1)
    places = jnp.take_along_axis(places, rows, 1).reshape(-1)
    best, chosen = jax.lax.top_k(scores, min(count, len(scores)))
    return found(boxes[places[chosen]], best, chosen // each + 1, places[chosen], best > least_score, count)


def found(
    box: jax.Array, score: jax.Array, label: jax.Array, place: jax.Array, kept: jax.Array, count: int
) -> FoundObjects:
    """`FoundObjects` of up to `count` detections that are in order, those not `kept` behind the others."""
    parts = (box, score, label.astype(jnp.int32), place.astype(jnp.int32))
    masked = [jnp.where(kept.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in parts]
    short = count - len(kept)
    return FoundObjects(*(jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1)) for x in (*masked, kept)))
