"""Masks of objects: from polygons and run-length codes to pixels. Polygons need the extra `coco`.

pycocotools draws them: its pixels are the ones that COCO's scorer compares.
"""

from types import ModuleType
from typing import Any

import numpy as np

from multipod.data.detection.objects import Outline
from multipod.data.pillow import Image
from multipod.extras import import_optional

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def wrong_outline(outline: Any, height: int, width: int) -> str:
    """What is wrong with a mask of an image of this size; empty if nothing is."""
    if isinstance(outline, dict):
        counts = outline.get("counts")
        if list(outline.get("size", ())) != [height, width]:
            return "a mask of another size than the image"
        if isinstance(counts, str | bytes):
            counts = _decompressed(counts)
        if not isinstance(counts, list):
            return "a run-length code without counts"
        whole = all(isinstance(one, int) and one >= 0 for one in counts)
        return "" if whole and sum(counts) == height * width else "a run-length code that does not fill the image"
    if not isinstance(outline, list) or not outline:
        return "no mask"
    good = all(isinstance(one, list) and len(one) >= 6 and len(one) % 2 == 0 for one in outline)
    return "" if good else "a polygon of fewer than three points"


def run_length(outline: Outline, height: int, width: int) -> dict[str, Any]:
    """The mask as a compressed run-length code of an image of this size, as `pycocotools.mask.encode` makes them.

    Raises:
      DataError: the code cannot be read.
      MissingPackageError: pycocotools is not installed.
    """
    mask = _pycocotools()
    if isinstance(outline, dict):
        if isinstance(outline["counts"], list):
            return mask.frPyObjects(outline, height, width)
        return outline
    return mask.merge(mask.frPyObjects(outline, height, width))


def bitmap(outline: Outline, height: int, width: int) -> np.ndarray:
    """The mask, uint8 [height, width] of 0 and 1.

    Raises:
      DataError: see `run_length`.
    """
    code = outline if isinstance(outline, dict) else run_length(outline, height, width)
    counts = code["counts"] if isinstance(code["counts"], list) else _decompressed(code["counts"])
    columns = np.repeat((np.arange(len(counts)) % 2).astype(np.uint8), counts)
    return np.ascontiguousarray(columns.reshape(width, height).T)


def mask_in_box(outline: Outline, size: tuple[int, int], box: Box, pixels: int, flip: bool = False) -> np.ndarray:
    """The mask inside of a box, stretched to bool [pixels, pixels].

    Polygons are drawn at that size; run-length codes are decoded, cut out and resized bilinearly, and cut at one half.

    Args:
      outline: the mask.
      size: height and width of the image.
      box: in pixels of the image, of some area.
      pixels: of the result.
      flip: left becomes right.
    """
    left, top, right, bottom = box
    if isinstance(outline, dict):
        whole = Image.fromarray(bitmap(outline, *size) * np.uint8(255))
        resized = whole.resize((pixels, pixels), Image.Resampling.BILINEAR, box=box)
        inside = np.asarray(resized) >= 128
    else:
        scale = pixels / np.array([right - left, bottom - top])
        moved = [((np.reshape(one, (-1, 2)) - (left, top)) * scale).ravel().tolist() for one in outline]
        inside = bitmap(moved, pixels, pixels).astype(bool)
    return inside[:, ::-1] if flip else inside


def _decompressed(text: str | bytes) -> list[int]:
    """The runs of a compressed code: 5 bits a character, the sixth says that more follow; from the fourth run on
    the difference to the one two before it."""
    counts: list[int] = []
    value = shift = 0
    for character in text.encode() if isinstance(text, str) else text:
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    return counts


def _pycocotools() -> ModuleType:
    return import_optional("masks", "pycocotools.mask")
