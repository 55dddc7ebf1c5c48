"""Images with objects as a `Source`: a fixed number of boxes each, cropped, mirrored and resized with their masks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from multipod.data.detection.jitter import ColorJitter
from multipod.data.detection.objects import AnnotatedImages, Objects
from multipod.data.detection.outlines import mask_in_box
from multipod.data.detection.views import Crop, Frame, Shape, SsdCrop, Stretched, visible
from multipod.data.files.disk import Damaged
from multipod.data.images import jpeg
from multipod.data.order import ByLength, draw_for_rows, generator
from multipod.data.reading import ReadStatistics
from multipod.data.source import HostBatch, space
from multipod.errors import DataError

IN_A_ROW = 100
"""So many images that cannot be read, one after the other, are no accident."""


@dataclass(frozen=True)
class Random:
    """What training changes.

    Attributes:
      crop: which part is shown; None: all.
      flip: how often it is mirrored.
      jitter: of colours; None: none.
    """

    crop: SsdCrop | None = None
    flip: float = 0.5
    jitter: ColorJitter | None = None


@dataclass(frozen=True, eq=False)
class DetectionImages:
    """Images and their objects, the same arrays for every image:

    - `image`: uint8 [n, height, width, 3].
    - `extent`: int32 [n, 2], height and width of the part of `image` that is not padding.
    - `box`: float32 [n, limit, 4], left, top, right, bottom in pixels of `image`; zeros behind the last.
    - `label`: int32 [n, limit], from 1; 0 behind the last.
    - `crowd`: bool [n, limit].
    - `count`: int32 [n], how many boxes there are.
    - `image_id`: int32 [n]; `size`: int32 [n, 2], height and width of the original.
    - `object_mask`: with `mask_pixels`, bool [n, limit, mask_pixels, mask_pixels], each stretched over its box.

    Of more objects than `limit` the largest are kept. In training (`random`) crowds are left out, and an image that
    cannot be read is replaced by the next that can; in evaluation it is masked. What an example looks like depends on
    the arguments of `read` and `read_augmented` alone.

    Attributes:
      images: where they come from.
      shape: how they become those of a batch.
      limit: most boxes of an image.
      mask_pixels: height and width of a mask; 0: no masks.
      random: of training; None in evaluation.
      chosen: the canvas of this batch, of `shape.canvases()`; -1: the last.
      statistics: notes what was left out, and where the time went.
    """

    images: AnnotatedImages
    shape: Shape = field(default_factory=Stretched)
    limit: int = 100
    mask_pixels: int = 0
    random: Random | None = None
    chosen: int = -1
    statistics: ReadStatistics = field(default_factory=ReadStatistics)

    def __post_init__(self) -> None:
        if self.limit < 1 or self.mask_pixels < 0:
            raise DataError(f"limit={self.limit}, mask_pixels={self.mask_pixels}: at least 1, and at least 0.")
        for number, fault in enumerate(self.images.faults()):
            self.statistics.skip(-1 - number, fault.where, fault.what)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The images as evaluation sees them."""
        return self._read(numbers, [None] * len(numbers))

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself: training crops before it resizes, in `read_augmented`."""
        return batch

    def read_augmented(
        self, numbers: np.ndarray, rows: np.ndarray, rng: np.random.Generator, out: HostBatch | None = None
    ) -> HostBatch:
        """The images as training sees them; `image` is written into `out` if it is there and fits."""
        if self.random is None:
            return self.read(numbers)
        keys = (draw_for_rows(rows, 1, rng)[:, 0] * 2**53).astype(np.int64)
        own = [np.random.Generator(np.random.Philox(key=key)) for key in keys.tolist()]
        return self._read(numbers, own, out)

    def epoch_order(self, seed: int, epoch: int, batch: int) -> np.ndarray:
        """Every number once; of images that lie and stand, batches of one kind as far as they go."""
        if len(self.shape.canvases()) == 1:
            return generator(seed, epoch).permutation(len(self))
        return ByLength((1, 2)).epoch(self._canvas + 1, seed, epoch, batch)

    def sized_for(self, numbers: np.ndarray) -> "DetectionImages":
        """These images on the canvas that the whole batch fits on."""
        needed = np.unique(self._canvas[numbers])
        return replace(self, chosen=int(needed[0]) if len(needed) == 1 else -1)

    def sizes(self) -> list["DetectionImages"]:
        """These images on every canvas."""
        return [replace(self, chosen=number) for number in range(len(self.shape.canvases()))]

    def identity(self) -> str:
        """The identity of the images."""
        return self.images.identity()

    def ground_truth(self, masks: bool = False) -> dict[str, Any]:
        """What detections on these images are judged by, as a file of COCO has it."""
        return self.images.ground_truth(masks)

    def categories(self, labels: np.ndarray) -> np.ndarray:
        """The ids of these classes, any shape; of the background, 0, whatever."""
        return self.images.categories(labels)

    @cached_property
    def _canvas(self) -> np.ndarray:
        return np.array([self.shape.canvas_of(self.images.size(k)) for k in range(len(self))], np.int64)

    def _read(
        self, numbers: np.ndarray, draws: Sequence[np.random.Generator | None], out: HostBatch | None = None
    ) -> HostBatch:
        n, canvas = len(numbers), self.shape.canvases()[self.chosen]
        batch = empty_batch(n, canvas, self.limit, self.mask_pixels)
        batch["image"] = space(out, "image", (n, *canvas, 3), np.uint8)
        mask = np.ones(n, bool)
        for row, number in enumerate(numbers.tolist()):
            batch["image"][row] = 0
            mask[row] = self._fill(number, draws[row], {name: array[row : row + 1] for name, array in batch.items()})
        return batch if mask.all() else batch | {"mask": mask}

    def _fill(self, number: int, rng: np.random.Generator | None, row: HostBatch) -> bool:
        """Writes the example into `row`, views of a batch of one; false if it is masked."""
        for tried in range(min(IN_A_ROW, len(self))):
            at = (number + tried) % len(self)
            try:
                with self.statistics.stage("decode"):
                    pixels = self.images.pixels(at)
                self._show(at, pixels, rng, row)
                return True
            except Damaged as error:
                self.statistics.skip(at, self.images.name(at), str(error))
            if self.random is None:
                return False
        raise DataError(
            f"{min(IN_A_ROW, len(self))} images in a row cannot be read, from {self.images.name(number)} on; the last: "
            f"{next(reversed(self.statistics.skipped.values())).reason}. See whether the folder is the right one."
        )

    def _show(self, number: int, pixels: np.ndarray, rng: np.random.Generator | None, row: HostBatch) -> None:
        size = (pixels.shape[0], pixels.shape[1])
        objects = self.images.objects(number)
        crop = Crop(0.0, 0.0, size[1], size[0])
        if self.random is not None and rng is not None:
            objects = objects.only(np.flatnonzero(~objects.crowd))
            if self.random.crop is not None:
                crop = self.random.crop.crop(objects.box, size, rng)
                objects = objects.only(visible(objects.box, crop))
            crop = crop._replace(flip=bool(rng.random() < self.random.flip))
        frame = self.shape.frame(crop, self.shape.canvases()[self.chosen])
        with self.statistics.stage("augment"):
            self._draw(pixels, frame, rng, row["image"][0])
            self._write(objects, frame, size, row)
        row["image_id"][0] = self.images.image_id(number)
        row["size"][0], row["extent"][0] = size, (frame.height, frame.width)

    def _draw(self, pixels: np.ndarray, frame: Frame, rng: np.random.Generator | None, image: np.ndarray) -> None:
        crop = frame.crop
        shown = np.empty((frame.height, frame.width, 3), np.uint8)
        jpeg.crop_pixels(pixels, (crop.left, crop.top, crop.width, crop.height), shown, crop.flip)
        if rng is not None and self.random is not None and self.random.jitter is not None:
            shown = self.random.jitter.apply(shown, rng)
        image[: frame.height, : frame.width] = shown

    def _write(self, objects: Objects, frame: Frame, size: tuple[int, int], row: HostBatch) -> None:
        box = frame.place(objects.box)
        areas = (box[:, 2:] - box[:, :2]).prod(1)
        kept = np.sort(np.argsort(-areas, kind="stable")[: self.limit])
        kept = kept[areas[kept] > 0]
        objects, box, n = objects.only(kept), box[kept], len(kept)
        row["box"][0, :n], row["label"][0, :n], row["crowd"][0, :n] = box, objects.label, objects.crowd
        row["count"][0] = n
        for k in range(n if self.mask_pixels else 0):
            row["object_mask"][0, k] = mask_in_box(
                objects.outline[k], size, _seen(objects.box[k], frame.crop), self.mask_pixels, frame.crop.flip
            )


def _seen(box: np.ndarray, crop: Crop) -> tuple[float, float, float, float]:
    """The part of a box that the crop shows, in pixels of the original."""
    left, top, right, bottom = box.tolist()
    edges = max(left, crop.left), max(top, crop.top), min(right, crop.left + crop.width)
    return (*edges, min(bottom, crop.top + crop.height))


def empty_batch(n: int, canvas: tuple[int, int], limit: int, mask_pixels: int = 0) -> HostBatch:
    """The arrays of `n` images without objects, all zeros."""
    arrays: HostBatch = {
        "image": np.zeros((n, *canvas, 3), np.uint8),
        "extent": np.zeros((n, 2), np.int32),
        "box": np.zeros((n, limit, 4), np.float32),
        "label": np.zeros((n, limit), np.int32),
        "crowd": np.zeros((n, limit), bool),
        "count": np.zeros(n, np.int32),
        "image_id": np.zeros(n, np.int32),
        "size": np.zeros((n, 2), np.int32),
    }
    masks = {"object_mask": np.zeros((n, limit, mask_pixels, mask_pixels), bool)} if mask_pixels else {}
    return arrays | masks
