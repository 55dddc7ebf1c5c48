"""Images in folders: one folder for each class, or one folder and a table of labels."""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from multipod.data.files.disk import read_whole
from multipod.data.files.records import Record, Records
from multipod.data.source import fingerprint
from multipod.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
SHOWN = 5


@dataclass(frozen=True, eq=False)
class ImageFolder(Records):
    """Fields `image` (bytes as in the file) and `label`.

    Without a table the label is the place of the example's folder among all folders, in the order of their names:
    ImageNet's own order. Names are kept as fixed-width bytes, about 30 bytes an image.

    Attributes:
      root: the folder.
      names: of the images below it, as bytes.
      labels: their classes, int32.
      classes: names of the classes; empty with a table.
    """

    root: Path
    names: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def record(self, number: int) -> Record:
        """The image's bytes and its label."""
        return {"image": read_whole(self._path(number)), "label": int(self.labels[number])}

    def name(self, number: int) -> str:
        """The path of the image."""
        return str(self._path(number))

    @property
    def file_ends(self) -> np.ndarray:
        """One for each run of images with one label: what a shuffle of files would see."""
        return np.append(np.flatnonzero(np.diff(self.labels)) + 1, len(self.labels))

    @cached_property
    def _identity(self) -> str:
        return f"{len(self):,} images {fingerprint([self.names.tobytes(), self.labels.tobytes()])}"

    def identity(self) -> str:
        """A fingerprint of all names and labels; what is in the images is not read."""
        return self._identity

    def _path(self, number: int) -> Path:
        return self.root / os.fsdecode(self.names[number])


def open_folder(root: Path, table: Path | None = None) -> ImageFolder:
    """The images below `root`, labelled by their folders, or by `table`: lines `name,label`, or `labels.csv` there.

    Raises:
      DataError: no folder, no images, images outside the folders of classes, or a table that disagrees with the images.
    """
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder. Name the folder that holds a folder for each class.")
    table = table or (root / "labels.csv" if (root / "labels.csv").is_file() else None)
    found = sorted(_images(root, ""))
    if not found:
        raise DataError(f"{root} has no images ({', '.join(SUFFIXES)}) in it. Name the folder above the classes.")
    labels, classes = _from_table(root, table, found) if table else _from_folders(root, found)
    return ImageFolder(root, np.array([os.fsencode(name) for name in found]), labels, classes)


def _images(root: Path, below: str) -> Iterator[str]:
    """Names of the images below, with slashes; folders that begin with a dot are left out."""
    with os.scandir(root / below) as entries:
        for entry in entries:
            if entry.is_dir():
                if not entry.name.startswith("."):
                    yield from _images(root, f"{below}{entry.name}/")
            elif entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith("."):
                yield below + entry.name


def _from_folders(root: Path, names: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    loose = [name for name in names if "/" not in name]
    if loose:
        raise DataError(
            f"{root}: {len(loose):,} of {len(names):,} images lie in no folder of a class, {_some(loose)}. Put each "
            "into the folder of its class, or write labels.csv beside them: lines of name,label."
        )
    folders = [name.split("/", 1)[0] for name in names]
    classes = tuple(sorted(set(folders)))
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[folder] for folder in folders], np.int32), classes


def _from_table(root: Path, table: Path, names: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels of `names`, in order. Everything that is wrong with the table is said at once."""
    labels: dict[str, int] = {}
    wrong = []
    try:
        with table.open(newline="", encoding="utf-8") as file:
            for line, row in enumerate(csv.reader(file), start=1):
                if not row or (line == 1 and len(row) == 2 and not _is_integer(row[1])):
                    continue  # empty, or the head
                if len(row) != 2 or not _is_integer(row[1]):
                    wrong.append(f"line {line} is {','.join(row)!r}, not name,label")
                elif row[0] in labels and labels[row[0]] != int(row[1]):
                    wrong.append(f"line {line} gives {row[0]} the label {row[1]}, an earlier one {labels[row[0]]}")
                else:
                    labels[row[0]] = int(row[1])
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{table} cannot be read: {error}. Give a text of lines name,label.") from error
    missing = [name for name in names if name not in labels]
    absent = sorted(set(labels) - set(names))
    wrong += [f"{len(missing):,} images have no label, {_some(missing)}"] if missing else []
    wrong += [f"{len(absent):,} labels have no image, {_some(absent)}"] if absent else []
    if wrong:
        shown = "\n  ".join(wrong[:SHOWN]) + (f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise DataError(f"{table} disagrees with the images in {root}:\n  {shown}\nMend the table.")
    return np.array([labels[name] for name in names], np.int32), ()


def _is_integer(text: str) -> bool:
    return text.strip().lstrip("+-").isdigit()


def _some(names: list[str]) -> str:
    return "such as " + ", ".join(names[:3])
