"""Which objects of an image a detector misses, and what it takes for one: for people who look at pictures."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from multipod.metrics.coco import Detections

SURE = 0.5
"""Detections of a lower score are not looked at."""
OVERLAP = 0.5
"""The IoU from which a detection of an object's class has found it."""


@dataclass(frozen=True, eq=False)
class ImageResult:
    """The objects of one image and what was found there; crowds are left out.

    Attributes:
      image: its id.
      truth: its annotations, as COCO has them.
      found: rows of the detections that are sure, by falling score.
      missed: bool, one for each of `truth`.
      false: bool, one for each of `found`: a wrong place, a wrong class, or an object found twice.
    """

    image: int
    truth: tuple[dict[str, Any], ...]
    found: np.ndarray
    missed: np.ndarray
    false: np.ndarray

    @property
    def faults(self) -> int:
        """How many objects were missed and detections false."""
        return int(self.missed.sum() + self.false.sum())


def judge_images(truth: dict[str, Any], found: Detections) -> list[ImageResult]:
    """Judges each image of the ground truth by itself; detections take objects by falling score."""
    objects: dict[int, list[dict[str, Any]]] = {one["id"]: [] for one in truth["images"]}
    for one in truth["annotations"]:
        if not one.get("iscrowd"):
            objects[one["image_id"]].append(one)
    return [_judge(image, tuple(own), found) for image, own in objects.items()]


def _judge(image: int, truth: tuple[dict[str, Any], ...], found: Detections) -> ImageResult:
    rows = np.flatnonzero((found.image == image) & (found.score >= SURE))
    rows = rows[np.argsort(-found.score[rows], kind="stable")]
    boxes = np.array([one["bbox"] for one in truth], float).reshape(-1, 4)
    classes = np.array([one["category_id"] for one in truth], int)
    missed, false = np.ones(len(truth), bool), np.ones(len(rows), bool)
    for number, row in enumerate(rows.tolist()):
        fits = np.where(missed & (classes == found.category[row]), _iou(boxes, found.box[row]), 0)
        if len(fits) and fits.max() >= OVERLAP:
            missed[int(fits.argmax())] = false[number] = False
    return ImageResult(image, truth, rows, missed, false)


def _iou(boxes: np.ndarray, box: np.ndarray) -> np.ndarray:
    """IoU of boxes [n, 4] with one, all as left, top, width, height."""
    low = np.maximum(boxes[:, :2], box[:2])
    high = np.minimum(boxes[:, :2] + boxes[:, 2:], box[:2] + box[2:])
    shared = np.maximum(high - low, 0).prod(1)
    return shared / np.maximum(boxes[:, 2:].prod(1) + box[2:].prod() - shared, 1e-12)
