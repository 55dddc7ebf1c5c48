"""The 1,797 handwritten digits, 8 x 8 pixels, that ship inside scikit-learn."""

from dataclasses import dataclass

import numpy as np

from multipod.data.source import ArraySource, HostBatch
from multipod.errors import DataError
from multipod.pytrees import IdRange

TOTAL = 1797
"""Images of the data set."""


@dataclass(frozen=True)
class Digits:
    """A stratified split of the digits: 1,437 to train on and 360 to test with, at the default 80/20.

    Source: scikit-learn's `load_digits`, the test part of the UCI Optical Recognition of Handwritten
    Digits data set (E. Alpaydin and C. Kaynak, 1998, doi:10.24432/C50P49).

    Attributes:
      test_share: the share of examples kept for testing.
      split_seed: which examples these are; not the seed of a run.
      shift: training images move by up to this many pixels along each dim, zeros coming in.
    """

    test_share: float = 0.2
    split_seed: int = 0
    shift: int = 1

    def __post_init__(self) -> None:
        wrong = (
            [] if 10 <= TOTAL * self.test_share <= TOTAL - 10 else [f"test_share={self.test_share} (0.006 to 0.994)"]
        )
        wrong += [] if 0 <= self.shift <= 8 else [f"shift={self.shift} (0 to 8 pixels)"]
        if wrong:
            raise DataError(f"digits: {', '.join(wrong)}. Change it in the recipe or with --set.")

    def ids_given(self) -> dict[str, IdRange]:
        """Labels of the ten digits."""
        return {"label": IdRange((10,), "")}

    def train(self) -> "ShiftedImages":
        """The examples to learn from."""
        return ShiftedImages(self._split()[0], self.shift)

    def test(self) -> ArraySource:
        """The examples to be judged by."""
        return ArraySource(self._split()[1])

    def _split(self) -> tuple[HostBatch, HostBatch]:
        from sklearn.datasets import load_digits  # slow to import, and only the digits need it
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = (digits.images / 16).astype(np.float32)[..., None]
        labels = digits.target.astype(np.int32)
        parts = train_test_split(
            images, labels, test_size=self.test_share, stratify=labels, random_state=self.split_seed
        )
        return {"image": parts[0], "label": parts[2]}, {"image": parts[1], "label": parts[3]}


@dataclass(frozen=True)
class ShiftedImages:
    """Images and labels in memory; in training each image is moved by a random number of pixels."""

    arrays: HostBatch
    shift: int

    def __len__(self) -> int:
        return len(self.arrays["label"])

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers."""
        return {name: array[numbers] for name, array in self.arrays.items()}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """Moves every image by its own offset in [-shift, shift] along each dim."""
        if not self.shift:
            return batch
        offsets = rng.integers(0, 2 * self.shift + 1, size=(rows.max() + 1, 2))[rows]
        return batch | {"image": shift_images(batch["image"], offsets, self.shift)}


def shift_images(images: np.ndarray, offsets: np.ndarray, margin: int) -> np.ndarray:
    """Windows of `images` [n, h, w, c], padded by `margin` zeros, that start at `offsets` [n, 2]."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    rows = offsets[:, 0, None] + np.arange(height)
    columns = offsets[:, 1, None] + np.arange(width)
    return padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
