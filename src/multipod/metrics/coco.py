"""Average precision of boxes and masks on COCO over many hosts. Needs the extra `detection`; nothing here needs JAX.

faster-coco-eval judges: pycocotools' numbers by the same steps in C++ (docs/results/detection.md has the times;
tests compare the two). What is ours is the way there: detections leave the devices in blocks of fixed size with their
padding, and are gathered from all hosts; `multipod.metrics.judge` judges beside training.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from multipod.errors import MetricError
from multipod.extras import require

PRECISIONS = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
NAMES = (*PRECISIONS, "AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large")
"""pycocotools' twelve numbers in its order; -1 where the ground truth has nothing of the kind."""

KINDS = {"box": "bbox", "mask": "segm"}

GroundTruth = dict[str, Any]
"""What an annotation file of COCO holds: `images`, `annotations`, `categories`."""


@dataclass(frozen=True)
class Detections:
    """What a model found on some images.

    Attributes:
      image: [detections], the image's id.
      box: [detections, 4], x and y of the corner with the least of both, width, height, in pixels of the original.
      score: [detections].
      category: [detections], the category's id.
      mask: one run-length code a detection, as `pycocotools.mask.encode` makes them; None if only boxes were found.
    """

    image: np.ndarray
    box: np.ndarray
    score: np.ndarray
    category: np.ndarray
    mask: tuple[dict[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.image)
        shapes = {"image": (n,), "box": (n, 4), "score": (n,), "category": (n,)}
        wrong = [f"{k} {np.shape(getattr(self, k))}" for k, shape in shapes.items() if getattr(self, k).shape != shape]
        wrong += [f"mask ({len(self.mask)},)"] if self.mask is not None and len(self.mask) != n else []
        if wrong:
            raise MetricError(f"coco: {n} images of detections, and shapes {', '.join(wrong)}. Give one row each.")
        bad = ~(np.isfinite(self.score) & np.isfinite(self.box).all(1))
        if bad.any():
            k = int(np.argmax(bad))
            raise MetricError(
                f"coco: detection {k} (image {self.image[k]}) has score {self.score[k]} and box "
                f"{self.box[k].tolist()}, the first of {bad.sum():,} that are not finite. Find what overflows there."
            )

    def __len__(self) -> int:
        return len(self.image)


def detections(image: ArrayLike, box: ArrayLike, score: ArrayLike, category: ArrayLike, kept: ArrayLike) -> Detections:
    """One batch as it leaves the devices, without its padding.

    Args:
      image: [images], ids.
      box: [images, slots, 4], x, y, width, height.
      score: [images, slots].
      category: [images, slots].
      kept: [images] or [images, slots], booleans: false for padding.
    """
    image, box, score, category, kept = map(np.asarray, (image, box, score, category, kept))
    kept = np.broadcast_to(kept.reshape(*kept.shape, *(1,) * (2 - kept.ndim)), score.shape)
    ids = np.broadcast_to(image[:, None], score.shape)
    return Detections(ids[kept], box[kept], score[kept], category[kept])


def merge_detections(parts: Sequence[Detections]) -> Detections:
    """All detections of several batches or hosts, in their order.

    Raises:
      MetricError: some parts have masks and others do not, or the same image stands in two parts.
    """
    full = [(k, part) for k, part in enumerate(parts) if len(part)]
    if not full:
        return Detections(np.empty(0, np.int64), np.empty((0, 4)), np.empty(0), np.empty(0, np.int64))
    with_masks = [k for k, part in full if part.mask is not None]
    if with_masks and len(with_masks) < len(full):
        without = next(k for k, part in full if part.mask is None)
        raise MetricError(
            f"coco: part {with_masks[0]} has masks, part {without} none. Give masks for all, or for none."
        )
    seen: dict[int, int] = {}
    for k, part in full:
        for image in np.unique(part.image).tolist():
            if seen.setdefault(image, k) != k:
                raise MetricError(
                    f"coco: image {image} has detections in part {seen[image]} and in part {k}: it was evaluated "
                    "twice. Mask the examples that only pad the last batch."
                )
    image, box, score, category = (
        np.concatenate([getattr(part, name) for _, part in full]) for name in ("image", "box", "score", "category")
    )
    masks = tuple(code for _, part in full for code in part.mask or ()) if with_masks else None
    return Detections(image, box, score, category, masks)


def check(truth: GroundTruth, found: Detections, kind: str) -> None:
    """Refuses what cannot be judged.

    Raises:
      MetricError: `kind` is unknown, images or categories are not in `truth`, masks are missing, or `truth` is empty.
    """
    if kind not in KINDS:
        raise MetricError(f"coco: kind {kind!r}. Known: {', '.join(KINDS)}.")
    if not truth.get("images") or not truth.get("annotations"):
        raise MetricError("coco: the ground truth has no images or no annotations. Give that of the evaluation set.")
    for name, ids in (("image", found.image), ("category", found.category)):
        known = [one["id"] for one in truth["images" if name == "image" else "categories"]]
        strange = np.setdiff1d(ids, known)
        if len(strange):
            raise MetricError(
                f"coco: {name} {strange[0]} of the detections is not in the ground truth, nor are {len(strange) - 1:,} "
                "more. Map the model's numbers to COCO's ids, which have gaps."
            )
    if kind == "mask" and found.mask is None and len(found):
        raise MetricError("coco: masks are to be judged, and the detections have none. Give them `mask`.")


def average_precision(truth: GroundTruth, found: Detections, kind: str = "box") -> dict[str, float]:
    """pycocotools' twelve numbers (`NAMES`), for boxes or masks.

    Holds Python's lock, and sends what pycocotools prints nowhere, which is not safe beside other threads that
    print: `multipod.metrics.judge` does it in a process of its own. `truth` is left as it is.

    Raises:
      MetricError: `kind` is unknown, images or categories are not in `truth`, masks are missing, or `truth` is empty.
    """
    check(truth, found, kind)
    with contextlib.redirect_stdout(io.StringIO()):
        judged = _judged(truth, found, kind)
        judged.summarize()
    return dict(zip(NAMES, map(float, judged.stats), strict=True))


CURVES = {"0.50": slice(0, 1), "0.75": slice(5, 6), "0.50 to 0.95": slice(0, 10)}
"""The IoUs of `precision_recall`, and which of pycocotools' ten thresholds they are."""


def precision_recall(truth: GroundTruth, found: Detections, kind: str = "box") -> dict[str, np.ndarray]:
    """Precision at recalls of 0, 0.01, ..., 1 by the IoUs of `CURVES`: means over categories, [101] each.

    All sizes, and no more than 100 detections of an image, as for the `AP` of `average_precision`, which is the mean of
    the last curve.

    Raises:
      MetricError: see `average_precision`.
    """
    check(truth, found, kind)
    with contextlib.redirect_stdout(io.StringIO()):
        precision = _judged(truth, found, kind).eval["precision"][:, :, :, 0, -1]  # [IoUs, recalls, categories]
    there = precision[:, :, (precision >= 0).any((0, 1))]
    return {name: there[which].mean((0, 2)) for name, which in CURVES.items()}


def _judged(truth: GroundTruth, found: Detections, kind: str) -> Any:
    """The evaluator, which has judged."""
    coco, evaluator = _evaluator()
    right = coco()
    # It writes `ignore` and run-length codes into the annotations.
    right.dataset = {**truth, "annotations": [dict(one) for one in truth["annotations"]]}
    right.createIndex()
    judged = evaluator(right, _results(coco, right, found, kind), KINDS[kind])
    judged.evaluate()
    judged.accumulate()
    return judged


def _results(coco: Any, right: Any, found: Detections, kind: str) -> Any:
    """The detections as COCO's evaluators want them; with masks without the boxes, whose areas would be taken."""
    rows = zip(found.image.tolist(), found.category.tolist(), found.score.tolist(), strict=True)
    what = [{"bbox": box} for box in found.box.tolist()]
    if kind == "mask":
        what = [{"segmentation": dict(code)} for code in found.mask or ()]
    results = [
        {"image_id": image, "category_id": category, "score": score, **one}
        for (image, category, score), one in zip(rows, what, strict=True)
    ]
    if results:
        return right.loadRes(results)
    none = coco()
    none.dataset = {**right.dataset, "annotations": []}
    none.createIndex()
    return none


def _evaluator() -> tuple[Any, Any]:
    require("coco", "faster_coco_eval")
    from faster_coco_eval import COCO, COCOeval_faster

    return COCO, COCOeval_faster
