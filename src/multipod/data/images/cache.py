"""Decoded images, kept in memory or on disk up to a budget of bytes."""

import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multipod.errors import DataError

_ENTRY = struct.Struct("<qqiii")  # number, offset, height, width, label

Kept = tuple[np.ndarray, int]
"""An image, uint8 [height, width, 3], not to be written to; and its label."""


@dataclass(frozen=True)
class Held:
    """How full a cache is: bytes of pixels, images, and how often an image was there and was not."""

    nbytes: int
    images: int
    hits: int
    misses: int


class MemoryCache:
    """The first images that fit the budget; none is ever put out.

    Each epoch reads every image once, in a random order: then any set of images that stays is as good as any other,
    and better than one that changes.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._images: dict[int, Kept] = {}
        self._held = self._hits = self._misses = 0
        self._lock = threading.Lock()

    def get(self, number: int) -> Kept | None:
        """The image and its label; None if it is not here."""
        kept = self._images.get(number)
        if kept is None:
            self._misses += 1
        else:
            self._hits += 1
        return kept

    def offer(self, number: int, image: np.ndarray, label: int) -> None:
        """Keeps the image if there is room."""
        with self._lock:
            if number not in self._images and self._held + image.nbytes <= self._budget:
                self._images[number] = (image, label)
                self._held += image.nbytes

    def held(self) -> Held:
        """How full it is."""
        return Held(self._held, len(self._images), self._hits, self._misses)


class DiskCache:
    """Decoded images in one file of pixels, `DATA.pixels`, and one of entries, `DATA.entries`, for the next run too.

    An entry is written after its pixels, so that one that is there is whole, whenever the process ended. The system's
    page cache holds in memory what there is memory for.

    Raises:
      DataError: the folder cannot be written, or another process writes the same cache.
    """

    def __init__(self, budget_bytes: int, folder: Path, data: str) -> None:
        self._budget = budget_bytes
        self._places: dict[int, tuple[int, int, int, int]] = {}
        self._hits = self._misses = 0
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._entries = os.open(folder / f"{data}.entries", flags, 0o644)
            self._pixels = os.open(folder / f"{data}.pixels", flags & ~os.O_APPEND, 0o644)
        except OSError as error:
            raise DataError(f"{folder} cannot keep decoded images: {error.strerror}. Name another folder.") from error
        self._alone(folder)
        self._end = self._read_entries()

    def get(self, number: int) -> Kept | None:
        """The image and its label; None if it is not here."""
        place = self._places.get(number)
        if place is None:
            self._misses += 1
            return None
        self._hits += 1
        offset, height, width, label = place
        pixels = np.frombuffer(os.pread(self._pixels, height * width * 3, offset), np.uint8)
        return pixels.reshape(height, width, 3), label

    def offer(self, number: int, image: np.ndarray, label: int) -> None:
        """Keeps the image if there is room, in the budget and on the disk."""
        height, width = image.shape[:2]
        with self._lock:
            if number in self._places or self._end + image.nbytes > self._budget:
                return
            try:
                written = os.pwrite(self._pixels, image.tobytes(), self._end)
                if written < image.nbytes:
                    raise OSError
                os.write(self._entries, _ENTRY.pack(number, self._end, height, width, label))
            except OSError:
                self._budget = self._end  # the disk is full: what is here stays
                return
            self._places[number] = (self._end, height, width, label)
            self._end += image.nbytes

    def held(self) -> Held:
        """How full it is."""
        return Held(self._end, len(self._places), self._hits, self._misses)

    def close(self) -> None:
        """Closes the files; what is in them stays."""
        os.close(self._entries)
        os.close(self._pixels)

    def _alone(self, folder: Path) -> None:
        import fcntl

        try:
            fcntl.flock(self._entries, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"{folder}: another process keeps its decoded images there. Give each process a folder of its own."
            ) from error

    def _read_entries(self) -> int:
        size, end = os.fstat(self._pixels).st_size, 0
        stored = os.pread(self._entries, os.fstat(self._entries).st_size, 0)
        whole = len(stored) // _ENTRY.size * _ENTRY.size
        os.ftruncate(self._entries, whole)  # the last one may be cut
        for number, offset, height, width, label in _ENTRY.iter_unpack(stored[:whole]):
            if offset + height * width * 3 <= size:
                self._places[number] = (offset, height, width, label)
                end = max(end, offset + height * width * 3)
        return end


Cache = MemoryCache | DiskCache
