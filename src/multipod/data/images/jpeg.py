"""JPEG by libjpeg-turbo: the part of an image that a crop shows, decoded no finer than needed (`jpeg.c`).

`jpeg.c` is compiled at first use against the system's libjpeg-turbo (on Debian: libjpeg62-turbo-dev). Where that
cannot be done, simplejpeg (the extra `data`) or else Pillow decodes whole images, by libjpeg-turbo too, and Pillow cuts
and resizes: the same pixels to one step of 255 where nothing is decoded at a smaller scale, at twice the time or more.
"""

import ctypes
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from multipod import native
from multipod.data.files.disk import Damaged
from multipod.data.pillow import Image
from multipod.errors import NativeError
from multipod.extras import import_optional, is_installed

Box = tuple[float, float, float, float]
"""Left, top, width, height, in pixels of the whole image."""

_OTHER_COLOURS = 2
_ORIENTATION = 0x0112


class Header(NamedTuple):
    """What a JPEG says of itself.

    Attributes:
      width: pixels as they are stored.
      height: likewise.
      plain: grey, RGB or YCbCr, which `crop` decodes; not CMYK and its like.
      orientation: 1 to 8 as Exif counts: 1 is upright.
    """

    width: int
    height: int
    plain: bool
    orientation: int


@cache
def library() -> ctypes.CDLL | None:
    """The compiled `jpeg.c`, or None where it cannot be had."""
    here = Path(__file__).parent
    sources = [here / "jpeg.c", here / "resize.c"]
    flags = ("-O3", "-march=native", "-std=gnu11", "-ljpeg", "-lm")
    try:
        loaded = ctypes.CDLL(str(native.library("multipod-jpeg", sources, headers=[here / "resize.h"], flags=flags)))
    except (NativeError, OSError):
        return None
    size, real, number = ctypes.c_size_t, ctypes.POINTER(ctypes.c_double), ctypes.c_int
    text, pixels = ctypes.c_char_p, ctypes.c_void_p
    loaded.mp_jpeg_header.argtypes = [text, size, ctypes.POINTER(number), text]
    loaded.mp_jpeg_crop.argtypes = [text, size, real, number, number, number, number, pixels, text]
    loaded.mp_jpeg_decode.argtypes = [text, size, number, pixels, text]
    loaded.mp_pixels_crop.argtypes = [number, pixels, pixels, pixels, pixels, number, number, pixels]
    return loaded


def header(data: bytes) -> Header:
    """The head of a JPEG; nothing is decoded.

    Raises:
      Damaged: it cannot be read.
    """
    compiled = library()
    if compiled is None:
        return _header_by_pillow(data)
    info, message = (ctypes.c_int * 5)(), ctypes.create_string_buffer(200)
    if compiled.mp_jpeg_header(data, len(data), info, message):
        raise Damaged(_text(message))
    return Header(info[0], info[1], bool(info[3]), info[4])


def crop(data: bytes, box: Box, out: np.ndarray, flip: bool = False, exact: bool = False) -> None:
    """Writes the box of a plain JPEG, resized and, if asked, mirrored, into `out`, uint8 [height, width, 3].

    The filter is a triangle over two pixels, or two output pixels where it shrinks: Pillow's `BILINEAR`, also at the
    box's edge, where it sees what lies beside the box.

    Args:
      data: the file.
      box: inside the image.
      out: contiguous; any row of a batch is.
      flip: left becomes right.
      exact: decode at full size, as if from `decode`. Otherwise at 1/2, 1/4 or 1/8 where that is enough for `out`.

    Raises:
      Damaged: what the box shows cannot be decoded. What is below it is not looked at.
    """
    compiled = library()
    if compiled is None:
        crop_pixels(decode(data), box, out, flip)
        return
    message = ctypes.create_string_buffer(200)
    height, width = out.shape[:2]
    given = (ctypes.c_double * 4)(*box)
    code = compiled.mp_jpeg_crop(data, len(data), given, height, width, flip, exact, out.ctypes.data, message)
    if code:
        raise Damaged("its colours are not RGB" if code == _OTHER_COLOURS else _text(message))


def decode(data: bytes, eighths: int = 8) -> np.ndarray:
    """All of a plain JPEG at 8, 4, 2 or 1 eighths of its size, uint8 [height, width, 3].

    Raises:
      Damaged: it cannot be decoded to its end.
    """
    compiled = library()
    if compiled is None:
        return _decode_without(data, eighths)
    head, message = header(data), ctypes.create_string_buffer(200)
    out = np.empty((-(-head.height * eighths // 8), -(-head.width * eighths // 8), 3), np.uint8)
    if compiled.mp_jpeg_decode(data, len(data), eighths, out.ctypes.data, message):
        raise Damaged(_text(message))
    return out


def crop_pixels(image: np.ndarray, box: Box, out: np.ndarray, flip: bool = False) -> None:
    """Does what `crop` does, from decoded pixels, uint8 [height, width, 3], contiguous."""
    crop_many([image], [box], [flip], out[None], [0])


def crop_many(
    images: Sequence[np.ndarray],
    boxes: Sequence[Box],
    flips: Sequence[bool],
    out: np.ndarray,
    rows: Sequence[int],
) -> None:
    """Crops many decoded images in one call without Python's lock: the i-th goes to `out[rows[i]]`."""
    compiled = library()
    if compiled is None:
        for image, box, flip, row in zip(images, boxes, flips, rows, strict=True):
            _crop_without(image, box, out[row], flip)
        return
    height, width = out.shape[1:3]
    pixels = np.array([image.__array_interface__["data"][0] for image in images], np.uintp)
    target = out.ctypes.data + np.array(rows, np.uintp) * np.uintp(out.strides[0])
    sizes = np.array([image.shape[:2] for image in images], np.intc)
    given = (pixels, sizes, np.array(boxes, np.float64), np.array(flips, np.uint8))
    places = [array.ctypes.data for array in given]
    if compiled.mp_pixels_crop(len(images), *places, height, width, target.ctypes.data):
        raise MemoryError


def _crop_without(image: np.ndarray, box: Box, out: np.ndarray, flip: bool) -> None:
    height, width = out.shape[:2]
    edges = (box[0], box[1], box[0] + box[2], box[1] + box[3])
    resized = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR, box=edges))
    out[...] = resized[:, ::-1] if flip else resized


def _header_by_pillow(data: bytes) -> Header:
    try:
        with Image.open(io.BytesIO(data)) as image:
            orientation = image.getexif().get(_ORIENTATION, 1)
            plain = image.mode in ("L", "RGB")
            return Header(*image.size, plain, orientation if orientation in range(1, 9) else 1)
    except (OSError, SyntaxError, ValueError) as error:
        raise Damaged(str(error)) from error


def _decode_without(data: bytes, eighths: int) -> np.ndarray:
    try:
        if is_installed("simplejpeg"):
            return import_optional("images", "simplejpeg").decode_jpeg(data, "RGB", min_factor=8 / eighths)
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (-(-image.width * eighths // 8), -(-image.height * eighths // 8)))
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise Damaged(str(error)) from error


def _text(message: ctypes.Array[ctypes.c_char]) -> str:
    return message.value.decode(errors="replace") or "it cannot be decoded"
