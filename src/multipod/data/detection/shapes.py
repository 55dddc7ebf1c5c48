"""Drawn shapes: images of circles, triangles and rectangles that need no download, with boxes and masks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from multipod.data.detection.jitter import ColorJitter
from multipod.data.detection.objects import AnnotationFault, Objects
from multipod.data.detection.source import DetectionImages, Random, empty_batch
from multipod.data.detection.views import Fitted, Shape, SsdCrop, Stretched
from multipod.data.pillow import Image, ImageDraw
from multipod.data.source import HostBatch
from multipod.errors import DataError

KINDS = ("circle", "triangle", "rectangle")
"""The classes, from 1."""
CORNERS = 40
"""Of the polygon that stands for a circle."""
OVERSAMPLED = 2
"""Drawn so many times as large and made smaller, which smooths the edges."""
NOISE = 6.0
"""Standard deviation of each pixel's colours, of 255."""
KEPT = 4096
"""Images kept in memory: those of a small run are drawn once."""
SEEDS = {"train": 0, "test": 1}


class DrawnShape(NamedTuple):
    """One shape of an image.

    Attributes:
      kind: index into `KINDS`.
      points: [corners, 2], x and y in pixels, all inside the image.
      color: red, green, blue.
    """

    kind: int
    points: np.ndarray
    color: tuple[int, int, int]


@dataclass(frozen=True)
class DrawnShapes:
    """Images of shapes; image k is a pure function of the seed and of k.

    Shapes are small and large, turned, and lie over each other: one that is drawn later hides what is behind it, and
    keeps its whole box and mask as long as no more than half of it is hidden, by a test of its box. The background is a
    ramp of colours with noise, and some images have no shape.

    Attributes:
      count: images.
      seed: of all of them.
      side: pixels of the longer side. Every other image lies, and is a quarter less high, or stands, if `both_ways`.
      most: shapes in an image, from 0 to so many.
      least_size: of a shape's diameter, as a share of the shorter side.
      most_size: likewise.
      both_ways: images that lie and images that stand; otherwise squares.
    """

    count: int
    seed: int = 0
    side: int = 96
    most: int = 5
    least_size: float = 0.12
    most_size: float = 0.6
    both_ways: bool = False

    def __post_init__(self) -> None:
        good = self.count >= 1 and self.side >= 16 and self.most >= 0 and 0 < self.least_size <= self.most_size <= 1
        if not good:
            raise DataError(
                f"{self}: at least 1 image of 16 pixels, 0 shapes or more, and sizes above 0, to 1, the smaller first. "
                "Change it with --set or an option."
            )

    def __len__(self) -> int:
        return self.count

    def size(self, number: int) -> tuple[int, int]:
        """Height and width."""
        if not self.both_ways:
            return self.side, self.side
        short = self.side * 3 // 4
        return (short, self.side) if number % 2 == 0 else (self.side, short)

    def pixels(self, number: int) -> np.ndarray:
        """The image, drawn; the latest stay in memory."""
        return _pixels(self, number)

    def shapes(self, number: int) -> tuple[DrawnShape, ...]:
        """The shapes in the image, those behind first."""
        return _shapes(self, number)

    def objects(self, number: int) -> Objects:
        """Boxes, classes and polygons."""
        shapes = self.shapes(number)
        box = np.array([_box(one.points) for one in shapes]).reshape(-1, 4)
        label = np.array([one.kind + 1 for one in shapes], np.int32)
        outline = tuple([one.points.ravel().tolist()] for one in shapes)
        return Objects(box, label, np.zeros(len(shapes), bool), outline)

    def image_id(self, number: int) -> int:
        """The number plus one."""
        return number + 1

    def name(self, number: int) -> str:
        """The name of its file, if it is written into one."""
        return f"{number + 1:06d}.png"

    def faults(self) -> tuple[AnnotationFault, ...]:
        """None."""
        return ()

    def ground_truth(self, masks: bool = True) -> dict[str, Any]:
        """The annotations of all images, as a file of COCO has them."""
        sizes = [self.size(k) for k in range(len(self))]
        return {
            "images": [
                {"id": k + 1, "file_name": self.name(k), "height": height, "width": width}
                for k, (height, width) in enumerate(sizes)
            ],
            "categories": [{"id": k + 1, "name": name} for k, name in enumerate(KINDS)],
            "annotations": [one | {"id": k + 1} for k, one in enumerate(self._annotations(masks))],
        }

    def categories(self, labels: np.ndarray) -> np.ndarray:
        """The labels themselves."""
        return labels

    def identity(self) -> str:
        """What it was made with, as text."""
        return repr(self)

    def _annotations(self, masks: bool) -> Iterator[dict[str, Any]]:
        for number in range(len(self)):
            for shape in self.shapes(number):
                left, top, right, bottom = _box(shape.points).tolist()
                one: dict[str, Any] = {"image_id": number + 1, "category_id": shape.kind + 1, "iscrowd": 0}
                one |= {"bbox": [left, top, right - left, bottom - top], "area": _area(shape.points)}
                yield one | ({"segmentation": [shape.points.ravel().tolist()]} if masks else {})

    def random_shape(self, height: int, width: int, rng: np.random.Generator) -> DrawnShape:
        """A shape somewhere in an image of this size."""
        kind = int(rng.integers(len(KINDS)))
        least, most = (share * min(height, width) / 2 for share in (self.least_size, self.most_size))
        radius = math.exp(rng.uniform(math.log(least), math.log(most)))
        points = radius * _corners(kind, rng)
        low, high = points.min(0), points.max(0)
        centre = -low + rng.random(2) * (np.array([width, height]) - (high - low))
        rgb = (int(one) for one in rng.integers(0, 256, 3))
        # To a tenth of a pixel: what is written to a file as text is then read as it was.
        moved = np.clip(np.round(points + centre, 1), 0, [width, height])
        return DrawnShape(kind, moved, (next(rgb), next(rgb), next(rgb)))


def _generator(drawn: DrawnShapes, number: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=drawn.seed, counter=[0, 0, stream, number]))


@lru_cache(maxsize=KEPT)
def _shapes(drawn: DrawnShapes, number: int) -> tuple[DrawnShape, ...]:
    rng = _generator(drawn, number, 0)
    shapes: list[DrawnShape] = []
    for _ in range(int(rng.integers(drawn.most + 1))):
        shape = drawn.random_shape(*drawn.size(number), rng)
        if all(_hidden(_box(one.points), _box(shape.points)) <= 0.5 for one in shapes):
            shapes.append(shape)
    return tuple(shapes)


@lru_cache(maxsize=KEPT)
def _pixels(drawn: DrawnShapes, number: int) -> np.ndarray:
    rng = _generator(drawn, number, 1)
    height, width = drawn.size(number)
    corners = Image.fromarray(rng.integers(0, 256, (2, 2, 3), dtype=np.uint8))
    sheet = corners.resize((width * OVERSAMPLED, height * OVERSAMPLED), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(sheet)
    for shape in drawn.shapes(number):
        pen.polygon((shape.points * OVERSAMPLED).ravel().tolist(), fill=shape.color)
    noise = NOISE * rng.standard_normal((height, width, 3), np.float32)
    image = np.clip(np.asarray(sheet.reduce(OVERSAMPLED)) + noise, 0, 255).astype(np.uint8)
    image.setflags(write=False)
    return image


def _corners(kind: int, rng: np.random.Generator) -> np.ndarray:
    """The corners of a shape of radius 1 around 0."""
    turn = rng.uniform(0, 2 * math.pi)
    if KINDS[kind] == "rectangle":
        half = math.atan(rng.uniform(0.5, 1.0))
        angles = np.array([half, math.pi - half, math.pi + half, -half]) + turn
    else:
        n = CORNERS if KINDS[kind] == "circle" else 3
        angles = np.arange(n) * 2 * math.pi / n + turn
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def _box(points: np.ndarray) -> np.ndarray:
    return np.concatenate([points.min(0), points.max(0)])


def _area(points: np.ndarray) -> float:
    x, y = points.T
    return float(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2)


def _hidden(behind: np.ndarray, before: np.ndarray) -> float:
    """The share of a box that another hides."""
    sides = np.minimum(behind[2:], before[2:]) - np.maximum(behind[:2], before[:2])
    return float(np.maximum(sides, 0).prod() / (behind[2:] - behind[:2]).prod())


@dataclass(frozen=True)
class Shapes:
    """Drawn shapes as the data of a recipe; training and test images differ.

    Attributes:
      train_images: how many.
      test_images: how many.
      pixels: of the side that the model sees, of squares.
      most: shapes in an image, from 0 to so many.
      least_size: of a shape's diameter, as a share of the side.
      seed: of the images; not the seed of a run.
      crop: whether training shows SSD's crops.
      jitter: of colours in training; None: none.
      mask_pixels: height and width of a mask; 0: no masks. They need the extra `coco`.
      both_ways: images that lie and that stand, fitted as Mask R-CNN's are, instead of squares.
    """

    train_images: int = 2000
    test_images: int = 200
    pixels: int = 96
    most: int = 5
    least_size: float = 0.12
    seed: int = 0
    crop: bool = True
    jitter: ColorJitter | None = None
    mask_pixels: int = 0
    both_ways: bool = False

    def train(self) -> DetectionImages:
        """The images to learn from."""
        return self._images(self.train_images, "train", Random(SsdCrop() if self.crop else None, jitter=self.jitter))

    def test(self) -> DetectionImages:
        """The images to be judged by."""
        return self._images(self.test_images, "test", None)

    def example(self) -> HostBatch:
        """One example, of zeros, that lies."""
        return empty_batch(1, self._shape.canvases()[0], max(1, self.most), self.mask_pixels)

    @property
    def _shape(self) -> Shape:
        if self.both_ways:
            return Fitted(self.pixels * 3 // 4, self.pixels, 32)
        return Stretched(self.pixels)

    def _images(self, count: int, part: str, random: Random | None) -> DetectionImages:
        seed = 2 * self.seed + SEEDS[part]
        drawn = DrawnShapes(count, seed, self.pixels, self.most, self.least_size, both_ways=self.both_ways)
        return DetectionImages(drawn, self._shape, max(1, self.most), self.mask_pixels, random)
