"""Scores of an evaluation, kept on the devices until its end: the device part of the area under the ROC curve.

One transfer at the end takes the place of one a step.
Source: the submission of arXiv:2011.03641, which keeps predictions and labels of all steps so.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import MetricError
from multipod.metrics.hosts import ALONE, ProcessGroup, gather_parts
from multipod.metrics.ranking import PackedScores, area, merge_scores, pack_scores

PADDING, STRANGE = -1, 2


class ScoreBuffer(NamedTuple):
    """Room for the scores of every step; five bytes an example. A pytree: carry it through the evaluation's steps.

    Attributes:
      scores: [steps, rows], float32.
      labels: [steps, rows], int8: 0 or 1, -1 for padding, 2 for a label that is neither 0 nor 1.
      steps: int32, how many are recorded.
    """

    scores: jax.Array
    labels: jax.Array
    steps: jax.Array


def score_buffer(steps: int, rows: int) -> ScoreBuffer:
    """An empty buffer. Rows are those of a batch: split them over the mesh as batches are."""
    return ScoreBuffer(
        jnp.zeros((steps, rows), jnp.float32), jnp.full((steps, rows), PADDING, jnp.int8), jnp.zeros((), jnp.int32)
    )


def record_scores(
    buffer: ScoreBuffer, scores: jax.Array, labels: jax.Array, mask: jax.Array | None = None
) -> ScoreBuffer:
    """The buffer with one more step: scores, labels and mask of shape [rows]. Works inside `jit` and `shard_map`.

    Nothing crosses between devices. Scores are kept as float32. A step more than there is room for is counted and
    lost; `local_scores` then refuses.
    """
    known = (labels == 0) | (labels == 1)
    code = jnp.where(known, labels, STRANGE).astype(jnp.int8)
    code = code if mask is None else jnp.where(mask, code, PADDING)
    here = buffer.steps
    return ScoreBuffer(
        buffer.scores.at[here].set(scores.astype(jnp.float32), mode="drop"),
        buffer.labels.at[here].set(code, mode="drop"),
        here + 1,
    )


def local_scores(buffer: ScoreBuffer) -> PackedScores:
    """The scores on this process's devices, each once.

    Raises:
      MetricError: more steps were recorded than there is room for, or see `pack_scores`.
    """
    steps = int(buffer.steps)
    if steps > len(buffer.scores):
        raise MetricError(f"auc: {steps} steps were recorded, and there is room for {len(buffer.scores)}. Make more.")
    labels, scores = _local(buffer.labels), _local(buffer.scores)
    return pack_scores(labels, scores, labels != PADDING)


def buffered_auc(buffer: ScoreBuffer, hosts: ProcessGroup = ALONE) -> float:
    """The area under the ROC curve over all scores recorded on all hosts; see `multipod.metrics.ranking.auc`.

    Raises:
      MetricError: see `local_scores` and `auc`.
    """
    return area(merge_scores(gather_parts(lambda: local_scores(buffer), PackedScores, hosts)))


def batched_auc(batches: Sequence[tuple[jax.Array, jax.Array, np.ndarray]], hosts: ProcessGroup = ALONE) -> float:
    """The area under the ROC curve over batches of scores, labels and this host's masks; the first two may be split.

    The arrays stay on the devices until here, so that evaluating them waits for nothing.

    Raises:
      MetricError: see `multipod.metrics.ranking.auc`.
    """

    def own() -> PackedScores:
        fetched = [(local_rows(scores), local_rows(labels), mask) for scores, labels, mask in batches]
        scores, labels, masks = (np.concatenate(arrays) for arrays in zip(*fetched, strict=True))
        return pack_scores(labels, scores, masks)

    return area(merge_scores(gather_parts(own, PackedScores, hosts)))


def local_rows(array: jax.Array) -> np.ndarray:
    """What this process holds of an array split by rows, in their order."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    shards.sort(key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def _local(array: jax.Array) -> np.ndarray:
    """What this process holds of an array split by columns; of copies, the first."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    parts = [np.asarray(shard.data) for shard in shards]
    return np.concatenate(parts, axis=1) if parts else np.empty((len(array), 0), array.dtype)
