"""Clicks with several ids a field, made of clicks with one: MLPerf's multi-hot data for DLRM-DCNv2.

A fixed map gives every id of a field `hot - 1` further ids of that field, drawn once and uniformly; an example then has
its own id and those. The labels know nothing of them: they make the lookups of a field with many ids, at the size of
data with one.

The map is drawn as MLPerf's reference draws it, from NumPy's Mersenne Twister, field by field. Records with the same
ids and `rows` therefore give the very examples of its materialised data set of 3.8 TB.

Source: github.com/facebookresearch/dlrm, torchrec_dlrm/multi_hot.py, distribution "uniform".
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from multipod.data.clicks.records import Clicks, example_of_clicks
from multipod.data.clicks.synthetic import Synthetic
from multipod.data.source import HostBatch, SetsTables, Source
from multipod.errors import DataError
from multipod.pytrees import IdRange

CHUNK = 1 << 24
"""Ids that are drawn at once: they come as int64 and are kept as int32."""

_DRAWING = threading.Lock()


@dataclass(frozen=True)
class MultiHotSource:
    """A source of clicks whose `ids`, int32 [n, sum of hots], are each field's own id and those beside it.

    Attributes:
      source: with one id a field.
      rows: ids of each field.
      hots: ids of each field in an example.
      seed: of the map.
    """

    source: Source
    rows: tuple[int, ...]
    hots: tuple[int, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.source)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers. The first call draws the map: 23 GB at MLPerf's sizes, in each process."""
        batch = self.source.read(numbers)
        with _DRAWING:  # one thread draws, the others wait for it
            beside = draw_ids_beside(self.rows, self.hots, self.seed)
        own = batch["ids"]
        bags = [np.concatenate([own[:, f, None], more[own[:, f]]], 1) for f, more in enumerate(beside)]
        return batch | {"ids": np.concatenate(bags, 1)}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch


@dataclass(frozen=True)
class MultiHotClicks:
    """Clicks with several ids a field, as a recipe's data.

    Attributes:
      clicks: with one id a field.
      hots: ids of each field in an example.
      seed: of the map from an id to those beside it; MLPerf's is 0.
    """

    clicks: Synthetic | Clicks
    hots: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if not self.hots or min(self.hots) < 1:
            wrong.append(f"hots={self.hots} (at least 1 each)")
        if isinstance(self.clicks, Synthetic) and len(self.hots) != len(self.clicks.rows):
            wrong.append(f"{len(self.hots)} hots for {len(self.clicks.rows)} fields (one each)")
        if not 0 <= self.seed < 2**32:
            wrong.append(f"seed={self.seed} (0 to 2^32 - 1)")
        if wrong:
            raise DataError(f"multi-hot clicks: {'; '.join(wrong)}. Change it in the recipe or with --set.")

    def train(self) -> MultiHotSource:
        """The examples to learn from."""
        return self._with_bags(self.clicks.train())

    def test(self) -> MultiHotSource:
        """The examples to be judged by."""
        return self._with_bags(self.clicks.test())

    def example(self) -> HostBatch:
        """An example's shapes and types."""
        return example_of_clicks(sum(self.hots))

    def ids_given(self) -> dict[str, IdRange]:
        """The ids of each field, and how many of them an example has; nothing where the clicks do not say theirs."""
        given = self.clicks.ids_given()
        return {name: ids._replace(hots=self.hots) for name, ids in given.items() if len(ids.counts) == len(self.hots)}

    def table_rows(self) -> tuple[int, ...]:
        """The rows of each table, where the clicks set them."""
        return self.clicks.table_rows() if isinstance(self.clicks, SetsTables) else ()

    def _with_bags(self, source: Source) -> MultiHotSource:
        rows = self.clicks.rows
        if len(rows) != len(self.hots):
            raise DataError(
                f"multi-hot clicks: {len(self.hots)} hots for {len(rows)} fields (one each). Set data.hots."
            )
        return MultiHotSource(source, rows, self.hots, self.seed)


@lru_cache(maxsize=2)
def draw_ids_beside(rows: Sequence[int], hots: Sequence[int], seed: int) -> tuple[np.ndarray, ...]:
    """The ids that stand beside each id of each field, int32 [rows, hot - 1]; `rows` and `hots` are tuples."""
    rng = np.random.RandomState(seed)  # the reference's generator: another would be another data set
    return tuple(_drawn(rng, count, hot - 1) for count, hot in zip(rows, hots, strict=True))


def _drawn(rng: np.random.RandomState, count: int, width: int) -> np.ndarray:
    found = np.empty((count, width), np.int32)
    step = max(1, CHUNK // max(1, width))
    for first in range(0, count, step):
        found[first : first + step] = rng.randint(0, count, (min(step, count - first), width))
    return found
