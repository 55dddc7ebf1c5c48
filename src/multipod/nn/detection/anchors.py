"""Anchors of a feature pyramid: three shapes at every cell of every level, one size a level."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Reading = Literal["torchvision", "reference", "google"]


@dataclass(frozen=True)
class Anchors:
    """The anchors of a pyramid's levels, [x0, y0, x1, y1] in pixels of the padded image.

    Attributes:
      strides: pixels between cells, for each level.
      sizes: the side of the square anchor, in pixels, for each level.
      ratios: height over width of each shape; `google` has its own three.
      reading: who is followed.

        - `torchvision`: equal areas, half sides rounded to pixels; centres at stride * (j, i). The stride of a level is
          the image's side over its cells, rounded down, so 61 for 13 cells of an image of 800 pixels.
        - `reference` (Detectron): shapes of equal area rounded to pixels at the stride's size, then scaled; corners are
          first and last pixels; centres at (stride - 1) / 2 + stride * (j, i).
        - `google`: (1, 1), (1.4, 0.7) and (0.7, 1.4) of the size as width and height; centres at
          stride / 2 + stride * (j, i).

    Source: arXiv:1612.03144, section 4.1.
    """

    strides: tuple[int, ...] = (4, 8, 16, 32, 64)
    sizes: tuple[float, ...] = (32, 64, 128, 256, 512)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    reading: Reading = "torchvision"

    @property
    def shapes(self) -> int:
        """How many anchors stand at each cell."""
        return 3 if self.reading == "google" else len(self.ratios)

    def grids(self, height: int, width: int) -> list[tuple[int, int]]:
        """Rows and columns of the cells of each level, for an image of `height` x `width` pixels."""
        return [(-(-height // stride), -(-width // stride)) for stride in self.strides]

    def levels(self, height: int, width: int) -> list[np.ndarray]:
        """The anchors of each level, [rows * columns * shapes, 4] in that order; float32."""
        found = []
        for stride, size, (rows, columns) in zip(self.strides, self.sizes, self.grids(height, width), strict=True):
            step_y, step_x = stride, stride
            if self.reading == "torchvision":
                step_y, step_x = height // rows, width // columns
            y, x = np.meshgrid(np.arange(rows) * step_y, np.arange(columns) * step_x, indexing="ij")
            cells = np.stack([x, y, x, y], -1).reshape(-1, 1, 4)
            found.append((cells + self._at_origin(stride, size)).reshape(-1, 4).astype(np.float32))
        return found

    def _at_origin(self, stride: int, size: float) -> np.ndarray:
        """[shapes, 4]: the anchors of the cell in row 0, column 0."""
        if self.reading == "google":
            sides = size * np.array([(1.0, 1.0), (1.4, 0.7), (0.7, 1.4)])
            return np.concatenate([stride / 2 - sides / 2, stride / 2 + sides / 2], -1)
        ratios = np.array(self.ratios)
        if self.reading == "torchvision":
            # In float32, as torchvision computes: a half side may lie on the edge between two pixels.
            tall = np.sqrt(ratios.astype(np.float32))
            half = np.stack([1 / tall * np.float32(size), tall * np.float32(size)], -1) / np.float32(2)
            return np.round(np.concatenate([-half, half], -1))
        wide = np.round(np.sqrt(stride**2 / ratios))
        sides = np.stack([wide, np.round(wide * ratios)], -1) * (size / stride)
        centre = (stride - 1) / 2
        return np.concatenate([centre - (sides - 1) / 2, centre + (sides - 1) / 2], -1)
