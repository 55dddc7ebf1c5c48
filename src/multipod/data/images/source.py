"""Images in files as a `Source`: what the model sees of each, and what happens to those that cannot be read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from multipod.data.files.disk import Damaged
from multipod.data.files.records import Record, Records
from multipod.data.images import jpeg
from multipod.data.images.augment import Policy
from multipod.data.images.cache import Cache, DiskCache, MemoryCache
from multipod.data.images.crop import DRAWS, RandomCrop, View, middle_square
from multipod.data.images.decode import decode, is_jpeg
from multipod.data.mixing import Mixing
from multipod.data.order import Order, draw_for_rows, epoch_of
from multipod.data.reading import ReadStatistics
from multipod.data.source import HostBatch, fingerprint, space
from multipod.errors import DataError

IN_A_ROW = 100
"""So many examples that cannot be read, one after the other, are no accident."""


@dataclass(frozen=True)
class ImageFields:
    """Where a record keeps the image and the label.

    Attributes:
      image: name of the field.
      label: likewise.
      first_label: the label of the first class; the model's classes begin with 0.
    """

    image: str
    label: str
    first_label: int = 0


@dataclass(frozen=True, eq=False)
class Images:
    """`image`, uint8 [n, pixels, pixels, 3], and `label`, int32 [n].

    In training (`random`), an example that cannot be read is replaced by the next that can; in evaluation it is
    masked. Either way it is in the `statistics`. Which pixels are made depends on nothing but the arguments of `read`
    and `read_augmented`: the cache only saves work, as `whole` decides whether crops come from whole decoded images.

    Attributes:
      records: the files.
      fields: what is where in a record.
      pixels: height and width of what the model sees.
      random: the crops of training; None shows the middle.
      middle_share: of the shorter side, that evaluation shows.
      policy: further changes in training.
      whole: decode whole images, then crop; needed for the cache. Large ones are decoded at 1/2 to 1/8 of their size,
        where the smallest crop keeps all its pixels. Otherwise only what the crop shows is decoded.
      order: by files, or by shares; None reads all examples in random order.
      statistics: notes what was left out, and where the time went.
      cache: of decoded images.
    """

    records: Records
    fields: ImageFields
    pixels: int
    random: RandomCrop | None = None
    middle_share: float = 0.875
    policy: Policy | None = None
    mixing: Mixing | None = None
    whole: bool = False
    order: Order | None = None
    statistics: ReadStatistics = field(default_factory=ReadStatistics)
    cache: Cache | None = None

    def __len__(self) -> int:
        return len(self.records)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The middles. For training, to have shapes, unreadable examples are replaced; for evaluation, masked."""
        return self._read(numbers, [self._middle] * len(numbers), np.zeros((len(numbers), 0)))

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself: what training sees is cropped before it is decoded, by `read_augmented`."""
        return batch

    def read_augmented(
        self, numbers: np.ndarray, rows: np.ndarray, rng: np.random.Generator, out: HostBatch | None = None
    ) -> HostBatch:
        """Random crops, written into `out["image"]` if it is there and fits."""
        if self.random is None:
            return self.read(numbers)
        count = DRAWS + (self.policy.draws if self.policy else 0)
        draws = draw_for_rows(rows, count, rng)
        return self._read(numbers, self.random.views(draws[:, :DRAWS]), draws[:, DRAWS:], out)

    def epoch_order(self, seed: int, epoch: int, batch: int) -> np.ndarray:
        """Every number once, in the order that `order` says, or at random without one."""
        return epoch_of(self.order, self.records.file_ends, seed, epoch, batch)

    def identity(self) -> str:
        """The identity of the records."""
        return self.records.identity()

    def cached(self, budget_bytes: int, folder: str = "") -> "Images":
        """These images with a cache of decoded ones.

        Raises:
          DataError: crops are decoded without the rest of the image, or the folder cannot be used.
        """
        if not self.whole:
            raise DataError(
                "a cache keeps whole decoded images, and these data decode only what each crop shows. "
                'Set data.decode=whole (or decode="whole" in the recipe), or leave the cache out.'
            )
        if not folder:
            return replace(self, cache=MemoryCache(budget_bytes))
        name = fingerprint([self.identity().encode()])
        return replace(self, cache=DiskCache(budget_bytes, Path(folder).expanduser(), name))

    @property
    def _shorter(self) -> int:
        """Pixels of the shorter side at which the smallest crop still has `pixels`, both ways."""
        if self.random is None:
            return math.ceil(self.pixels / self.middle_share)
        narrow = min(self.random.ratio[0], 1 / self.random.ratio[1])
        return math.ceil(self.pixels / math.sqrt(self.random.area[0] * narrow))

    def _middle(self, width: int, height: int) -> tuple[jpeg.Box, bool]:
        return middle_square(width, height, self.middle_share), False

    def _read(
        self, numbers: np.ndarray, views: Sequence[View], further: np.ndarray, out: HostBatch | None = None
    ) -> HostBatch:
        images = space(out, "image", (len(numbers), self.pixels, self.pixels, 3), np.uint8)
        labels = np.zeros(len(numbers), np.int32)
        mask = np.ones(len(numbers), bool)
        left = self._cut_cached(numbers, views, images, labels)
        for row in left:
            label = self._fill(int(numbers[row]), views[row], images[row])
            mask[row] = label is not None
            labels[row] = label or 0
            if label is None:
                images[row] = 0
        if self.policy is not None and further.size:
            with self.statistics.stage("augment", len(numbers)):
                for image, own in zip(images, further, strict=True):
                    image[...] = self.policy.apply(image, own)
        batch: HostBatch = {"image": images, "label": labels}
        return batch if mask.all() else batch | {"mask": mask}

    def _cut_cached(
        self, numbers: np.ndarray, views: Sequence[View], images: np.ndarray, labels: np.ndarray
    ) -> list[int]:
        """Fills the rows whose images are in the cache, all at once; returns the others."""
        if self.cache is None:
            return list(range(len(numbers)))
        found = [self.cache.get(number) for number in numbers.tolist()]
        here = [(row, *kept) for row, kept in enumerate(found) if kept is not None]
        if here:
            with self.statistics.stage("crop", len(here)):
                chosen = [views[row](image.shape[1], image.shape[0]) for row, image, _ in here]
                boxes, flips = zip(*chosen, strict=True)
                jpeg.crop_many([image for _, image, _ in here], boxes, flips, images, [row for row, _, _ in here])
                labels[[row for row, _, _ in here]] = [label for _, _, label in here]
        return [row for row, kept in enumerate(found) if kept is None]

    def _fill(self, number: int, view: View, out: np.ndarray) -> int | None:
        """Writes the example into `out` and returns its label; None if it is masked."""
        for tried in range(min(IN_A_ROW, len(self))):
            at = (number + tried) % len(self)
            try:
                return self._show(at, view, out)
            except Damaged as error:
                self.statistics.skip(at, self.records.name(at), str(error))
            if self.random is None:
                return None
        raise DataError(
            f"{min(IN_A_ROW, len(self))} examples in a row cannot be read, from {self.records.name(number)} on; the "
            f"last: {next(reversed(self.statistics.skipped.values())).reason}. See whether the files are images."
        )

    def _parts(self, record: Record) -> tuple[bytes, int]:
        fields = self.fields
        try:
            data, label = record[fields.image], int(record[fields.label])
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"it has no field {fields.image!r} or no whole number in {fields.label!r}") from error
        if not isinstance(data, bytes):
            raise Damaged(f"its field {fields.image!r} is no bytes")
        return data, label - fields.first_label

    def _show(self, number: int, view: View, out: np.ndarray) -> int:
        """Writes what `view` shows of the example into `out`, and returns its label."""
        with self.statistics.stage("read"):
            data, label = self._parts(self.records.record(number))
        with self.statistics.stage("decode"):
            if self.whole or not self._crop_alone(data, view, out):
                image = decode(data, self._shorter if self.whole else 0)
                if self.cache:
                    self.cache.offer(number, image, label)
                self._cut(image, view, out)
        return label

    def _crop_alone(self, data: bytes, view: View, out: np.ndarray) -> bool:
        """Decodes no more than the crop, if the image is of a kind with which that can be done."""
        if not is_jpeg(data):
            return False
        head = jpeg.header(data)
        if not head.plain or head.orientation != 1:
            return False
        box, flip = view(head.width, head.height)
        jpeg.crop(data, box, out, flip)
        return True

    def _cut(self, image: np.ndarray, view: View, out: np.ndarray) -> None:
        box, flip = view(image.shape[1], image.shape[0])
        jpeg.crop_pixels(image, box, out, flip)
