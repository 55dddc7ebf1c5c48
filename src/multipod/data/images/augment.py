"""AutoAugment and RandAugment: changes of colour and shape, on uint8 images, by Pillow.

Magnitudes are 0 to 10, as in both papers; `_OPS` says what each means for an operation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np

from multipod.data.pillow import Image, ImageEnhance, ImageOps
from multipod.errors import DataError

GREY = (128, 128, 128)
"""What comes in from outside the image."""


class Policy(Protocol):
    """A random change of an image; which one is a pure function of some numbers in [0, 1)."""

    @property
    def draws(self) -> int:
        """How many numbers."""
        ...

    def apply(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """The changed image, uint8 [height, width, 3]; `draws` are [self.draws]."""
        ...


@dataclass(frozen=True)
class RandAugment:
    """`count` operations, each drawn evenly from all, at one magnitude.

    Source: Cubuk et al., 2019, arXiv:1909.13719: 14 operations, signs at random; 2 operations at 9 on ImageNet.

    Attributes:
      count: operations an image.
      magnitude: 0 to 10.
    """

    count: int = 2
    magnitude: float = 9.0

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.magnitude <= 10:
            raise DataError(f"{self}: at least one operation, of a magnitude from 0 to 10. Change it with --set.")

    @property
    def draws(self) -> int:
        """Two numbers an operation: which, and its sign."""
        return 2 * self.count

    def apply(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """The operations one after the other."""
        changed = Image.fromarray(image)
        for which, sign in draws.reshape(-1, 2).tolist():
            name = RANDOM_OPS[int(which * len(RANDOM_OPS))]
            changed = operate(changed, name, self.magnitude, sign < 0.5)
        return np.asarray(changed)


@dataclass(frozen=True)
class AutoAugment:
    """One of 25 pairs of operations, each of them with its own probability: the policy found on ImageNet.

    Source: Cubuk et al., 2018, arXiv:1805.09501, table 9.
    """

    @property
    def draws(self) -> int:
        """Which pair, and for each of the two whether, and its sign."""
        return 5

    def apply(self, image: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """The pair's operations."""
        numbers = draws.tolist()
        changed = Image.fromarray(image)
        pair = IMAGENET[int(numbers[0] * len(IMAGENET))]
        for (name, probability, magnitude), (whether, sign) in zip(pair, (numbers[1:3], numbers[3:5]), strict=True):
            if whether < probability:
                changed = operate(changed, name, magnitude, sign < 0.5)
        return np.asarray(changed)


Name = Literal["none", "randaugment", "autoaugment"]


def policy(name: Name, count: int = 2, magnitude: float = 9.0) -> Policy | None:
    """The policy of that name; None for `none`."""
    return {"none": None, "randaugment": RandAugment(count, magnitude), "autoaugment": AutoAugment()}[name]


def operate(image: "Image.Image", name: str, magnitude: float, negative: bool) -> "Image.Image":
    """One operation; `negative` is asked only where an operation has a sign."""
    return _OPS[name](image, magnitude / 10, -1.0 if negative else 1.0)


Op = Callable[["Image.Image", float, float], "Image.Image"]


def _affine(image: "Image.Image", matrix: tuple[float, ...]) -> "Image.Image":
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=GREY)


def _shear(image: "Image.Image", share: float, sign: float, axis: int) -> "Image.Image":
    by = sign * 0.3 * share
    return _affine(image, (1, by, 0, 0, 1, 0) if axis == 0 else (1, 0, 0, by, 1, 0))


def _translate(image: "Image.Image", share: float, sign: float, axis: int) -> "Image.Image":
    by = sign * 150 / 331 * share * image.size[axis]
    return _affine(image, (1, 0, by, 0, 1, 0) if axis == 0 else (1, 0, 0, 0, 1, by))


def _rotate(image: "Image.Image", share: float, sign: float) -> "Image.Image":
    return image.rotate(sign * 30 * share, Image.Resampling.BILINEAR, fillcolor=GREY)


def _enhance(image: "Image.Image", share: float, sign: float, how: str) -> "Image.Image":
    return getattr(ImageEnhance, how)(image).enhance(1 + sign * 0.9 * share)


_OPS: dict[str, Op] = {
    "identity": lambda image, share, sign: image,
    "shear_x": partial(_shear, axis=0),
    "shear_y": partial(_shear, axis=1),
    "translate_x": partial(_translate, axis=0),
    "translate_y": partial(_translate, axis=1),
    "rotate": _rotate,
    "autocontrast": lambda image, share, sign: ImageOps.autocontrast(image),
    "invert": lambda image, share, sign: ImageOps.invert(image),
    "equalize": lambda image, share, sign: ImageOps.equalize(image),
    "solarize": lambda image, share, sign: ImageOps.solarize(image, round(256 * (1 - share))),
    "posterize": lambda image, share, sign: ImageOps.posterize(image, 8 - round(4 * share)),
    "contrast": partial(_enhance, how="Contrast"),
    "color": partial(_enhance, how="Color"),
    "brightness": partial(_enhance, how="Brightness"),
    "sharpness": partial(_enhance, how="Sharpness"),
}

RANDOM_OPS = tuple(name for name in _OPS if name != "invert")
"""The 14 operations of RandAugment."""

Pair = tuple[tuple[str, float, int], tuple[str, float, int]]
IMAGENET: tuple[Pair, ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
    (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
    (("color", 0.4, 0), ("equalize", 0.6, 3)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
)
"""Pairs of (operation, probability, magnitude)."""
