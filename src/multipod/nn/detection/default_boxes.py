"""SSD's default boxes: a few shapes at every cell of every feature map."""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from multipod.errors import RecipeError


@dataclass(frozen=True)
class DefaultBoxes:
    """The shapes and grids of an SSD's default boxes; as it stands, the 8,732 of SSD300.

    On map k the shapes are, with s the scale over the image's side: (s_k, s_k), (sqrt(s_k s_{k+1}), the same), then for
    each ratio a: (s_k sqrt(a), s_k / sqrt(a)) and the two swapped. Centres are ((j + 1/2) stride / pixels,
    (i + 1/2) stride / pixels) in row i, column j.

    Attributes:
      pixels: the side of the image.
      grids: cells along each side of the maps.
      strides: pixels between the centres of cells, for each map.
      scales: in pixels, one more than there are maps.
      ratios: for each map, width over height; each is there swapped too.

    Source: arXiv:1512.02325, section 2.2; numbers of the MLPerf reference.

    Raises:
      RecipeError: not as many strides, ratios and scales as the grids need.
    """

    pixels: int = 300
    grids: tuple[int, ...] = (38, 19, 10, 5, 3, 1)
    strides: tuple[int, ...] = (8, 16, 32, 64, 100, 300)
    scales: tuple[float, ...] = (21, 45, 99, 153, 207, 261, 315)
    ratios: tuple[tuple[float, ...], ...] = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))

    def __post_init__(self) -> None:
        maps = len(self.grids)
        if (len(self.strides), len(self.ratios), len(self.scales)) != (maps, maps, maps + 1):
            raise RecipeError(
                f"DefaultBoxes: {maps} grids need as many strides and ratios and one scale more, and there are "
                f"{len(self.strides)}, {len(self.ratios)} and {len(self.scales)}. Change them in the recipe."
            )

    @property
    def shapes(self) -> tuple[int, ...]:
        """How many boxes stand at each cell of each map."""
        return tuple(2 + 2 * len(ratios) for ratios in self.ratios)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many boxes each map has."""
        return tuple(shapes * grid**2 for shapes, grid in zip(self.shapes, self.grids, strict=True))

    def centres(self) -> np.ndarray:
        """[boxes, 4], cx, cy, width, height in shares of the image, clipped to [0, 1]; float32.

        Order: map, then shape, then row, then column. So a map's output [n, h, w, shapes * k] is reshaped to
        [n, h, w, shapes, k] and transposed to [n, shapes, h, w, k].
        """
        rows = []
        for grid, stride, sizes in zip(self.grids, self.strides, map(self._sizes, range(len(self.grids))), strict=True):
            along = [(k + 0.5) * stride / self.pixels for k in range(grid)]
            rows += [(x, y, *size) for size, y, x in itertools.product(sizes, along, along)]
        return np.clip(np.array(rows, np.float64), 0, 1).astype(np.float32)

    def corners(self) -> np.ndarray:
        """[boxes, 4], x0, y0, x1, y1 of `centres`, which may reach outside the image; float32."""
        boxes = self.centres()
        return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], -1)

    def _sizes(self, k: int) -> list[tuple[float, float]]:
        side, larger = self.scales[k] / self.pixels, self.scales[k + 1] / self.pixels
        sizes = [(side, side), (math.sqrt(side * larger),) * 2]
        for ratio in self.ratios[k]:
            long, short = side * math.sqrt(ratio), side / math.sqrt(ratio)
            sizes += [(long, short), (short, long)]
        return sizes
