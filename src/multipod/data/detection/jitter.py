"""Random changes of an image's colours, by Pillow, on uint8."""

from dataclasses import dataclass

import numpy as np

from multipod.data.pillow import Image, ImageEnhance
from multipod.errors import DataError


@dataclass(frozen=True)
class ColorJitter:
    """Brightness, contrast and saturation times a number from 1 - x to 1 + x, hue turned by a share; in any order.

    What torchvision's `ColorJitter` does, with which the MLPerf reference trains SSD. Google's code adds up to 0.125 of
    brightness and keeps one order; the rules allow either.

    Attributes:
      brightness: x of brightness.
      contrast: x of contrast.
      saturation: x of saturation.
      hue: share of the circle, both ways.
    """

    brightness: float = 0.125
    contrast: float = 0.5
    saturation: float = 0.5
    hue: float = 0.05

    def __post_init__(self) -> None:
        shares = (self.brightness, self.contrast, self.saturation)
        if min(*shares, self.hue) < 0 or max(shares) > 1 or self.hue > 0.5:
            raise DataError(f"{self}: shares from 0 to 1, hue from 0 to 0.5. Change it with --set.")

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The changed image, uint8 [height, width, 3]."""
        changed = Image.fromarray(image)
        how = rng.uniform(-1, 1, 4) * (self.brightness, self.contrast, self.saturation, self.hue)
        for number in rng.permutation(4).tolist():
            if number == 3:
                changed = _turn_hue(changed, how[3])
            else:
                changed = getattr(ImageEnhance, _ENHANCE[number])(changed).enhance(1 + how[number])
        return np.asarray(changed)


_ENHANCE = ("Brightness", "Contrast", "Color")


def _turn_hue(image: "Image.Image", by: float) -> "Image.Image":
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(round(by * 255) % 256)  # uint8: round the circle
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
