"""The images of a recipe: where their files are, and what training and evaluation show of them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from multipod.data.files.disk import Damaged
from multipod.data.files.formats import open_records
from multipod.data.files.records import Records
from multipod.data.images.augment import Name, policy
from multipod.data.images.crop import RandomCrop
from multipod.data.images.source import ImageFields, Images
from multipod.data.mixing import Mixing, unmixed
from multipod.data.order import FilesThenBuffer, Order, OwnShares
from multipod.data.source import HostBatch
from multipod.errors import DataError

IMAGE_FIELDS = ("image", "image/encoded", "jpg", "jpeg", "png", "webp", "img")
LABEL_FIELDS = ("label", "image/class/label", "cls", "class", "labels", "fine_label")


@dataclass(frozen=True)
class ImageFiles:
    """Labelled images in files of any format of `multipod.data.files.formats`.

    Attributes:
      train_files: a folder, a file or a pattern of files to learn from, as `imagenet/train` or `imagenet/train-*`.
      test_files: the same, to be judged by.
      format: a name of `FORMATS`; empty: by what is there.
      pixels: height and width of what the model sees.
      image_field: where a record keeps the image; empty: the first of `IMAGE_FIELDS` that it has.
      label_field: likewise, `LABEL_FIELDS`.
      first_label: the label of the first class: 1 in ImageNet's TFRecords.
      area: share of the image in a random crop, from and to. (Google's multipod took 0.05 to 1 where it decoded only
        the crop, and 0.08 to 1 from decoded images; arXiv:2011.03641.)
      ratio: width over height of a random crop, from and to.
      flip: how often it is mirrored.
      middle_share: of the shorter side, that evaluation shows.
      augment: further changes in training: none, randaugment or autoaugment.
      operations: of RandAugment, for each image.
      magnitude: of RandAugment, 0 to 10.
      decode: `crop` only what the crop shows, no finer than needed; or the `whole` image, which a cache can keep.
      shuffle_files: 0: all examples in random order. Otherwise so many files are read in turn, into a buffer.
      shuffle_buffer: examples in that buffer.
      own_shares: 0: any row of a batch may read any example. Otherwise the data and the rows are cut into so many
        shares, and each reads its own (`multipod.data.order.OwnShares`): for decoded caches on many hosts.
      mixing: mixup and CutMix of training images; None: neither.
    """

    train_files: str = ""
    test_files: str = ""
    format: str = ""
    pixels: int = 224
    image_field: str = ""
    label_field: str = ""
    first_label: int = 0
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    middle_share: float = 0.875
    augment: Name = "none"
    operations: int = 2
    magnitude: float = 9.0
    decode: Literal["crop", "whole"] = "crop"
    shuffle_files: int = 0
    shuffle_buffer: int = 16384
    own_shares: int = 0
    mixing: Mixing | None = None

    def __post_init__(self) -> None:
        if self.shuffle_files and self.own_shares:
            raise DataError("image files: shuffle_files and own_shares are two orders. Set one of them to 0.")
        if self.pixels < 1 or not 0 < self.middle_share <= 1 or self.shuffle_files < 0:
            raise DataError(
                f"image files: pixels={self.pixels} (at least 1), middle_share={self.middle_share} (above 0, to 1), "
                f"shuffle_files={self.shuffle_files} (0 or more). Change it in the recipe or with --set."
            )

    def train(self) -> Images:
        """Random crops, in random order."""
        order: Order | None = OwnShares(self.own_shares) if self.own_shares else None
        if self.shuffle_files:
            order = FilesThenBuffer(self.shuffle_files, self.shuffle_buffer)
        return self._images(
            "train_files",
            random=RandomCrop(self.area, self.ratio, self.flip),
            policy=policy(self.augment, self.operations, self.magnitude),
            mixing=self.mixing,
            order=order,
        )

    def test(self) -> Images:
        """The middles, in order."""
        return self._images("test_files")

    def example(self) -> HostBatch:
        """One example, of zeros: its shapes and types, without any file."""
        image = np.zeros((1, self.pixels, self.pixels, 3), np.uint8)
        example: HostBatch = {"image": image, "label": np.zeros(1, np.int32)}
        return example if self.mixing is None else unmixed(example)

    def _images(self, part: str, **how: object) -> Images:
        where = getattr(self, part)
        if not where:
            raise DataError(
                f"the recipe does not say where its images are. Give --set data.{part}=FOLDER, with a folder for each "
                "class, or a pattern of TFRecord, ArrayRecord, tar or Parquet files."
            )
        records = _opened(where, self.format)
        return Images(
            records,
            self._fields(records),
            self.pixels,
            middle_share=self.middle_share,
            whole=self.decode == "whole",
            **how,  # type: ignore[arg-type]
        )

    def _fields(self, records: Records) -> ImageFields:
        """Which fields hold image and label: as told, or found in the first record that can be read."""
        if self.image_field and self.label_field:
            return ImageFields(self.image_field, self.label_field, self.first_label)
        names = _field_names(records)
        image = self.image_field or next((name for name in IMAGE_FIELDS if name in names), "")
        label = self.label_field or next((name for name in LABEL_FIELDS if name in names), "")
        if not image or not label:
            raise DataError(
                f"{records.name(0)} has the fields {', '.join(names)}, and none is known as "
                f"{'an image' if not image else 'a label'}. Set data.image_field and data.label_field."
            )
        return ImageFields(image, label, self.first_label)


@lru_cache(maxsize=8)
def _opened(where: str, kind: str) -> Records:
    """The records: listing a million files once is enough."""
    return open_records(where, kind)


def _field_names(records: Records) -> list[str]:
    reason = ""
    for number in range(min(len(records), 100)):
        try:
            return sorted(records.record(number))
        except Damaged as error:
            reason = reason or str(error)
    raise DataError(f"{records.name(0)} and the next 99 cannot be read: {reason}. See whether the format is right.")
