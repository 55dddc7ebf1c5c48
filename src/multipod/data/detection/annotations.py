"""COCO's annotation files: read, checked, and kept as columns. Masks stay undecoded until they are asked for."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from multipod.data.detection.objects import AnnotationFault, Objects, Outline
from multipod.data.detection.outlines import wrong_outline
from multipod.errors import DataError

NAMED = 3
"""Annotations named for each kind of fault."""


class ImageEntry(msgspec.Struct):
    """An entry of `images`; names as in the file."""

    id: int
    file_name: str
    width: int
    height: int


class CategoryEntry(msgspec.Struct):
    """An entry of `categories`."""

    id: int
    name: str = ""


class AnnotationEntry(msgspec.Struct):
    """An entry of `annotations`; `segmentation` stays JSON."""

    id: int
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    iscrowd: int = 0
    area: float | None = None
    segmentation: msgspec.Raw = msgspec.Raw(b"[]")


class AnnotationFile(msgspec.Struct):
    """What a file holds."""

    images: list[ImageEntry]
    categories: list[CategoryEntry]
    annotations: list[AnnotationEntry] = []


@dataclass(frozen=True, eq=False)
class Annotations:
    """The images of a file, the objects in them, and what was wrong.

    Attributes:
      path: the file.
      images: all of the file, in its order.
      categories: in the order of their ids.
      labels: from a category's id to its class, see `read_annotations`.
      entries: for each image, its annotations that can be used.
      faults: kinds of annotations that cannot.
    """

    path: Path
    images: tuple[ImageEntry, ...]
    categories: tuple[CategoryEntry, ...]
    labels: dict[int, int]
    entries: tuple[tuple[AnnotationEntry, ...], ...]
    faults: tuple[AnnotationFault, ...]

    def objects(self, number: int, masks: bool) -> Objects:
        """The objects of image `number` of `images`."""
        image, own = self.images[number], self.entries[number]
        box = np.array([one.bbox for one in own], np.float64).reshape(-1, 4)
        box[:, 2:] += box[:, :2]
        box = np.clip(box, 0, [image.width, image.height, image.width, image.height])
        labels = np.array([self.labels[one.category_id] for one in own], np.int32)
        crowd = np.array([one.iscrowd != 0 for one in own], bool)
        return Objects(box, labels, crowd, tuple(map(_outline, own)) if masks else ())

    def ground_truth(self, numbers: np.ndarray, masks: bool) -> dict[str, Any]:
        """The annotations of these images in COCO's form; boxes as the file has them, also beyond the image."""
        return {
            "images": [msgspec.structs.asdict(self.images[number]) for number in numbers.tolist()],
            "categories": [msgspec.structs.asdict(one) for one in self.categories],
            "annotations": [_as_dict(one, masks) for number in numbers.tolist() for one in self.entries[number]],
        }


def read_annotations(path: Path, masks: bool = False, keep_ids: bool = False) -> Annotations:
    """Reads and checks a file; `masks` are checked if they are asked for.

    Classes count from 1 in the order of the categories' ids; with `keep_ids` they are the ids.

    An annotation is left out, and counted in `faults`, if it names no image of the file or no category, if its box has
    no area, is not finite or lies outside the image, or if its mask cannot be one of the image.

    Raises:
      DataError: the file is missing or no annotation file, an id stands twice, or no annotation can be used.
    """
    return checked_annotations(path, _parsed(path), masks, keep_ids)


def checked_annotations(path: Path, parsed: AnnotationFile, masks: bool = False, keep_ids: bool = False) -> Annotations:
    """What `read_annotations` does with a file that is read, or made of another one, `path`.

    Raises:
      DataError: an id stands twice, or no annotation can be used.
    """
    for kind, ids in (("image", [i.id for i in parsed.images]), ("category", [c.id for c in parsed.categories])):
        _check_ids(path, kind, ids)
    numbers = {image.id: number for number, image in enumerate(parsed.images)}
    categories = sorted(parsed.categories, key=lambda one: one.id)
    labels = {one.id: one.id if keep_ids else number + 1 for number, one in enumerate(categories)}
    entries: list[list[AnnotationEntry]] = [[] for _ in parsed.images]
    faults: defaultdict[str, list[AnnotationEntry]] = defaultdict(list)
    for one in parsed.annotations:
        number = numbers.get(one.image_id)
        wrong = (
            "an image that is not in the file" if number is None else _wrong(one, parsed.images[number], labels, masks)
        )
        if wrong or number is None:
            faults[wrong].append(one)
        else:
            entries[number].append(one)
    told = tuple(AnnotationFault(str(path), _told(kind, ones)) for kind, ones in faults.items())
    if parsed.annotations and not any(entries):
        raise DataError(
            f"{path}: none of {len(parsed.annotations):,} annotations can be used: "
            f"{'; '.join(fault.what for fault in told)}. Mend the file, or name the one that belongs to these images."
        )
    return Annotations(path, tuple(parsed.images), tuple(categories), labels, tuple(map(tuple, entries)), told)


def _parsed(path: Path) -> AnnotationFile:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Name a file of COCO's annotations.") from error
    try:
        return msgspec.json.decode(data, type=AnnotationFile)
    except msgspec.ValidationError as error:  # it ends with the place, as `$.annotations[3].bbox`
        raise DataError(f"{path} is no file of COCO's annotations: {error}. Mend the entry.") from error
    except msgspec.DecodeError as error:
        raise DataError(f"{path}{_line(data, str(error))} is no JSON: {error}. Write or download it again.") from error


def _line(data: bytes, message: str) -> str:
    """The line of the byte that a parser's message names, or of the end."""
    digits = message.rpartition("(byte ")[2].rstrip(")")
    end = int(digits) if digits.isdigit() else len(data)
    return f", line {data.count(10, 0, end) + 1:,}"


def _check_ids(path: Path, kind: str, ids: list[int]) -> None:
    if not ids:
        raise DataError(f"{path} lists no {kind}. Name a file of COCO's annotations that has some.")
    if len(set(ids)) < len(ids):
        twice = next(one for one, count in zip(*np.unique(ids, return_counts=True), strict=True) if count > 1)
        raise DataError(f"{path}: {kind} id {twice} stands twice. Give each {kind} an id of its own.")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise DataError(f"{path}: {kind} ids lie from {min(ids)} to {max(ids)}. Give numbers from 0 to 2**31 - 1.")


def _wrong(one: AnnotationEntry, image: ImageEntry, labels: dict[int, int], masks: bool) -> str:
    if one.category_id not in labels:
        return "a category that is not in the file"
    left, top, width, height = one.bbox
    if not np.isfinite(left + top + width + height):
        return "a box that is not finite"
    if width <= 0 or height <= 0:
        return "a box of no area"
    if left >= image.width or top >= image.height or left + width <= 0 or top + height <= 0:
        return "a box outside the image"
    return wrong_outline(_outline(one), image.height, image.width) if masks else ""


def _told(kind: str, ones: list[AnnotationEntry]) -> str:
    first = ", ".join(f"{one.id} (image {one.image_id})" for one in ones[:NAMED])
    return f"{len(ones):,} annotations have {kind}: {first}{', ...' if len(ones) > NAMED else ''}"


def _outline(one: AnnotationEntry) -> Outline:
    return msgspec.json.decode(one.segmentation)


def _as_dict(one: AnnotationEntry, masks: bool) -> dict[str, Any]:
    """The annotation as COCO writes it; where it gives no area, that of its box."""
    area = one.bbox[2] * one.bbox[3] if one.area is None else one.area
    plain = {"id": one.id, "image_id": one.image_id, "category_id": one.category_id, "bbox": list(one.bbox)}
    plain |= {"iscrowd": int(one.iscrowd != 0), "area": area}
    return plain | ({"segmentation": _outline(one)} if masks else {})
