"""The 1,797 handwritten digits, 8 x 8 pixels, that scikit-learn made known. They lie beside this file."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from multipod.data.source import ArraySource, HostBatch
from multipod.errors import DataError
from multipod.pytrees import IdRange

TOTAL = 1797
"""Images of the data set."""


@dataclass(frozen=True)
class Digits:
    """A stratified split of the digits: 1,437 to train on and 360 to test with, at the default 80/20.

    Source: the test part of the UCI Optical Recognition of Handwritten Digits data set (E. Alpaydin and C. Kaynak,
    1998, doi:10.24432/C50P49, CC BY 4.0), in the order of scikit-learn's `load_digits`. The split is that of its
    `train_test_split`, stratified, for the same seed.

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
        images, labels = _all()
        parts = stratified_split(labels, self.test_share, self.split_seed)
        train, test = ({"image": images[part], "label": labels[part]} for part in parts)
        return train, test


@cache
def _all() -> tuple[np.ndarray, np.ndarray]:
    """The images, float32 [1797, 8, 8, 1] from 0 to 1, and their labels, int32 [1797]."""
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images = (stored["images"] / 16).astype(np.float32)[..., None]
        return images, stored["labels"].astype(np.int32)


def stratified_split(labels: np.ndarray, test_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the examples to train on and to test with, both shuffled.

    Each class has its share of both, to one example. The draws are those of scikit-learn's `train_test_split`, so the
    parts are the same as there.
    """
    rng = np.random.RandomState(seed)
    tested = int(np.ceil(test_share * len(labels)))
    counts = np.bincount(labels)
    of_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    trains = _apportion(counts, len(labels) - tested, rng)
    tests = _apportion(counts - trains, tested, rng)
    train, test = [], []
    for members, first, second in zip(of_class, trains, tests, strict=True):
        drawn = members[rng.permutation(len(members))]
        train.append(drawn[:first])
        test.append(drawn[first : first + second])
    return rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))


def _apportion(counts: np.ndarray, total: int, rng: np.random.RandomState) -> np.ndarray:
    """Splits `total` in proportion to `counts`: rounded down, then one more where the remainder is largest.

    Where remainders are equal, `rng` chooses.
    """
    exact = counts / counts.sum() * total
    shares = np.floor(exact)
    remainders = exact - shares
    for remainder in np.unique(remainders)[::-1]:
        left = int(total - shares.sum())
        if left <= 0:
            break
        (equal,) = np.nonzero(remainders == remainder)
        shares[rng.choice(equal, size=min(len(equal), left), replace=False)] += 1
    return shares.astype(int)


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
