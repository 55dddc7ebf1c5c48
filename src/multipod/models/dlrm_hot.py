"""Hot rows of a DLRM's tensor trains in the trainer: counted as they are looked up, cached, refreshed between updates.

The cached rows are parameters, `tables/2/hot`, with gradients and optimizer state of their own. What is cached and what
has been counted are statistics, the same on every device: ids are gathered over the devices that split the batch.
`multipod.nn.tables.hot_rows` says what happens to what a row has learnt when it leaves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.layout.axes import BATCH_AXES
from multipod.nn.experts.exchange import is_mapped
from multipod.nn.model import Moved
from multipod.nn.padding import example_mask
from multipod.nn.tables import hot_rows
from multipod.nn.tables.hot_rows import HotRows, Policy
from multipod.nn.tables.tensor_train import LARGEST, Cores, TensorTrain
from multipod.nn.tables.tensor_train_bag import Way
from multipod.pytrees import Params, Statistics


@dataclass(frozen=True)
class Hot:
    """A cache of hot rows beside every tensor train.

    Attributes:
      share: of a table's rows that are cached, at least one; 0 is no cache.
      warmup: updates in which ids are counted, before the first rows are cached.
      every: updates between refreshes afterwards; 0 leaves the cache as it was filled.
      policy: for rows that leave (`multipod.nn.tables.hot_rows`).
      fade: what counts are multiplied by at a refresh.
      counters: ids that are counted at once, for each cached row.
    """

    share: float = 0.0
    warmup: int = 100
    every: int = 0
    policy: Policy = "write-back"
    fade: float = 0.5
    counters: int = 8

    def wrong(self) -> list[str]:
        """All that is wrong with it."""
        least = {"warmup": 1, "every": 0, "counters": 1}
        found = [f"hot.{n}={getattr(self, n)} (at least {low})" for n, low in least.items() if getattr(self, n) < low]
        return found + [
            f"hot.{n}={getattr(self, n)} (0 to 1)" for n in ("share", "fade") if not 0 <= getattr(self, n) <= 1
        ]

    def rows(self, tt: TensorTrain) -> int:
        """Rows that are cached of a table."""
        return max(1, round(self.share * tt.rows))


class HotTable(NamedTuple):
    """The statistics of a table with a cache.

    Attributes:
      hot: what is cached and counted.
      waiting: int32 [counters], ids that were looked up and are to be counted: that costs a sort, so it is done when
        there are enough of them. Unused places hold `LARGEST`.
      wait: int32, how many.
      left: rows that have left the cache so far.
      learnt: how far these had moved from what the cores gave: sums over refreshes.
      lost: how much of that the cores did not take over.
    """

    hot: HotRows
    waiting: jax.Array
    wait: jax.Array
    left: jax.Array
    learnt: jax.Array
    lost: jax.Array


def name_of(number: int) -> str:
    """The name of a table's cached rows."""
    return f"tables/{number}/hot"


def empty_caches(trains: Mapping[int, TensorTrain], cache: Hot) -> tuple[Params, Statistics]:
    """Empty caches."""
    params, statistics = {}, {}
    for number, tt in trains.items():
        size = cache.rows(tt)
        rows, hot = hot_rows.empty_cache(tt, size, min(cache.counters * size, tt.rows))
        params[name_of(number)] = rows
        none, zero = jnp.full_like(hot.candidates, LARGEST), jnp.zeros((), jnp.int32)
        statistics[name_of(number)] = HotTable(hot, none, zero, zero, jnp.float32(0), jnp.float32(0))
    return params, statistics


def lookup(
    params: Params, statistics: Statistics, way: Way
) -> Callable[[int, TensorTrain, Cores, jax.Array], jax.Array]:
    """A `Lookup` of `multipod.models.dlrm_embeddings` that takes cached rows from `params`."""

    def found(number: int, tt: TensorTrain, cores: Cores, ids: jax.Array) -> jax.Array:
        offsets = jnp.arange(0, ids.size + 1, ids.shape[1], dtype=jnp.int32)
        rows, hot = params[name_of(number)], statistics[name_of(number)].hot
        table = f"table {number}"
        return hot_rows.bag_with_hot_rows(tt, cores, rows, hot, ids.reshape(-1), offsets, way=way, table=table)

    return found


def count_ids(cache: Hot, statistics: Statistics, ids: Mapping[int, jax.Array]) -> Statistics:
    """The statistics after `ids` [examples, hots] of each table were looked up; padding is not counted."""
    mask, axes = example_mask(), tuple(axis for axis in BATCH_AXES if is_mapped(axis))
    new = dict(statistics)
    for number, own in ids.items():
        table = statistics[name_of(number)]
        used = own if mask is None else jnp.where(mask[:, None], own, -1)
        flat = used.reshape(-1)
        every = lax.all_gather(flat, axes, tiled=True) if axes else flat
        new[name_of(number)] = _counted(cache, table, jnp.where(every < 0, LARGEST, every))
    return new


def _counted(cache: Hot, table: HotTable, ids: jax.Array) -> HotTable:
    table = table._replace(hot=hot_rows.count_served(table.hot, ids))
    if cache.every:
        return _waiting(table, ids)
    # Filled once for all: candidates no longer matter.
    return lax.cond(table.hot.ids[0] < LARGEST, lambda table: table, lambda table: _waiting(table, ids), table)


def _waiting(table: HotTable, ids: jax.Array) -> HotTable:
    """The table with `ids` to be counted, those before them counted if there is no room for both."""
    if len(ids) >= len(table.waiting):
        return table._replace(hot=hot_rows.merge_candidates(table.hot, ids))
    table = lax.cond(table.wait + len(ids) > len(table.waiting), _settled, lambda table: table, table)
    waiting = lax.dynamic_update_slice(table.waiting, ids, (table.wait,))
    return table._replace(waiting=waiting, wait=table.wait + len(ids))


def _settled(table: HotTable) -> HotTable:
    """The table with nothing left to be counted."""
    hot = hot_rows.merge_candidates(table.hot, table.waiting)
    return table._replace(hot=hot, waiting=jnp.full_like(table.waiting, LARGEST), wait=jnp.zeros_like(table.wait))


def is_due(cache: Hot, update: jax.Array) -> jax.Array:
    """Whether caches are refreshed after the update of this number, the first being 1."""
    if not cache.every:
        return update == cache.warmup
    return (update >= cache.warmup) & ((update - cache.warmup) % cache.every == 0)


def refresh(
    cache: Hot, trains: Mapping[int, TensorTrain], params: Params, statistics: Statistics
) -> tuple[Params, Statistics, dict[str, Moved]]:
    """Parameters and statistics with the most counted rows cached, and where cached rows have gone."""
    params, statistics, moved = dict(params), dict(statistics), {}
    for number, tt in trains.items():
        name, cores = name_of(number), [f"tables/{number}/core{k}" for k in range(len(tt.shapes))]
        table = _settled(statistics[name])
        given = tuple(params[core] for core in cores)
        taught, params[name], hot, report = hot_rows.refresh(
            tt, given, params[name], table.hot, cache.policy, fade=cache.fade
        )
        params |= dict(zip(cores, taught, strict=True))
        moved[name] = Moved(*hot_rows.moves(table.hot, hot))
        hot = hot._replace(seen=jnp.zeros_like(hot.seen), hits=jnp.zeros_like(hot.hits))
        statistics[name] = table._replace(
            hot=hot,
            left=table.left + report.left,
            learnt=table.learnt + report.learnt,
            lost=table.lost + report.lost,
        )
    return params, statistics, moved


def notes(statistics: Statistics) -> dict[str, str]:
    """What a run says of its caches at its end."""
    tables: list[HotTable] = [table for name, table in statistics.items() if name.endswith("/hot")]
    if not tables:
        return {}
    cached, hits, seen, left = (
        sum(int(np.asarray(value)) for value in values)
        for values in (
            [(np.asarray(t.hot.ids) < LARGEST).sum() for t in tables],
            [t.hot.hits for t in tables],
            [t.hot.seen for t in tables],
            [t.left for t in tables],
        )
    )
    served = f", {hits / seen:.1%} of the lookups since they were cached" if seen and cached else ""
    said = f"{cached:,} of {len(tables)} tables{served}"
    if left:
        learnt, lost = (float(sum(np.asarray(getattr(t, n)) for t in tables)) for n in ("learnt", "lost"))
        said += f"; {left:,} have left, with {learnt:.3g} learnt, of which the cores did not take over {lost:.3g}"
    return {"hot rows": said}
