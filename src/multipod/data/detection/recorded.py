"""Images with objects in TFRecords, as TensorFlow's detection models and MLPerf's submissions keep COCO.

A record is an image: `image/encoded`, `image/height`, `image/width`, `image/source_id`, and for its objects, in one
order, `image/object/bbox/xmin`, `xmax`, `ymin`, `ymax` in shares of the sides, `image/object/class/label`, ids of COCO,
and perhaps `image/object/is_crowd`, `image/object/area` and `image/object/mask`, a PNG each.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.detection.annotations import (
    AnnotationEntry,
    AnnotationFile,
    CategoryEntry,
    ImageEntry,
    checked_annotations,
)
from multipod.data.detection.coco import CocoImages, shown_images
from multipod.data.detection.objects import AnnotationFault, Objects, Outline
from multipod.data.files.disk import Damaged
from multipod.data.files.match import match_files
from multipod.data.files.records import Record
from multipod.data.files.tfrecord import TFRecords, open_tfrecords
from multipod.data.images.decode import decode
from multipod.errors import DataError

COCO_IDS = tuple(k for k in range(1, 91) if k not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
"""The ids of COCO's 80 categories."""
EACH = 100_000
"""An object's id is its place in its record, and so many times the record's number."""


@dataclass(frozen=True, eq=False)
class RecordedImages(CocoImages):
    """Images of TFRecords; their annotations were read once, pixels and masks are when they are asked for.

    Attributes:
      records: of all images of `annotations`, and perhaps damaged ones.
      places: int64, for each image of `annotations` its record.
      damaged: records that cannot be read.
    """

    records: TFRecords | None = None
    places: np.ndarray | None = None
    damaged: tuple[AnnotationFault, ...] = ()

    def pixels(self, number: int) -> np.ndarray:
        """The image, decoded.

        Raises:
          Damaged: it is cut, or of another size than its record says.
        """
        image = decode(self._record(number)["image/encoded"])
        height, width = self.size(number)
        if image.shape[:2] != (height, width):
            raise Damaged(f"it is {image.shape[1]} x {image.shape[0]}, and its record says {width} x {height}")
        return image

    def objects(self, number: int) -> Objects:
        """The objects in the image."""
        plain = self.annotations.objects(int(self.numbers[number]), False)
        return Objects(plain.box, plain.label, plain.crowd, self._outlines(number) if self.masks else ())

    def name(self, number: int) -> str:
        """The file and the place in it."""
        assert self.records is not None
        return self.records.name(self._place(number))

    def faults(self) -> tuple[AnnotationFault, ...]:
        """What was left out, and which images have too many objects."""
        return (*self.damaged, *super().faults())

    def ground_truth(self, masks: bool) -> dict[str, Any]:
        """The annotations of these images."""
        truth = self.annotations.ground_truth(self.numbers, False)
        if masks:
            outlines = [one for number in range(len(self)) for one in self._outlines(number)]
            pairs = zip(truth["annotations"], outlines, strict=True)
            truth["annotations"] = [one | {"segmentation": outline} for one, outline in pairs]
        return truth

    def _place(self, number: int) -> int:
        assert self.places is not None
        return int(self.places[self.numbers[number]])

    def _record(self, number: int) -> Record:
        assert self.records is not None
        return self.records.record(self._place(number))

    def _outlines(self, number: int) -> tuple[Outline, ...]:
        masks = several(self._record(number), "image/object/mask")
        entries = self.annotations.entries[int(self.numbers[number])]
        return tuple(_outline(masks[one.id % EACH]) for one in entries)


def recorded_images(
    files: str, categories: tuple[int, ...], keep_ids: bool, masks: bool, empty: bool, limit: int
) -> RecordedImages:
    """The images of all TFRecords that `files` names; without `empty` only those with an object that is no crowd.

    Raises:
      DataError: there are none, one lacks a field, an id stands twice, or no annotation can be used.
    """
    paths = match_files(files, "TFRecords")
    records = open_tfrecords(paths)
    parsed = AnnotationFile([], [CategoryEntry(one, str(one)) for one in categories])
    places, damaged = [], []
    for number in range(len(records)):
        try:
            record = records.record(number)
        except Damaged as error:
            damaged.append(AnnotationFault(records.name(number), str(error)))
            continue
        places.append(number)
        try:
            _add(parsed, record, number, masks)
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(
                f"{records.name(number)} is no image with objects: {error}. It needs the fields that "
                "docs/detection.md names."
            ) from error
    annotations = checked_annotations(Path(files), parsed, False, keep_ids)
    shown = shown_images(annotations, empty)
    if not len(shown):
        raise DataError(f"{files}: no image has an object. Set data.train_empty=true, or name other files.")
    return RecordedImages(
        Path(files), annotations, shown, masks, limit, records, np.array(places, np.int64), tuple(damaged)
    )


def _add(parsed: AnnotationFile, record: Record, number: int, masks: bool) -> None:
    """Appends an image and its objects.

    Raises:
      KeyError: a field is missing.
      ValueError: fields of objects differ in length, or are no numbers.
    """
    height, width = int(record["image/height"]), int(record["image/width"])
    image = int(record["image/source_id"])
    sides = [several(record, f"image/object/bbox/{name}") for name in ("xmin", "ymin", "xmax", "ymax")]
    labels = several(record, "image/object/class/label")
    crowd = several(record, "image/object/is_crowd") or [0] * len(labels)
    area = several(record, "image/object/area") or [None] * len(labels)
    columns = [*sides, labels, crowd, area, *([several(record, "image/object/mask")] if masks else [])]
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"its objects have {', '.join(str(len(column)) for column in columns)} values")
    parsed.images.append(ImageEntry(image, str(record.get("image/filename", b""), "utf-8", "replace"), width, height))
    for place, (left, top, right, bottom, label, many, covered, *_) in enumerate(zip(*columns, strict=True)):
        box = (left * width, top * height, (right - left) * width, (bottom - top) * height)
        entry = AnnotationEntry(number * EACH + place, image, int(label), box, int(many))
        entry.area = None if covered is None else float(covered)
        parsed.annotations.append(entry)


def several(record: Record, name: str) -> list[Any]:
    """The values of a field that may have none, one or more."""
    value = record.get(name, [])
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, list) else [value]


def _outline(png: bytes) -> Outline:
    """A mask as a run-length code that is not compressed."""
    mask = decode(png).max(-1) > 0
    flat = mask.ravel(order="F")
    edges = np.flatnonzero(np.diff(flat.astype(np.int8))) + 1
    counts = np.diff([0, *edges.tolist(), len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}
