"""Masks of detections, from the square that a model tells to a run-length code of the whole image."""

from typing import Any

import numpy as np

from multipod.extras import require


def encode_masks(masks: np.ndarray, boxes: np.ndarray, height: int, width: int) -> tuple[dict[str, Any], ...]:
    """One run-length code for each mask, as `pycocotools.mask.encode` makes them.

    A mask is stretched over its box and interpolated bilinearly at the centres of the image's pixels, with zeros around
    it; what is above one half is the object. Nothing is rounded to whole pixels, as torchvision
    does, which makes small objects up to a pixel larger.

    Args:
      masks: [n, m, m], shares of 1.
      boxes: [n, 4], left, top, width, height, inside the image or not.
      height: of the image.
      width: likewise.

    Raises:
      MissingPackageError: pycocotools is not installed.
    """
    require("coco", "pycocotools")
    from pycocotools.mask import encode

    pairs = zip(masks, boxes, strict=True)
    return tuple(encode(np.asfortranarray(_pasted(mask, box, height, width))) for mask, box in pairs)


def _pasted(mask: np.ndarray, box: np.ndarray, height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width), np.uint8)
    low, sides = box[:2], np.maximum(box[2:], 1e-6)
    first = np.maximum(np.floor(low), 0).astype(int)
    end = np.minimum(np.ceil(low + sides), [width, height]).astype(int)
    columns, rows = (_weights(np.arange(first[k], end[k]), low[k], sides[k], mask.shape[-1]) for k in range(2))
    if len(rows) and len(columns):
        picture[first[1] : end[1], first[0] : end[0]] = rows @ mask.astype(np.float32) @ columns.T > 0.5
    return picture


def _weights(pixel: np.ndarray, low: float, length: float, side: int) -> np.ndarray:
    """[pixels, side]: how much of each row of a mask a pixel of the image takes."""
    place = (pixel + 0.5 - low) / length * side - 0.5
    return np.maximum(1 - np.abs(place[:, None] - np.arange(side)), 0).astype(np.float32)
