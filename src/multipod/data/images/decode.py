"""Any image as pixels, upright and in RGB: what is plain JPEG goes a fast way, all else Pillow's."""

import io
import warnings

import numpy as np

from multipod.data.files.disk import Damaged
from multipod.data.images import jpeg
from multipod.data.pillow import Image, ImageOps
from multipod.errors import MissingPackageError

MOST_PIXELS = 178_956_970
"""Larger images are taken for damaged: Pillow's own limit, beyond which it fears an attack."""


def is_jpeg(data: bytes) -> bool:
    """Whether it begins as JPEGs do."""
    return data[:3] == b"\xff\xd8\xff"


def decode(data: bytes, shorter: int = 0) -> np.ndarray:
    """The image, uint8 [height, width, 3]: grey, CMYK, palettes, 16 bits and transparency become RGB; Exif turns it.

    Transparent pixels keep their colour. 16 bits are cut to the upper 8. With `shorter`, plain JPEGs may come at 1/2,
    1/4 or 1/8 of their size, as long as the shorter side keeps so many pixels: a picture of 60 million is then no
    larger than is needed.

    Raises:
      Damaged: it is empty, cut, of no known format, or larger than `MOST_PIXELS`.
    """
    if not data:
        raise Damaged("it has no bytes")
    if is_jpeg(data):
        head = jpeg.header(data)
        _check_size(head.width, head.height)
        if head.plain and head.orientation == 1:
            return jpeg.decode(data, _eighths(min(head.width, head.height), shorter))
    return _by_pillow(data)


def _eighths(side: int, least: int) -> int:
    return next((scale for scale in (1, 2, 4) if least and side * scale >= 8 * least), 8)


def _by_pillow(data: bytes) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata; what is wrong with the pixels is an error
            with Image.open(io.BytesIO(data)) as image:
                _check_size(*image.size)
                image.load()
                upright = ImageOps.exif_transpose(image)
                return np.ascontiguousarray(_rgb(upright))
    except (Damaged, MissingPackageError):
        raise
    except Exception as error:  # a damaged file meets anything in a decoder: struct.error, IndexError, ...
        raise Damaged(str(error) or type(error).__name__) from error


def _rgb(image: "Image.Image") -> np.ndarray:
    if image.mode.startswith("I") or image.mode == "F":  # 16 or 32 bits, grey
        grey = np.asarray(image)
        grey = (grey / 256 if grey.max(initial=0) > 255 else grey).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"))


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise Damaged(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}")
