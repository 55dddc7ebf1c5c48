"""What an evaluation detected, from the devices to COCO's average precision."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from multipod.data.source import HasGroundTruth, Source
from multipod.errors import MetricError
from multipod.metrics.coco import PRECISIONS, Detections, detections, merge_detections
from multipod.metrics.coco_masks import encode_masks
from multipod.metrics.hosts import ProcessGroup
from multipod.metrics.judge import Judge
from multipod.metrics.scores import local_rows

Batches = Sequence[tuple[dict[str, Any], np.ndarray]]
"""What was detected in each batch (`metrics.objective.Detects`), split over the mesh, and this process's mask."""


class PendingJudgement:
    """The average precision of an evaluation, judged in another process.

    All processes make one and call `values` at the same points of a run: both are collectives.
    """

    def __init__(self, batches: Batches, kinds: tuple[str, ...], test: Source, hosts: ProcessGroup) -> None:
        """Hands over what was detected.

        Raises:
          MetricError: the test data have no ground truth, or see `multipod.metrics.coco`.
        """
        if not isinstance(test, HasGroundTruth):
            raise MetricError(
                f"evaluation: {type(test).__name__} has no ground truth to judge detections by. Give it the methods of "
                "`multipod.data.source.HasGroundTruth`, or take another objective."
            )
        self._judge = Judge(test.ground_truth("mask" in kinds), kinds, hosts)
        self._judge.submit(0, local_detections(batches, kinds, test))

    def values(self, wait: bool) -> dict[str, float] | None:
        """`box_AP` and its parts, and those of masks; None while it is judged, unless it shall `wait`.

        Raises:
          MetricError: what `average_precision` refuses.
        """
        finished = self._judge.finished(wait)
        if not finished:
            return None
        self._judge.close()
        return {f"{kind}_{name}": values[name] for kind, values in finished[0].items() for name in PRECISIONS}


def local_detections(batches: Batches, kinds: tuple[str, ...], test: HasGroundTruth) -> Detections:
    """What this process's rows of the batches detected, without padding."""
    return merge_detections([_of_batch(batch, mask, test, "mask" in kinds) for batch, mask in batches])


def _of_batch(batch: dict[str, Any], mask: np.ndarray, test: HasGroundTruth, masks: bool) -> Detections:
    """The detections of this process's rows."""
    rows = {name: local_rows(array) for name, array in batch.items()}
    kept = rows["kept"] & mask[:, None]
    found = detections(rows["image_id"], rows["box"], rows["score"], test.categories(rows["label"]), kept)
    if not masks:
        return found
    codes: list[dict[str, Any]] = []
    ends = np.concatenate([[0], np.cumsum(kept.sum(1))])
    for row, (first, end) in enumerate(pairwise(ends.tolist())):
        height, width = rows["size"][row].tolist()
        codes += encode_masks(rows["mask"][row][kept[row]], found.box[first:end], height, width)
    return Detections(found.image, found.box, found.score, found.category, tuple(codes))
