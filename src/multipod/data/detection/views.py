"""What a model sees of an image with objects: which part, how large, mirrored or not; boxes and masks follow."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multipod.errors import DataError

LEAST_SHARE = 0.3
"""Of a side of the image, in SSD's crops."""
ROUNDS = 100
"""Then an image is shown whole: its objects lie so that no crop will do."""


class Crop(NamedTuple):
    """A part of an image, in its pixels, and whether it is mirrored."""

    left: float
    top: float
    width: float
    height: float
    flip: bool = False


class Frame(NamedTuple):
    """What is shown, and the size at which it is.

    Attributes:
      crop: in pixels of the original.
      height: of the crop as it is shown.
      width: likewise.
      canvas: height and width of what it is shown on, in the corner with the least of both; the rest is zeros.
    """

    crop: Crop
    height: int
    width: int
    canvas: tuple[int, int]

    def place(self, box: np.ndarray) -> np.ndarray:
        """Boxes of the original, [n, 4], in pixels of the canvas; what the crop does not show is cut off."""
        crop = self.crop
        scale = np.array([self.width / crop.width, self.height / crop.height] * 2)
        placed = (box - np.array([crop.left, crop.top] * 2)) * scale
        placed = np.clip(placed, 0, [self.width, self.height] * 2)
        if crop.flip:
            placed[:, [0, 2]] = self.width - placed[:, [2, 0]]
        return placed


@dataclass(frozen=True)
class Stretched:
    """The whole image stretched to a square: SSD.

    Attributes:
      pixels: of its side.
    """

    pixels: int = 300

    def canvases(self) -> tuple[tuple[int, int], ...]:
        """The sizes of batches: one."""
        return ((self.pixels, self.pixels),)

    def canvas_of(self, size: tuple[int, int]) -> int:
        """Which canvas an image of this height and width needs."""
        return 0

    def frame(self, crop: Crop, canvas: tuple[int, int]) -> Frame:
        """The crop, as large as the canvas."""
        return Frame(crop, *canvas, canvas)


@dataclass(frozen=True)
class Fitted:
    """The image at its own shape, the shorter side at `shorter` unless the longer would be above `longer`: Mask R-CNN.

    Sides are cut to whole pixels. A canvas lies or stands; batches of images of both kinds have a square one.

    Attributes:
      shorter: pixels of the shorter side.
      longer: most pixels of the longer side.
      multiple: sides of the canvas are multiples of it; the stride of a pyramid's sixth level makes 832 x 1344.
    """

    shorter: int = 800
    longer: int = 1333
    multiple: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.shorter <= self.longer or self.multiple < 1:
            raise DataError(
                f"{self}: the shorter side is 1 or more, and no more than the longer. Change it with --set."
            )

    def canvases(self) -> tuple[tuple[int, int], ...]:
        """Height and width: lying, standing, square."""
        short, long = (-(-side // self.multiple) * self.multiple for side in (self.shorter, self.longer))
        return (short, long), (long, short), (long, long)

    def canvas_of(self, size: tuple[int, int]) -> int:
        """0 for an image that lies or is square, 1 for one that stands."""
        return int(size[0] > size[1])

    def frame(self, crop: Crop, canvas: tuple[int, int]) -> Frame:
        """The crop at its own shape."""
        short, long = sorted((crop.width, crop.height))
        scale = min(self.shorter / short, self.longer / long)
        return Frame(crop, max(1, int(crop.height * scale)), max(1, int(crop.width * scale)), canvas)


Shape = Stretched | Fitted
"""How an image becomes one of a batch."""


@dataclass(frozen=True)
class SsdCrop:
    """A part of the image that shows enough of its objects.

    Repeated until accepted: with one chance in len(least) + 1 the whole image; else one of `least` is drawn, and
    `tries` boxes of 0.3 to 1 of each side, of which the first is taken that has a width over height between 1/2 and 2,
    an IoU above the least with *every* object, and an object's centre inside. Below 0, `least` asks nothing.

    The MLPerf reference has one try and asks nothing in the place of 0; Google's code has 50 and takes the last that
    is valid, which has the same distribution as the first. The rules allow 1 and 50.

    Source: arXiv:1512.02325, section 2.2 (data augmentation).

    Attributes:
      tries: boxes drawn at once.
      least: of the IoU.
    """

    tries: int = 50
    least: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)

    def __post_init__(self) -> None:
        if self.tries < 1 or any(one >= 1 for one in self.least):
            raise DataError(f"{self}: at least one try, and an IoU below 1. Change it with --set.")

    def crop(self, box: np.ndarray, size: tuple[int, int], rng: np.random.Generator) -> Crop:
        """The part of an image of this height and width, whose objects' boxes are [n, 4] in pixels."""
        height, width = size
        whole = Crop(0.0, 0.0, width, height)
        if not len(box):
            return whole
        shares = box / [width, height, width, height]
        for _ in range(ROUNDS):
            choice = int(rng.integers(len(self.least) + 1))
            if choice == len(self.least):
                return whole
            sides = rng.uniform(LEAST_SHARE, 1, (self.tries, 2))
            corner = rng.random((self.tries, 2)) * (1 - sides)
            parts = np.concatenate([corner, corner + sides], axis=1)
            ratio = sides[:, 0] * width / (sides[:, 1] * height)
            good = (ratio > 0.5) & (ratio < 2) & centres_inside(shares, parts).any(1)
            good &= (overlaps(parts, shares) > self.least[choice]).all(1)
            if good.any():
                left, top, right, bottom = (parts[int(np.argmax(good))] * [width, height, width, height]).tolist()
                return Crop(left, top, right - left, bottom - top)
        return whole


def visible(box: np.ndarray, crop: Crop) -> np.ndarray:
    """Which boxes, [n, 4], have their centre inside the crop: their numbers."""
    part = np.array([[crop.left, crop.top, crop.left + crop.width, crop.top + crop.height]])
    return np.flatnonzero(centres_inside(box, part)[0])


def centres_inside(box: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Whether the centre of box j lies in part i: bool [parts, boxes]."""
    centre = (box[:, :2] + box[:, 2:]) / 2
    return ((centre > parts[:, None, :2]) & (centre < parts[:, None, 2:])).all(-1)


def overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """IoU of every pair of boxes, [n, 4] and [m, 4], as [n, m]."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.maximum(high - low, 0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (first, second)]
    return shared / np.maximum(areas[0][:, None] + areas[1] - shared, 1e-12)
