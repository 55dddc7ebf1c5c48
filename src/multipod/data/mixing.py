"""Images and labels mixed in pairs: mixup and CutMix, as a pure function of the seed and of the batch's place.

Rows 2k and 2k + 1 of the whole batch are a pair: whoever reads a row reads its partner with it, so that a batch is the
same however many hosts, threads or processes make it. A last row without a partner stays as it is.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from multipod.data.source import HostBatch
from multipod.errors import DataError


@dataclass(frozen=True)
class Mixing:
    """What is mixed. A batch has one share, and CutMix one box, for all its pairs.

    Source: mixup, Zhang et al., 2017, arXiv:1710.09412; CutMix, Yun et al., 2019, arXiv:1905.04899. The box is
    torchvision's, the rounding of bytes that of timm's collate function.

    Attributes:
      mixup: alpha of Beta(alpha, alpha), from which the share of the own image is drawn; 0: no mixup.
      cutmix: alpha of CutMix's; 0: no CutMix.
      switch: of both, how often CutMix is taken.
      probability: the share of the batches that are mixed.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    switch: float = 0.5
    probability: float = 1.0

    def __post_init__(self) -> None:
        wrong = [f"{name}={getattr(self, name)} (at least 0)" for name in ("mixup", "cutmix") if not self._alpha(name)]
        shares = [name for name in ("switch", "probability") if not 0 <= getattr(self, name) <= 1]
        wrong += [f"{name}={getattr(self, name)} (0 to 1)" for name in shares]
        if wrong:
            raise DataError(f"mixing: {', '.join(wrong)}. Change it in the recipe or with --set.")

    def _alpha(self, name: str) -> bool:
        return 0 <= getattr(self, name) < math.inf

    def draw(self, rng: np.random.Generator, height: int, width: int) -> "Mix":
        """What is done to a batch of images of this size."""
        mixed, cut = rng.random(2)
        if not (self.mixup or self.cutmix) or mixed >= self.probability:
            return Mix(1.0, None)
        if not self.cutmix or (self.mixup and cut >= self.switch):
            return Mix(float(rng.beta(self.mixup, self.mixup)), None)
        y, x = (int(place) for place in rng.integers((height, width)))
        return cut_box(float(rng.beta(self.cutmix, self.cutmix)), y, x, height, width)


class Mix(NamedTuple):
    """What is done to the pairs of a batch.

    Attributes:
      own: the share of the own label, and without a box of the own image.
      box: top, left, bottom, right of what comes from the partner, in pixels; None: all is mixed.
    """

    own: float
    box: tuple[int, int, int, int] | None

    def apply(self, batch: HostBatch, partner: np.ndarray) -> HostBatch:
        """`batch` with image i mixed with image `partner[i]`, `mixed_label` int32 [n] and `mixed_share` float32 [n].

        The images are written into their own array. An image that is its own partner stays as it is.
        """
        images, labels = batch["image"], batch["label"]
        alone = partner == np.arange(len(images))
        if self.box is not None:
            top, left, bottom, right = self.box
            images[:, top:bottom, left:right] = images[partner, top:bottom, left:right]
        elif self.own < 1:
            own = np.float32(self.own)
            mixed = images.astype(np.float32) * own + images[partner].astype(np.float32) * (1 - own)
            mixed = np.rint(mixed) if images.dtype.kind == "u" else mixed
            images[...] = np.where(alone[:, None, None, None], images, mixed)
        share = np.where(alone, 0, 1 - self.own).astype(np.float32)
        return batch | {"mixed_label": labels[partner].astype(np.int32), "mixed_share": share}


def cut_box(own: float, y: int, x: int, height: int, width: int) -> Mix:
    """The box about (y, x) with the share 1 - `own` of the area, cut at the edges; `own` is then what is left."""
    half = 0.5 * math.sqrt(1 - own)
    rows, columns = int(half * height), int(half * width)
    top, bottom = max(y - rows, 0), min(y + rows, height)
    left, right = max(x - columns, 0), min(x + columns, width)
    return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, left, bottom, right))


@runtime_checkable
class Mixes(Protocol):
    """A source of `image` and `label` whose training batches are mixed."""

    @property
    def mixing(self) -> Mixing | None:
        """What is mixed; None: nothing."""
        ...


def mixing_of(source: object) -> Mixing | None:
    """What a source mixes; None if nothing."""
    return source.mixing if isinstance(source, Mixes) else None


def partners(rows: np.ndarray, batch: int) -> np.ndarray:
    """The partner of each row of a batch of so many."""
    partner = rows ^ 1
    return np.where(partner < batch, partner, rows)


def unmixed(example: HostBatch) -> HostBatch:
    """`example` with the entries that mixing adds, for their shapes."""
    count = len(example["label"])
    return example | {"mixed_label": np.zeros(count, np.int32), "mixed_share": np.zeros(count, np.float32)}
