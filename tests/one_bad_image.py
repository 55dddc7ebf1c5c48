"""`tiny_recipe.tiny` on images of which one is not finite; a file of its own, as a user's recipe is."""

from dataclasses import dataclass, replace

import numpy as np
from tiny_recipe import tiny

from multipod.data.digits import Digits, ShiftedImages
from multipod.recipe.recipe import Recipe

BAD = 700
"""The number of the image that is not finite."""


@dataclass(frozen=True)
class OneBadImage(Digits):
    """The digits, of which one training image has a pixel that is not finite."""

    def train(self) -> ShiftedImages:
        """The examples to learn from."""
        images = super().train()
        images.arrays["image"][BAD, 4, 4] = np.nan
        return images


def poisoned() -> Recipe:
    """A perceptron that meets a bad image."""
    return replace(tiny(), data=OneBadImage(), updates=30, evaluate_every=0, checkpoint_every=4)
