"""Small images in files, for the tests of host input."""

import io
import zlib

import numpy as np
from PIL import Image


def picture(number: int, width: int = 40, height: int = 30) -> np.ndarray:
    """Smooth, so that JPEG keeps it: a coloured wave of its own for each number."""
    y, x = np.mgrid[0:height, 0:width] / 8.0
    waves = [np.sin(x + number) * np.cos(y * (1 + k / 3) + number) for k in range(3)]
    return (np.stack(waves, -1) * 90 + 128).astype(np.uint8)


def as_file(image: np.ndarray | Image.Image, kind: str = "JPEG", **how) -> bytes:
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(out, kind, **how)
    return out.getvalue()


def as_jpeg(number: int, width: int = 40, height: int = 30) -> bytes:
    return as_file(picture(number, width, height), quality=92)


def records(count: int):
    """Records of images of two classes."""
    return [{"image": as_jpeg(k), "label": k % 2} for k in range(count)]


def write_folder(root, count, classes=("cat", "dog")):
    """A folder for each class; the label of an image is the parity of its number."""
    for name in classes:
        (root / name).mkdir(parents=True, exist_ok=True)
    for k in range(count):
        (root / classes[k % len(classes)] / f"{k:04d}.jpg").write_bytes(as_jpeg(k))
    return root


def checksum_of(image: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(image).tobytes())
