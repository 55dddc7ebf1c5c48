"""Images with objects as the data of a recipe, from files of COCO's form, and writing such files."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from multipod.data.detection.annotations import Annotations, read_annotations
from multipod.data.detection.coco import coco_images
from multipod.data.detection.jitter import ColorJitter
from multipod.data.detection.objects import AnnotatedImages
from multipod.data.detection.recorded import COCO_IDS, RecordedImages, recorded_images
from multipod.data.detection.source import DetectionImages, Random, empty_batch
from multipod.data.detection.views import Shape, SsdCrop, Stretched
from multipod.data.files.addresses import refuse_address
from multipod.data.pillow import Image
from multipod.data.source import HostBatch
from multipod.errors import DataError


@dataclass(frozen=True)
class CocoFiles:
    """Images with objects in COCO's own files.

    Attributes:
      train_files: the folder of the images to learn from, as `coco/train2017`; or TFRecords, as `coco/train-*`.
      train_annotations: their file, as `coco/annotations/instances_train2017.json`; none for TFRecords.
      test_files: the same, to be judged by.
      test_annotations: likewise.
      shape: how an image becomes one of a batch: `Stretched` as SSD's, or `Fitted` as Mask R-CNN's.
      limit: most boxes of an image; of more the largest are kept.
      crop: which part training shows; None: all.
      flip: how often it is mirrored.
      jitter: of colours in training; None: none.
      mask_pixels: height and width of a mask; 0: no masks. They need the extra `coco`.
      keep_ids: classes are the categories' ids, with their gaps; otherwise they count from 1 in the order of the ids.
      categories: of TFRecords, which do not list them; COCO's ids.
      train_empty: whether images without objects, or with crowds only, are learnt from.
    """

    train_files: str = ""
    train_annotations: str = ""
    test_files: str = ""
    test_annotations: str = ""
    shape: Shape = field(default_factory=Stretched)
    limit: int = 100
    crop: SsdCrop | None = None
    flip: float = 0.5
    jitter: ColorJitter | None = None
    mask_pixels: int = 0
    keep_ids: bool = False
    categories: tuple[int, ...] = COCO_IDS
    train_empty: bool = False

    def train(self) -> DetectionImages:
        """The images to learn from."""
        return self._images("train", self.train_empty, Random(self.crop, self.flip, self.jitter))

    def test(self) -> DetectionImages:
        """The images to be judged by: all of the file."""
        return self._images("test", True, None)

    def example(self) -> HostBatch:
        """One example, of zeros, without any file: its shapes, those of images that lie, and types."""
        return empty_batch(1, self.shape.canvases()[0], self.limit, self.mask_pixels)

    def _images(self, part: str, empty: bool, random: Random | None) -> DetectionImages:
        folder, file = getattr(self, f"{part}_files"), getattr(self, f"{part}_annotations")
        masks = self.mask_pixels > 0
        if folder and not file and not Path(folder).expanduser().is_dir():
            recorded = _recorded(folder, self.categories, self.keep_ids, masks, empty, self.limit)
            return DetectionImages(recorded, self.shape, self.limit, self.mask_pixels, random)
        if not folder or not file:
            raise DataError(
                f"the recipe does not say where its images are. Give --set data.{part}_files=FOLDER and "
                f"--set data.{part}_annotations=FILE.json, in COCO's form; `multipod data shapes` draws some."
            )
        refuse_address(folder)
        refuse_address(file)
        if not Path(folder).expanduser().is_dir():
            raise DataError(
                f"{folder} is no folder. Give the folder of the images with --set data.{part}_files=FOLDER."
            )
        annotations = _annotations(Path(file).expanduser(), masks, self.keep_ids)
        images = coco_images(Path(folder).expanduser(), annotations, masks, empty, self.limit)
        if not len(images):
            raise DataError(f"{file}: no image has an object. Set data.train_empty=true, or name another file.")
        return DetectionImages(images, self.shape, self.limit, self.mask_pixels, random)


@lru_cache(maxsize=4)
def _annotations(path: Path, masks: bool, keep_ids: bool) -> Annotations:
    """The annotations of a file: reading 860,000 of them once is enough."""
    return read_annotations(path, masks, keep_ids)


@lru_cache(maxsize=4)
def _recorded(
    files: str, categories: tuple[int, ...], keep_ids: bool, masks: bool, empty: bool, limit: int
) -> RecordedImages:
    """The images of TFRecords, which are read through once."""
    return recorded_images(files, categories, keep_ids, masks, empty, limit)


def write_coco(images: AnnotatedImages, folder: Path, part: str, report: Callable[[int], None] | None = None) -> Path:
    """Writes images as PNG into `folder/part`, and `folder/annotations/instances_PART.json`, whose path it returns.

    Raises:
      DataError: they cannot be written.
    """
    file = folder / "annotations" / f"instances_{part}.json"
    try:
        for path in (folder / part, file.parent):
            path.mkdir(parents=True, exist_ok=True)
        for number in range(len(images)):
            Image.fromarray(images.pixels(number)).save(folder / part / images.name(number))
            if report is not None:
                report(number + 1)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(images.ground_truth(masks=True)), encoding="utf-8")
        os.replace(unfinished, file)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}. Name another folder.") from error
    return file
