"""Pairs of sequences packed into rows of one length, by a plan that is kept on disk with their tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.files.kept import made_once
from multipod.data.order import generator
from multipod.data.source import HostBatch, fingerprint
from multipod.data.text.kept_tokens import KeptTokens, in_groups, tokens_folder


class PairPlan:
    """Which pairs share a row, mapped from a folder of the cache.

    Attributes:
      folder: where it lies.
      pairs: numbers of pairs, row by row.
      ends: int64 [rows], where each row ends in `pairs`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pairs = np.load(folder / "pairs.npy", mmap_mode="r")
        self.ends = np.load(folder / "ends.npy", mmap_mode="r")

    def __getitem__(self, row: int) -> list[int]:
        """The pairs of a row."""
        first = int(self.ends[row - 1]) if row else 0
        return self.pairs[first : int(self.ends[row])].tolist()

    def __reduce__(self) -> Any:
        return PairPlan, (self.folder,)


def plan_pairs(key: str, source: KeptTokens, target: KeptTokens, length: int, seed: int) -> PairPlan:
    """The plan of these pairs, made now if it is not in the cache.

    Pairs are taken in one random order (`seed`), each into the row at hand while there is room on both sides, else into
    a new one. Those with an empty side, or with one that is longer than a row, are left out. A target needs one token
    more, its end.
    """
    name = fingerprint([text.encode() for text in (key, str(length), str(seed))])

    def make(folder: Path) -> None:
        sizes = np.stack([np.diff(source.ends, prepend=0), np.diff(target.ends, prepend=0) + 1])
        good = np.flatnonzero((sizes.max(0) <= length) & (sizes[0] > 0) & (sizes[1] > 1))
        order = good[generator(seed, 0).permutation(len(good))]
        ends = list(_ends(sizes[:, order], length))
        folder.mkdir()
        np.save(folder / "pairs.npy", order)
        np.save(folder / "ends.npy", np.array(ends, np.int64))

    return PairPlan(made_once(tokens_folder() / f"pairs-{name}", make))


def _ends(sizes: np.ndarray, length: int) -> Iterator[int]:
    """Where each row ends, of pairs of these sizes [2, pairs] one after the other."""
    given = told = number = 0
    for group in in_groups(sizes.T, 10_000):
        for one, other in np.array(group).tolist():
            if number and max(given + one, told + other) > length:
                yield number
                given = told = 0
            given, told, number = given + one, told + other, number + 1
    if number:
        yield number


@dataclass(frozen=True, eq=False)
class PackedPairs:
    """Rows of pairs as the Transformer reads packed rows: tokens, segments and positions of both sides, and `weight`.

    `source`, `label` (told) and `target` (read by the decoder: `label` behind `start`), each int32 [n, length].

    Attributes:
      source: the sequences that are read.
      target: those that are told, without their end token.
      plan: which pairs share a row.
      length: tokens in a row, of each side.
      start: the first token that the decoder reads.
      end: behind each target.
    """

    source: KeptTokens
    target: KeptTokens
    plan: PairPlan
    length: int
    start: int
    end: int

    def __len__(self) -> int:
        return len(self.plan.ends)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The rows with these numbers."""
        names = ("source", "source_segment", "source_position", "label", "target", "target_segment", "target_position")
        rows = {name: np.zeros((len(numbers), self.length), np.int32) for name in names}
        for row, number in enumerate(numbers.tolist()):
            self._fill({name: array[row] for name, array in rows.items()}, self.plan[number])
        return rows | {"weight": (rows["target_segment"] != 0).astype(np.int32)}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def identity(self) -> str:
        """How many pairs there are, in how many rows, and how many were left out."""
        left = len(self.source) - len(self.plan.pairs)
        return f"{len(self.plan.pairs):,} pairs in {len(self):,} rows, {left:,} left out, {self.plan.folder.name}"

    def _fill(self, row: HostBatch, pairs: list[int]) -> None:
        given = told = 0
        for segment, pair in enumerate(pairs, 1):
            source, label = self.source[pair], np.append(self.target[pair], np.int32(self.end))
            read = np.append(np.int32(self.start), label[:-1])
            places = slice(given, given + len(source)), slice(told, told + len(label))
            for name, place, values in (("source", places[0], source), ("target", places[1], read)):
                row[name][place] = values
                row[f"{name}_segment"][place] = segment
                row[f"{name}_position"][place] = np.arange(len(values))
            row["label"][places[1]] = label
            given, told = given + len(source), told + len(label)
