"""The order in which a run reads its data: a pure function of the seed and the batch's number."""

import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from multipod.data.ahead import MadeAhead
from multipod.data.mixing import Mixing, mixing_of, partners
from multipod.data.order import generator
from multipod.data.reading import InputOptions, Tuner
from multipod.data.source import Fused, HostBatch, Ordered, Sized, Source, training_batch
from multipod.data.workers import Workers
from multipod.errors import DataError

PART = 64
"""Most rows that one thread makes at once: large batches are cut in parts, joined again in their order."""


@dataclass(frozen=True)
class TrainBatches:
    """An endless sequence of shuffled batches that can be entered at any place.

    Every example is read once an epoch; epochs follow each other without a gap, each in a new
    order, so a batch may hold the end of one and the start of the next. Batch k is the same
    whatever the number of processes, and whether the run was stopped before it.

    Attributes:
      source: the examples.
      batch: examples in a batch, over all processes.
      seed: of the order and of the augmentation.
      rows: which rows of each batch this process reads, increasing. Rows from `batch` on are padding.
      padded: whether any process reads padding: batches then have a `mask`, bool [rows], false there.

    Raises:
      DataError: there are no examples.
    """

    source: Source
    batch: int
    seed: int
    rows: np.ndarray
    padded: bool = False

    def __post_init__(self) -> None:
        if not len(self.source):
            raise DataError("the training data have no examples. Name data that have some.")

    def numbers(self, position: int) -> np.ndarray:
        """The numbers of the examples in batch `position`, all rows."""
        places = np.arange(position * self.batch, (position + 1) * self.batch)
        epochs, within = np.divmod(places, len(self.source))
        return np.concatenate([self._order(int(epoch))[within[epochs == epoch]] for epoch in np.unique(epochs)])

    def __getitem__(self, position: int) -> HostBatch:
        """This process's rows of batch `position`."""
        return self.part(position, 0, len(self.rows))

    def part(self, position: int, first: int, stop: int, out: HostBatch | None = None) -> HostBatch:
        """Entries `first` to `stop` - 1 of this process's rows of batch `position`; `out` as of `Fused`."""
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, position]))
        own, numbers = self.rows[first:stop], self.numbers(position)
        rows = np.minimum(own, self.batch - 1)  # padding repeats the last example
        source = self.source.sized_for(numbers) if isinstance(self.source, Sized) else self.source
        mixing = mixing_of(source)
        if mixing is None:
            batch = training_batch(source, numbers[rows], rows, rng, out)
        else:
            batch = self._mixed(mixing, source, position, rows, rng, out)
        return batch | {"mask": own < self.batch} if self.padded else batch

    def _mixed(
        self,
        mixing: Mixing,
        source: Source,
        position: int,
        rows: np.ndarray,
        rng: np.random.Generator,
        out: HostBatch | None,
    ) -> HostBatch:
        """Rows of a batch, mixed with their partners, which are read too where they are not among them."""
        every = np.union1d(rows, partners(rows, self.batch))
        alike = np.array_equal(every, rows)
        batch = training_batch(source, self.numbers(position)[every], every, rng, out if alike else None)
        shared = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 1, position]))
        mix = mixing.draw(shared, *batch["image"].shape[1:3])
        batch = mix.apply(batch, np.searchsorted(every, partners(every, self.batch)))
        return batch if alike else {name: array[np.searchsorted(every, rows)] for name, array in batch.items()}

    def start(self, position: int, reading: InputOptions | None = None) -> "Prefetcher":
        """The batches from `position` on, made ahead by threads or processes as `reading` says."""
        return Prefetcher(self, position, reading or InputOptions())

    def _order(self, epoch: int) -> np.ndarray:
        if isinstance(self.source, Ordered):
            return _own_order(self.source, self.seed, epoch, self.batch)
        return _order(len(self.source), self.seed, epoch)


class Prefetcher(Iterator[HostBatch]):
    """Batches of a run, one after the other, made ahead of their use.

    Threads make them in parts. Where `adapt` finds that the devices wait, it goes on from the same place with more
    threads: a place is only a number, so nothing is lost but what lay ready.
    """

    def __init__(self, batches: TrainBatches, position: int, reading: InputOptions) -> None:
        self._batches, self._position = batches, position
        count = len(batches.rows)
        cuts = np.linspace(0, count, max(1, -(-count // PART)) + 1).astype(int)
        self._parts = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
        decodes = isinstance(batches.source, Fused)
        self.tuner = Tuner(reading, first=max(1, (os.cpu_count() or 1) // 2) if decodes else 1)
        self._workers = Workers(batches, reading.processes, reading.limit_s) if reading.processes else None
        self._in_place = len(self._parts) > 1 and decodes and not reading.processes
        self._places = _Places(count, {})
        self._parts_ahead = self._begin()

    def __next__(self) -> HostBatch:
        """The next batch, this process's rows."""
        parts = [next(self._parts_ahead) for _ in self._parts]
        self._position += 1
        if len(parts) == 1:
            return parts[0]
        return self._places.joined(self._position - 1, parts)

    def adapt(self, waited_s: float, step_s: float) -> None:
        """An update took `step_s`, and its devices were idle for `waited_s` of it because no batch was there."""
        if self.tuner.adapt(waited_s, step_s):
            self._parts_ahead.close()
            self._parts_ahead = self._begin()

    def close(self) -> None:
        """Ends the threads and processes."""
        self._parts_ahead.close()
        if self._workers is not None:
            self._workers.close()

    def _begin(self) -> MadeAhead[HostBatch]:
        count = len(self._parts)
        # Threads from before may still write; what they write into is no longer looked at.
        self._places = _Places(len(self._batches.rows), self._places.kinds)
        threads = len(self._workers) if self._workers else self.tuner.threads
        ahead = max(self.tuner.ahead * count, threads)
        return MadeAhead(partial(self._make, self._places), itertools.count(self._position * count), threads, ahead)

    def _make(self, places: "_Places", place: int) -> HostBatch:
        position, part = divmod(place, len(self._parts))
        if self._workers is not None:
            return self._workers.part(position, *self._parts[part])
        cut = self._parts[part]
        return self._batches.part(position, *cut, places.cut(position, *cut) if self._in_place else None)


class _Places:
    """Memory of whole batches, of which threads write parts, so that these need not be joined by copying."""

    def __init__(self, rows: int, kinds: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self.kinds = dict(kinds)  # shape of a row, and dtype, of each array
        self._rows = rows
        self._whole: dict[int, HostBatch] = {}
        self._lock = threading.Lock()

    def cut(self, position: int, first: int, stop: int) -> HostBatch:
        """Rows `first` to `stop` - 1 of batch `position`, to be written; none before the first batch was joined."""
        with self._lock:
            if position not in self._whole:
                kinds = self.kinds.items()
                self._whole[position] = {name: np.empty((self._rows, *shape), dtype) for name, (shape, dtype) in kinds}
            return {name: array[first:stop] for name, array in self._whole[position].items()}

    def joined(self, position: int, parts: list[HostBatch]) -> HostBatch:
        """The batch of all its parts: as it lies where all were written in place, else as a copy."""
        with self._lock:
            whole = self._whole.pop(position, {})
            self.kinds = {name: (array.shape[1:], array.dtype) for name, array in parts[0].items()}
        batch = {}
        for name in parts[0]:
            placed = name in whole and all(part[name].base is whole[name] for part in parts)
            batch[name] = whole[name] if placed else np.concatenate([part[name] for part in parts])
        return batch


@lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: 8 bytes an example."""
    # One call for each epoch: Grain's shuffle is computed element by element in Python, 4 ms for a batch of 128,
    # as much as a tenth of an update.
    return generator(seed, epoch).permutation(examples)


@lru_cache(maxsize=2)
def _own_order(source: Ordered, seed: int, epoch: int, batch: int) -> np.ndarray:
    return source.epoch_order(seed, epoch, batch)


def evaluation_batches(
    source: Source, batch: int, rows: np.ndarray, reading: InputOptions | None = None
) -> Iterator[HostBatch]:
    """All examples in order, this process's `rows` of each batch; the last batch is padded.

    Each batch has a `mask`, bool [rows]: false for padding, which repeats the last example, and for examples that
    the source could not read. Data that are decoded are read ahead, by all cores or as many threads as `reading` has.
    """
    firsts = range(0, len(source), batch)
    if not isinstance(source, Fused):
        yield from (_evaluated(source, first + rows) for first in firsts)
        return
    cuts = np.array_split(rows, max(1, -(-len(rows) // PART)))
    threads = (reading.threads if reading else 0) or os.cpu_count() or 1
    parts = MadeAhead(
        lambda place: _evaluated(source, firsts[place // len(cuts)] + cuts[place % len(cuts)]),
        iter(range(len(firsts) * len(cuts))),
        threads,
        max(len(cuts), threads),
    )
    for _ in firsts:
        joined = [next(parts) for _ in cuts]
        yield {name: np.concatenate([part[name] for part in joined]) for name in joined[0]}
    parts.close()


def _evaluated(source: Source, numbers: np.ndarray) -> HostBatch:
    mask = numbers < len(source)
    read = source.read(np.minimum(numbers, len(source) - 1))
    return read | {"mask": mask & read.get("mask", True)}
