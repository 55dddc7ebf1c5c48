"""RoIAlign: features of boxes, by gathering, or by einsums alone; on one map or on a pyramid.

A box is divided into size x size bins. A bin is the mean of samples x samples points, each interpolated bilinearly from
four pixels. Whatever lies on the grid of the points is separable, so that a box's bins are

    out[i, j] = sum over h, w of Y[i, h] X[j, w] map[h, w]

with one matrix for the rows and one for the columns. `einsum` forms them: there is no gather and no scatter, the work
grows with the map, and it splits over boxes and over rows. `gather` reads the pixels that it needs.

Source: arXiv:1703.06870, section 3; the einsums are those of the MLPerf v0.7 submissions in JAX.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Border = Literal["clamp", "zero"]
Way = Literal["gather", "einsum"]


@dataclass(frozen=True)
class RoiAlign:
    """How the features of boxes are sampled.

    Attributes:
      size: bins along each side.
      samples: points along each side of a bin.
      aligned: whether pixel k has its centre at k + 1/2 of the boxes' coordinates, which then may be as small as they
        like; if not it lies at k, and a box is taken as no smaller than one pixel of the map.
      border: `clamp`: points up to one pixel outside the map read its border, points beyond are 0 (torchvision, REF);
        `zero`: pixels outside the map count as 0 (MLPerf v0.7 in JAX). They agree where all points lie inside.
      way: `gather` or `einsum`; the values are equal but for rounding.
    """

    size: int = 7
    samples: int = 2
    aligned: bool = False
    border: Border = "clamp"
    way: Way = "gather"

    def __call__(self, features: jax.Array, boxes: jax.Array, *, scale: float = 1.0) -> jax.Array:
        """The features of boxes on one map, in its dtype: [boxes, size, size, channels].

        Args:
          features: [height, width, channels].
          boxes: [boxes, 4], x0, y0, x1, y1, in units of which the map's pixels are 1 / `scale`.
          scale: pixels of the map for each of the boxes' units.
        """
        return self.of_pyramid([features], boxes, jnp.zeros(len(boxes), jnp.int32), scales=(scale,))

    def of_pyramid(
        self, maps: Sequence[jax.Array], boxes: jax.Array, level: jax.Array, *, scales: Sequence[float]
    ) -> jax.Array:
        """The features of boxes, each on its own map: [boxes, size, size, channels], in the maps' dtype.

        Args:
          maps: each [height, width, channels].
          boxes: [boxes, 4].
          level: int [boxes], which map.
          scales: of each map.
        """
        return (self._gather if self.way == "gather" else self._einsum)(maps, boxes, level, scales)

    def _gather(
        self, maps: Sequence[jax.Array], boxes: jax.Array, level: jax.Array, scales: Sequence[float]
    ) -> jax.Array:
        heights, widths = (jnp.array([one.shape[dim] for one in maps])[level] for dim in (0, 1))
        ends = [0]
        for one in maps:
            ends.append(ends[-1] + one.shape[0] * one.shape[1])
        start = jnp.array(ends[:-1])[level]
        pixels = jnp.concatenate([one.reshape(-1, one.shape[-1]) for one in maps])
        scaled = boxes.astype(jnp.float32) * jnp.array(scales, jnp.float32)[level][:, None]
        rows = self._taps(scaled[:, 1], scaled[:, 3], heights)
        columns = self._taps(scaled[:, 0], scaled[:, 2], widths)
        total: jax.Array | float = 0.0
        for row, row_weight in rows:
            for column, column_weight in columns:
                places = (start[:, None] + row * widths[:, None])[:, :, None] + column[:, None, :]
                weight = row_weight[:, :, None] * column_weight[:, None, :]
                total = total + pixels[places] * weight[..., None].astype(pixels.dtype)
        points = jnp.asarray(total).reshape(len(boxes), self.size, self.samples, self.size, self.samples, -1)
        return points.mean((2, 4), dtype=jnp.float32).astype(pixels.dtype)

    def _einsum(
        self, maps: Sequence[jax.Array], boxes: jax.Array, level: jax.Array, scales: Sequence[float]
    ) -> jax.Array:
        found = []
        for number, (one, scale) in enumerate(zip(maps, scales, strict=True)):
            scaled = boxes.astype(jnp.float32) * scale
            rows = self._matrix(scaled[:, 1], scaled[:, 3], one.shape[0])
            columns = self._matrix(scaled[:, 0], scaled[:, 2], one.shape[1])
            rows = jnp.where((level == number)[:, None, None], rows, 0).astype(one.dtype)
            across = jnp.einsum("nih,hwc->niwc", rows, one)
            found.append(jnp.einsum("niwc,njw->nijc", across, columns.astype(one.dtype)))
        return sum(found[1:], start=found[0])

    def _matrix(self, low: jax.Array, high: jax.Array, size: int) -> jax.Array:
        """[boxes, bins, size]: how much each pixel along one side of the map gives to each bin."""
        pixel = jnp.arange(size)
        taps = self._taps(low, high, jnp.full(len(low), size))
        points = sum(jnp.where(tap.place[..., None] == pixel, tap.weight[..., None], 0) for tap in taps)
        return jnp.asarray(points).reshape(len(low), self.size, self.samples, size).mean(2)

    def _taps(self, low: jax.Array, high: jax.Array, size: jax.Array) -> tuple["_Tap", "_Tap"]:
        """The two pixels along one side of the map that each point lies between.

        `low`, `high` and `size` are [boxes]: the box and the map along that side, in pixels of the map.
        """
        shift = 0.5 if self.aligned else 0.0
        low, length = low - shift, high - low
        if not self.aligned:
            length = jnp.maximum(length, 1.0)
        along = (jnp.arange(self.size * self.samples) + 0.5) / (self.size * self.samples)
        point, last = low[:, None] + along * length[:, None], (size - 1)[:, None]
        if self.border == "zero":
            first = jnp.floor(point)
            taps = (first, 1 - (point - first)), (first + 1, point - first)
            place, weight = zip(*taps, strict=True)
            return tuple(  # type: ignore[return-value]
                _Tap(jnp.clip(k, 0, last).astype(jnp.int32), jnp.where((k >= 0) & (k <= last), w, 0))
                for k, w in zip(place, weight, strict=True)
            )
        inside = (point >= -1) & (point <= last + 1)
        point = jnp.clip(point, 0, last)
        first = jnp.floor(point).astype(jnp.int32)
        share = point - first
        near = _Tap(first, jnp.where(inside, 1 - share, 0))
        return near, _Tap(jnp.minimum(first + 1, last), jnp.where(inside, share, 0))


class _Tap(NamedTuple):
    """A pixel along one side of a map, int32 [boxes, points], and its weight."""

    place: jax.Array
    weight: jax.Array


def pyramid_level(boxes: jax.Array, *, lowest: int = 2, highest: int = 5, size: float = 224, at: int = 4) -> jax.Array:
    """The level whose map a box is read from: floor(at + log2(sqrt(area) / size)), clamped: [..., 4] to int32 [...].

    Level l has strides of 2^l pixels. A box of no area is on the lowest.

    Source: arXiv:1612.03144, equation 1; 1e-6 is added as in torchvision, so that rounding misses no whole number.
    """
    sides = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0).astype(jnp.float32)
    side = jnp.sqrt(sides[..., 0] * sides[..., 1])
    least = size * 2.0 ** (lowest - at - 1)  # so that the logarithm is finite
    level = jnp.floor(at + jnp.log2(jnp.maximum(side, least) / size) + 1e-6)
    return jnp.clip(level, lowest, highest).astype(jnp.int32)


def stride_scales(lowest: int, highest: int) -> tuple[float, ...]:
    """The scales of the maps of levels `lowest` to `highest`: 1 / 2^level."""
    return tuple(math.ldexp(1.0, -level) for level in range(lowest, highest + 1))
