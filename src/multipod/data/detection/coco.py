"""COCO's own files: a folder of images, and a file that says what is in them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.detection.annotations import NAMED, Annotations
from multipod.data.detection.objects import AnnotationFault, Objects
from multipod.data.files.disk import Damaged, read_whole
from multipod.data.images.decode import decode
from multipod.data.source import fingerprint


@dataclass(frozen=True, eq=False)
class CocoImages:
    """Images of a folder, by the names in an annotation file.

    Attributes:
      folder: of the images.
      annotations: of these and perhaps more.
      numbers: int64, which images of the file these are.
      masks: whether objects have their outlines.
      limit: most objects of an image that there is room for, which changes nothing here: images of more are told of.
    """

    folder: Path
    annotations: Annotations
    numbers: np.ndarray
    masks: bool = False
    limit: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def pixels(self, number: int) -> np.ndarray:
        """The image, decoded.

        Raises:
          Damaged: it is missing, cut, or of another size than the annotations say.
        """
        image = decode(read_whole(self._path(number)))
        height, width = self.size(number)
        if image.shape[:2] != (height, width):
            raise Damaged(
                f"it is {image.shape[1]} x {image.shape[0]}, and {self.annotations.path.name} says {width} x {height}"
            )
        return image

    def size(self, number: int) -> tuple[int, int]:
        """Height and width, as the annotations say."""
        entry = self.annotations.images[self.numbers[number]]
        return entry.height, entry.width

    def objects(self, number: int) -> Objects:
        """The objects in the image."""
        return self.annotations.objects(int(self.numbers[number]), self.masks)

    def image_id(self, number: int) -> int:
        """The image's id in the file."""
        return self.annotations.images[self.numbers[number]].id

    def name(self, number: int) -> str:
        """The path of the image."""
        return str(self._path(number))

    def faults(self) -> tuple[AnnotationFault, ...]:
        """What was left out of the annotations, and which images have too many."""
        full = [k for k in self.numbers.tolist() if len(self.annotations.entries[k]) > self.limit > 0]
        if not full:
            return self.annotations.faults
        named = ", ".join(str(self.annotations.images[k].id) for k in full[:NAMED])
        what = (
            f"{len(full):,} images have more than {self.limit} objects, of which the largest are kept: image {named}"
            f"{', ...' if len(full) > NAMED else ''}"
        )
        return (*self.annotations.faults, AnnotationFault(str(self.annotations.path), what))

    def ground_truth(self, masks: bool) -> dict[str, Any]:
        """The annotations of these images."""
        return self.annotations.ground_truth(self.numbers, masks)

    def categories(self, labels: np.ndarray) -> np.ndarray:
        """The categories' ids of these labels."""
        ids = np.zeros(max(self.annotations.labels.values()) + 1, np.int64)
        for one, label in self.annotations.labels.items():
            ids[label] = one
        return ids[labels]

    def identity(self) -> str:
        """A fingerprint of the names, ids and numbers of objects."""
        chosen = [(self.annotations.images[k], len(self.annotations.entries[k])) for k in self.numbers.tolist()]
        parts = [f"{image.id} {image.file_name} {count}".encode() for image, count in chosen]
        return f"{len(self):,} annotated images {fingerprint(parts)}"

    def _path(self, number: int) -> Path:
        return self.folder / self.annotations.images[self.numbers[number]].file_name


def coco_images(
    folder: Path, annotations: Annotations, masks: bool = False, empty: bool = True, limit: int = 0
) -> CocoImages:
    """All images of an annotation file; without `empty` only those with an object that is no crowd."""
    return CocoImages(folder, annotations, shown_images(annotations, empty), masks, limit)


def shown_images(annotations: Annotations, empty: bool) -> np.ndarray:
    """The numbers of all images, or without `empty` of those with an object that is no crowd; int64."""
    return np.flatnonzero([empty or any(not one.iscrowd for one in own) for own in annotations.entries])
