"""Which part of an image is shown: a box in its own pixels, from a few random numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from multipod.data.images.jpeg import Box
from multipod.errors import DataError

TRIES = 10
DRAWS = 2 * TRIES + 3
"""Numbers in [0, 1) that a random crop is made of: two for each try, two for its place, one for the flip."""

View = Callable[[int, int], tuple[Box, bool]]
"""From width and height to the box that is shown, and whether it is mirrored."""


@dataclass(frozen=True)
class RandomCrop:
    """A box of random size, shape and place, and whether it is mirrored.

    Source: "Going deeper with convolutions", Szegedy et al., 2014, arXiv:1409.4842, section 6, with the ten tries and
    the fallback to the largest middle box that are common since.

    Attributes:
      area: the box's share of the image, uniform between these.
      ratio: its width over its height, log-uniform between these.
      flip: how often it is mirrored.
    """

    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def __post_init__(self) -> None:
        wrong = []
        if not 0 < self.area[0] <= self.area[1] <= 1:
            wrong.append(f"area={self.area} (two shares of the image, the smaller first, above 0)")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            wrong.append(f"ratio={self.ratio} (two numbers above 0, the smaller first)")
        if not 0 <= self.flip <= 1:
            wrong.append(f"flip={self.flip} (0 to 1)")
        if wrong:
            raise DataError(f"random crop: {'; '.join(wrong)}. Change it in the recipe or with --set.")

    def views(self, draws: np.ndarray) -> list[View]:
        """What each row of `draws`, [n, DRAWS], shows of an image of any size."""
        tries = draws[:, : 2 * TRIES]
        areas = self.area[0] + tries[:, ::2] * (self.area[1] - self.area[0])
        low, span = math.log(self.ratio[0]), math.log(self.ratio[1] / self.ratio[0])
        shapes = np.exp(low + tries[:, 1::2] * span)
        columns = (areas.tolist(), shapes.tolist(), draws[:, -3:].tolist())
        return [_RandomView(self, *row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class _RandomView:
    """A random box, of an image whose size is not known yet.

    Attributes:
      crop: the rules.
      areas: shares of the image, one for each try.
      shapes: width over height, likewise.
      rest: numbers in [0, 1): how far from the left, how far from the top, and whether it is mirrored.
    """

    crop: RandomCrop
    areas: list[float]
    shapes: list[float]
    rest: list[float]

    def __call__(self, width: int, height: int) -> tuple[Box, bool]:
        """The box inside an image of this size, and whether it is mirrored."""
        across, down, mirrored = self.rest
        flip = mirrored < self.crop.flip
        for share, shape in zip(self.areas, self.shapes, strict=True):
            area = width * height * share
            wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < wide <= width and 0 < high <= height:
                return (int(across * (width - wide + 1)), int(down * (height - high + 1)), wide, high), flip
        wide = min(width, max(1, round(height * self.crop.ratio[1])))
        high = min(height, max(1, round(width / self.crop.ratio[0])))
        return ((width - wide) // 2, (height - high) // 2, wide, high), flip


def middle_square(width: int, height: int, share: float) -> Box:
    """The middle square whose side is `share` of the shorter side: what evaluation shows.

    At 0.875 it is what resizing the shorter side to 256 and cutting out 224 gives.
    """
    side = min(width, height) * share
    return (width - side) / 2, (height - side) / 2, side, side
