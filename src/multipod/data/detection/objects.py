"""What is in an image, and what a set of such images can do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Outline = list[list[float]] | dict[str, Any]
"""A mask as COCO writes it: polygons, x and y in turn, or a run-length code with `size` and `counts`."""


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects of one image.

    Attributes:
      box: float64 [objects, 4], left, top, right, bottom in pixels of the original image, of some area, inside it.
      label: int32 [objects], from 1; 0 is the background.
      crowd: bool [objects], whether the box is around a group.
      outline: the masks, one an object; () where there are none.
    """

    box: np.ndarray
    label: np.ndarray
    crowd: np.ndarray
    outline: tuple[Outline, ...] = ()

    def __len__(self) -> int:
        return len(self.box)

    def only(self, rows: np.ndarray) -> "Objects":
        """The objects with these numbers."""
        outline = tuple(self.outline[row] for row in rows.tolist()) if self.outline else ()
        return Objects(self.box[rows], self.label[rows], self.crowd[rows], outline)


class AnnotationFault(NamedTuple):
    """A kind of fault of the annotations, which are left out: where, and how many of which."""

    where: str
    what: str


class AnnotatedImages(Protocol):
    """Images by number, and the objects in them."""

    def __len__(self) -> int:
        """How many images there are."""
        ...

    def pixels(self, number: int) -> np.ndarray:
        """The image, uint8 [height, width, 3].

        Raises:
          Damaged: it is missing, cannot be decoded, or is of another size than its annotations are for.
        """
        ...

    def size(self, number: int) -> tuple[int, int]:
        """Height and width of the image, without reading it."""
        ...

    def objects(self, number: int) -> Objects:
        """The objects in the image."""
        ...

    def image_id(self, number: int) -> int:
        """The number by which detections name the image."""
        ...

    def name(self, number: int) -> str:
        """Where the image lies, for messages."""
        ...

    def faults(self) -> Sequence[AnnotationFault]:
        """What was left out of the annotations."""
        ...

    def ground_truth(self, masks: bool) -> dict[str, Any]:
        """The annotations as a file of COCO has them: what detections are judged by."""
        ...

    def categories(self, labels: np.ndarray) -> np.ndarray:
        """The categories' ids of these labels, any shape."""
        ...

    def identity(self) -> str:
        """A short text that changes when the images or their annotations do."""
        ...
