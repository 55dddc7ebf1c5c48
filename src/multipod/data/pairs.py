"""Pairs of token sequences, one pair a row, in batches of like lengths: what translation trains on."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from multipod.data.order import ByLength, generator
from multipod.data.sequences import Sequences, TokenFile
from multipod.data.source import HostBatch
from multipod.errors import DataError

Size = tuple[int, int]
"""Tokens of a row of sources, and of a row of labels."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """`source`, `label`, `target` (what the decoder reads: `label` behind `start`) and `weight`, int32 [n, length].

    A batch has the least of `bounds` that holds all its pairs, the rows of all hosts: each size is a shape of its own,
    for which the trainer compiles a step. In training a batch is filled from pairs of one size (`ByLength`).

    Source: GNMT in Google's MLPerf v0.6 code, where hosts that choose for themselves wait for the longest choice
    (arXiv:1909.09756).

    Attributes:
      source: the sequences that are read.
      label: those that are told, with their end token.
      bounds: sizes of batches, growing in both numbers.
      start: the first token that the decoder reads.
      chosen: of this batch; 0, 0: the largest.
    """

    source: TokenFile
    label: TokenFile
    bounds: tuple[Size, ...]
    start: int
    chosen: Size = (0, 0)

    def __post_init__(self) -> None:
        if len(self.source) != len(self.label):
            raise DataError(
                f"pairs: {len(self.source):,} sources and {len(self.label):,} labels. Give one label to each source."
            )
        sizes = np.array(self.bounds).reshape(-1, 2)
        if not len(sizes) or sizes.min() < 1 or (np.diff(sizes, axis=0) < 0).any():
            raise DataError(f"pairs: bounds={self.bounds} do not grow from 1, 1 or more. Sort them.")
        long = np.flatnonzero(self._least > len(sizes))
        if len(long):
            worst = int(long[0])
            raise DataError(
                f"pairs: {len(long):,} of {len(self):,} do not fit a batch of {sizes[-1, 0]} + {sizes[-1, 1]} tokens; "
                f"pair {worst} has {self.source.lengths[worst]} + {self.label.lengths[worst]}. Cut or drop them, or "
                "add a size."
            )

    def __len__(self) -> int:
        return len(self.source)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The pairs with these numbers, padded with 0."""
        given, told = self.chosen if any(self.chosen) else self.bounds[-1]
        source = Sequences(self.source, length=given).read(numbers)["token"]
        labels = Sequences(self.label, length=told).read(numbers)
        label, weight = labels["token"], labels["weight"]
        before = np.pad(label, ((0, 0), (1, 0)), constant_values=self.start)[:, :-1]
        return {"source": source, "label": label, "target": np.where(weight == 0, 0, before), "weight": weight}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def epoch_order(self, seed: int, epoch: int, batch: int) -> np.ndarray:
        """By size; at random where there is one."""
        if len(self.bounds) == 1:
            return generator(seed, epoch).permutation(len(self))
        return self._order.epoch(self._least, seed, epoch, batch)

    def sized_for(self, numbers: np.ndarray) -> "Pairs":
        """These pairs at the size that the whole batch needs."""
        return replace(self, chosen=self.bounds[int(self._least[numbers].max()) - 1])

    def sizes(self) -> list["Pairs"]:
        """These pairs at every size."""
        return [replace(self, chosen=size) for size in self.bounds]

    def identity(self) -> str:
        """A fingerprint of both sides."""
        return f"{Sequences(self.source).identity()} and {Sequences(self.label).identity()}"

    @cached_property
    def _least(self) -> np.ndarray:
        """For each pair, the number of the first size that holds it, from 1; one more than there are if none does."""
        lengths = np.stack([self.source.lengths, self.label.lengths])
        sizes = np.array(self.bounds).T
        return 1 + np.max([np.searchsorted(own, length) for own, length in zip(sizes, lengths, strict=True)], axis=0)

    @property
    def _order(self) -> ByLength:
        return ByLength(tuple(range(1, len(self.bounds) + 1)))
