"""Pairs of texts one by one: those of a test set, and those to learn from in batches of like lengths."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from multipod.data.pairs import Pairs
from multipod.data.source import HostBatch, fingerprint
from multipod.data.text.kept_tokens import KeptTokens, keep_tokens
from multipod.data.text.vocabulary import Vocabulary
from multipod.errors import DataError


def pairs_by_length(
    key: str, tokens: tuple[KeptTokens, KeptTokens], buckets: tuple[int, ...], vocabulary: Vocabulary
) -> Pairs:
    """Pairs of which both sides have text and fit the last of `buckets`; a target needs one token more, its end.

    They are copied to the cache without the others, once for that length.

    Raises:
      DataError: there is none.
    """
    sizes = np.stack([tokens[0].lengths, tokens[1].lengths + 1])
    good = np.flatnonzero((sizes.max(0) <= buckets[-1]) & (sizes[0] > 0) & (sizes[1] > 1))
    if not len(good):
        raise DataError(
            f"text pairs: none of {len(tokens[0]):,} pairs has text on both sides of at most {buckets[-1]} tokens. Set "
            "data.length and data.buckets higher, or see whether the files are text in these languages."
        )
    name = fingerprint([key.encode(), str(buckets[-1]).encode()])
    ends = np.zeros(0, np.int32), np.array([vocabulary.end], np.int32)
    source, label = (
        keep_tokens(f"{name}-{side}", _chosen(one, good, end), vocabulary.size)
        for side, one, end in zip(("source", "label"), tokens, ends, strict=True)
    )
    return Pairs(source, label, tuple((length, length) for length in buckets), vocabulary.start)


def _chosen(sequences: KeptTokens, numbers: np.ndarray, end: np.ndarray) -> Iterator[np.ndarray]:
    for number in numbers.tolist():
        yield np.concatenate([sequences[number], end])


@dataclass(frozen=True, eq=False)
class LonePairs:
    """`source`, `label`, `target`, `weight`, int32 [n, length], one pair a row, and `number`, int32 [n].

    Attributes:
      source: the sequences that are read.
      target: those that are told, without their end token.
      lengths: tokens of a row of sources, and of targets.
      start: the first token that the decoder reads.
      end: behind a target.
    """

    source: KeptTokens
    target: KeptTokens
    lengths: tuple[int, int]
    start: int
    end: int

    def __len__(self) -> int:
        return len(self.source)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The pairs with these numbers."""
        source = np.zeros((len(numbers), self.lengths[0]), np.int32)
        label = np.zeros((len(numbers), self.lengths[1]), np.int32)
        weight = np.zeros_like(label)
        for row, number in enumerate(numbers.tolist()):
            given, told = self.source[number][: self.lengths[0]], self.target[number]
            told = np.append(told, np.int32(self.end))[: self.lengths[1]]
            source[row, : len(given)], label[row, : len(told)], weight[row, : len(told)] = given, told, 1
        target = np.pad(label, ((0, 0), (1, 0)), constant_values=self.start)[:, :-1]
        target = np.where(weight == 0, 0, target)
        return {
            "source": source,
            "label": label,
            "target": target,
            "weight": weight,
            "number": numbers.astype(np.int32),
        }

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def identity(self) -> str:
        """How many pairs there are, and of which tokens."""
        return f"{len(self):,} pairs {self.source.folder.name} {self.target.folder.name}"
