"""What a data set is: named arrays of examples, read by number."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from multipod.errors import DataError
from multipod.pytrees import IdRange

HostBatch = dict[str, np.ndarray]
"""Named NumPy arrays whose first dim counts examples."""


class Source(Protocol):
    """Examples by number. `augment` must be a pure function of its arguments.

    More methods are optional, one for each protocol below: `Fused` reads and augments at once, `Described` tells one
    data set from another, `Ordered` has an order of its own, `Sized` chooses a size for the whole batch, `Cacheable`
    keeps what it decoded, and `data.reading.Monitored` notes what it left out. A `read` for evaluation may leave out an
    example that cannot be read: it gives anything in its place, and `mask`, bool [n], false there.
    """

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers, int64 [n]. Called by several threads at once."""
        ...

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The examples as training sees them.

        `rows` are their places in the whole batch: what is drawn from `rng` must be drawn for the
        whole batch and indexed by `rows`, so that it does not depend on who reads which rows.
        """
        ...


@runtime_checkable
class Fused(Protocol):
    """A source that reads and augments at once, where that is cheaper: a crop need not decode the whole image."""

    def read_augmented(
        self, numbers: np.ndarray, rows: np.ndarray, rng: np.random.Generator, out: HostBatch | None = None
    ) -> HostBatch:
        """What `augment(read(numbers), rows, rng)` stands for; arrays of the shapes and dtypes that `read` gives.

        `out` are arrays that large ones may be written into and returned, where they fit: parts of one batch, which
        then need not be joined. They hold anything.
        """
        ...


@runtime_checkable
class Described(Protocol):
    """A source that tells its data from others'."""

    def identity(self) -> str:
        """A short text that changes when the examples or their numbers do: a run goes on only with the same."""
        ...


@runtime_checkable
class Cacheable(Protocol):
    """A source that can keep what it decoded. What it reads is the same with and without."""

    def cached(self, budget_bytes: int, folder: str = "") -> "Source":
        """The source with a cache of so many bytes, in memory or, with a folder, on disk."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A source that says in which order an epoch reads it; any other is read in a random order of all examples."""

    def epoch_order(self, seed: int, epoch: int, batch: int) -> np.ndarray:
        """Every number once, int64 [len]; a pure function. Batches are cut at multiples of `batch` over all epochs.

        A source that reads of its examples by shares, as `multipod.data.task_mixture.MixedRows` does, says there how
        often an epoch has each.
        """
        ...


@runtime_checkable
class Sized(Protocol):
    """A source whose arrays are of another size from batch to batch, as sequences of like lengths are.

    It can `read` no example at all, which tells the shapes of a size.
    """

    def sized_for(self, numbers: np.ndarray) -> "Source":
        """The source that reads the batch of these examples, the rows of all hosts: all read arrays of one size."""
        ...

    def sizes(self) -> Sequence["Source"]:
        """The source at each size that a batch may have, the smallest first: a step is compiled for each of them."""
        ...


class Data(Protocol):
    """The data of a recipe."""

    def train(self) -> Source:
        """The examples to learn from."""
        ...

    def test(self) -> Source:
        """The examples to be judged by."""
        ...


@runtime_checkable
class ShowsExample(Protocol):
    """Data that can show the shape of an example without a file."""

    def example(self) -> HostBatch:
        """One example: its shapes and dtypes count, not its values."""
        ...


@runtime_checkable
class GivesIds(Protocol):
    """Data that say, without reading a file, which ids their examples hold."""

    def ids_given(self) -> Mapping[str, IdRange]:
        """How many different ids the entries of a batch may hold, by the entry; entries it cannot tell are left out."""
        ...


@runtime_checkable
class SetsTables(Protocol):
    """Data that say how large the tables are in which a model looks their ids up."""

    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table; empty where the model's own stand."""
        ...


@runtime_checkable
class DecodesTokens(Protocol):
    """Data whose tokens stand for text."""

    def decode(self, tokens: np.ndarray) -> str:
        """One row of tokens as text."""
        ...


@runtime_checkable
class HasGroundTruth(Protocol):
    """A source whose examples are images with objects, by which detections are judged."""

    def ground_truth(self, masks: bool) -> dict[str, Any]:
        """What a file of COCO's annotations says of all its images, with outlines if `masks`."""
        ...

    def categories(self, labels: np.ndarray) -> np.ndarray:
        """The categories' ids in the ground truth that these labels stand for."""
        ...


def example_of(data: Data, part: str = "train") -> HostBatch:
    """One example of `train` or `test`, of the largest size: for shapes and types alone. See `examples_of`."""
    return examples_of(data, part)[-1]


def examples_of(data: Data, part: str = "train") -> list[HostBatch]:
    """One example of `train` or `test` for each size of its batches. Data that are `ShowsExample` are not read."""
    if isinstance(data, ShowsExample):
        return [data.example()]
    source = data.train() if part == "train" else data.test()
    if not isinstance(source, Sized):
        return [source.read(np.arange(1))]
    batches = [sized.read(np.zeros(0, np.int64)) for sized in source.sizes()]
    return [{name: np.zeros((1, *array.shape[1:]), array.dtype) for name, array in empty.items()} for empty in batches]


def training_batch(
    source: Source,
    numbers: np.ndarray,
    rows: np.ndarray,
    rng: np.random.Generator,
    out: HostBatch | None = None,
) -> HostBatch:
    """The examples with these numbers as training sees them; `rows` are their places in the whole batch.

    `out` is as of `Fused.read_augmented`.
    """
    if isinstance(source, Fused):
        return source.read_augmented(numbers, rows, rng, out)
    return source.augment(source.read(numbers), rows, rng)


def space(out: HostBatch | None, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """The array of that name in `out` if it fits, or a new one; it holds anything."""
    found = (out or {}).get(name)
    if found is not None and found.shape == shape and found.dtype == dtype:
        return found
    return np.empty(shape, dtype)


def identity_of(source: Source) -> str:
    """What the source says of itself, or how many examples it has."""
    return source.identity() if isinstance(source, Described) else f"{len(source):,} examples"


def with_cache(source: Source, budget_bytes: int, folder: str = "") -> Source:
    """The source with a cache of so many bytes for what it decodes; 0: as it is.

    Raises:
      DataError: it decodes nothing that could be kept.
    """
    if not budget_bytes:
        return source
    if not isinstance(source, Cacheable):
        raise DataError(
            f"{type(source).__name__} decodes nothing that a cache could keep. Leave the cache of decoded images out."
        )
    return source.cached(budget_bytes, folder)


def fingerprint(parts: Iterable[bytes]) -> str:
    """Twelve hex digits of all parts in their order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class ArraySource:
    """A source in memory, or mapped from a file: arrays of equal first dim, used as they are."""

    arrays: HostBatch

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers."""
        return {name: array[numbers] for name, array in self.arrays.items()}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch
