"""A cache of hot rows beside a tensor train: the rows that are looked up most, kept and trained uncompressed.

Few ids make most of the lookups. `count_ids` counts them in bounded memory; after a warm-up `refresh` takes the most
frequent into the cache, and does so again whenever it is called. From then on a lookup goes either to the cache or
to the cores, never to both: cached rows have gradients (and optimizer state) of their own, and send none to the cores.

What happens to what a row has learnt in the cache:

- a row that stays keeps its trained values, bit for bit;
- a row that enters begins with the values that the cores give it then;
- a row that leaves: by policy "write-back" the cores are first fitted to the trained values of all rows that leave; by
  "discard", which is TT-Rec's, they are forgotten. In general cores cannot hold them exactly, and every fit
  moves other rows a little, so `Refresh` says how much was learnt and how much of it is lost. Nothing is lost silently.

All of it is arrays: `rows` belong to the parameters, a `HotRows` to the statistics of a model; they are copied,
sharded, checkpointed and passed through `jax.jit` as such.

Source: Yin et al., 2021, arXiv:2101.11714 (TT-Rec), section 5 (LFU, warm-up). The bounded counters: Misra and Gries,
1982, merged batch by batch as in Agarwal et al., 2012, doi:10.1145/2213556.2213562.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from multipod.errors import RecipeError
from multipod.nn.tables.bags import Mode, bag_numbers, check_bags, dense_bag, divide_sums, is_concrete
from multipod.nn.tables.tensor_train import LARGEST, Cores, TensorTrain, look_up
from multipod.nn.tables.tensor_train_bag import Way, bag

Policy = Literal["write-back", "discard"]


class HotRows(NamedTuple):
    """Which rows are in the cache, and what has been counted.

    Attributes:
      ids: int32 [size], the cached ids, increasing; unused places hold `LARGEST`.
      candidates: int32 [counters], the ids that are counted, increasing, unused places likewise.
      counts: int32 [counters]. At most `seen / (counters + 1)` below the true count, and never above it.
      seen: int32, ids counted. When they reach 2^30, it is halved, and `counts` and `hits` with it.
      hits: int32, of these, those that were in the cache.
    """

    ids: jax.Array
    candidates: jax.Array
    counts: jax.Array
    seen: jax.Array
    hits: jax.Array

    @property
    def hit_rate(self) -> jax.Array:
        """The share of counted ids that were in the cache."""
        return self.hits / jnp.maximum(self.seen, 1)


class Refresh(NamedTuple):
    """What a refresh did.

    Attributes:
      entered: rows that are new in the cache.
      left: rows that are no longer in it.
      learnt: how far the rows that left had moved from what the cores gave: the root of the sum of squares.
      lost: how much of that the cores do not give now either.
    """

    entered: jax.Array
    left: jax.Array
    learnt: jax.Array
    lost: jax.Array


def empty_cache(tt: TensorTrain, size: int, counters: int = 0) -> tuple[jax.Array, HotRows]:
    """An empty cache of `size` rows, float32 [size, features], and its state.

    `counters` ids are counted at once, by default eight a row: every id that makes more than 1 / counters of all
    lookups is then among them.

    Raises:
      RecipeError: no room, fewer counters than rows, or more rows than the table has.
    """
    counters = counters or min(8 * size, tt.rows)
    if not 1 <= size <= min(counters, tt.rows):
        raise RecipeError(
            f"hot rows: size={size} with counters={counters} for a table of {tt.rows:,} rows. Give at least one row, "
            "no more than the table has, and no fewer counters than rows."
        )
    none, zero = jnp.full(counters, LARGEST, jnp.int32), jnp.zeros((), jnp.int32)
    hot = HotRows(jnp.full(size, LARGEST, jnp.int32), none, jnp.zeros(counters, jnp.int32), zero, zero)
    return jnp.zeros((size, tt.features), jnp.float32), hot


def count_ids(hot: HotRows, ids: jax.Array, offsets: jax.Array, axes: str | tuple[str, ...] = ()) -> HotRows:
    """The state after these ids were looked up; ids in the padding are not counted.

    `axes`: inside `jax.shard_map`, the mesh axes over which the batch is split: the ids of all devices are
    gathered, so that the state stays the same on every device. Costs one sort of the counters and the ids.
    """
    used = jnp.arange(len(ids)) < offsets[-1]
    ids = jnp.where(used & (ids >= 0), ids, LARGEST).astype(jnp.int32)
    if axes:
        ids = lax.all_gather(ids, axes, tiled=True)
    return count_served(merge_candidates(hot, ids), ids)


def merge_candidates(hot: HotRows, ids: jax.Array) -> HotRows:
    """The state with `ids` counted as candidates; those equal to `LARGEST` are padding. Costs two sorts."""
    keys = jnp.concatenate([hot.candidates, ids])
    amounts = jnp.concatenate([hot.counts, (ids < LARGEST).astype(jnp.int32)])
    order = jnp.argsort(keys)
    keys, amounts = keys[order], amounts[order]
    new = jnp.concatenate([jnp.zeros(1, bool), keys[1:] != keys[:-1]])
    place = jnp.cumsum(new)
    totals = jax.ops.segment_sum(amounts, place, len(keys), indices_are_sorted=True)
    names = jnp.full(len(keys), LARGEST, jnp.int32).at[place].set(keys)
    # Misra and Gries: when there are too many, all give up as much as the first that has no counter left.
    room = len(hot.candidates)
    most, where = lax.top_k(totals, room + 1)
    counts = most[:room] - most[room]
    kept = jnp.where(counts > 0, names[where[:room]], LARGEST)
    order = jnp.argsort(kept)
    return hot._replace(candidates=kept[order], counts=jnp.maximum(counts, 0)[order])


def count_served(hot: HotRows, ids: jax.Array) -> HotRows:
    """The state with `ids` counted as seen, and as hits where they are cached; not as candidates. Costs no sort.

    Ids below 0 or equal to `LARGEST` are padding.
    """
    used = (ids >= 0) & (ids < LARGEST)
    seen = hot.seen + jnp.sum(used, dtype=jnp.int32)
    hits = hot.hits + jnp.sum(used & is_hot(hot, ids), dtype=jnp.int32)
    half = (seen >= 1 << 30).astype(jnp.int32)
    return hot._replace(counts=hot.counts >> half, seen=seen >> half, hits=hits >> half)


def moves(old: HotRows, new: HotRows) -> tuple[jax.Array, jax.Array]:
    """For each row of the cache after a refresh: where it was before, int32 [size], and whether it was there, bool."""
    place = _place(old.ids, new.ids)
    return place, (old.ids[place] == new.ids) & (new.ids < LARGEST)


def is_hot(hot: HotRows, ids: jax.Array) -> jax.Array:
    """Which of `ids` are in the cache, bool."""
    return hot.ids[_place(hot.ids, ids)] == ids


def bag_with_hot_rows(
    tt: TensorTrain,
    cores: Cores,
    rows: jax.Array,
    hot: HotRows,
    ids: jax.Array,
    offsets: jax.Array,
    weights: jax.Array | None = None,
    mode: Mode = "sum",
    *,
    way: Way = "auto",
    table: str = "table",
) -> jax.Array:
    """`tensor_train_bag.bag` where cached ids take their row from `rows` [size, features], at no cost to the cores."""
    if is_concrete(ids, offsets):
        check_bags(ids, offsets, tt.rows, weights, table)
    cached = is_hot(hot, ids)
    cold = bag(tt, cores, *_only(~cached, ids, offsets, weights), way=way, table=table)
    warm_ids, warm_offsets, warm_weights = _only(cached, _place(hot.ids, ids), offsets, weights)
    warm = dense_bag(rows, warm_ids, warm_offsets, warm_weights)
    return divide_sums(cold + warm, offsets, weights, len(ids), mode)


def refresh(
    tt: TensorTrain,
    cores: Cores,
    rows: jax.Array,
    hot: HotRows,
    policy: Policy = "write-back",
    *,
    fade: float = 1.0,
    steps: int = 16,
) -> tuple[Cores, jax.Array, HotRows, Refresh]:
    """Takes the most counted ids into the cache; see the module for what happens to the others.

    Optimizer state of the rows is the caller's: that of rows that entered should begin anew.

    Args:
      tt: the shape of the table.
      cores: its cores; "write-back" changes them where rows leave.
      rows: the cached rows.
      hot: the state.
      policy: for rows that leave.
      fade: counts are multiplied by this, so that what was frequent long ago gives way.
      steps: of "write-back", each a gradient step on |rows - cores' rows|^2 of the length that is best to first order.
    """
    size = len(hot.ids)
    counts, where = lax.top_k(hot.counts, size)
    wanted = jnp.sort(jnp.where(counts > 0, hot.candidates[where], LARGEST))
    stays = wanted[_place(wanted, hot.ids)] == hot.ids
    leaves = ~stays & (hot.ids < LARGEST)
    old = jnp.where(hot.ids < LARGEST, hot.ids, 0)

    def missing(cores: Cores) -> jax.Array:
        return jnp.where(leaves[:, None], look_up(tt, cores, old) - rows, 0)

    learnt = jnp.linalg.norm(missing(cores))
    if policy == "write-back":
        cores = lax.cond(leaves.any(), lambda c: _fitted(missing, c, steps), lambda c: c, cores)
    new = hot._replace(ids=wanted, counts=(hot.counts * fade).astype(jnp.int32))
    place, known = moves(hot, new)
    enters = ~known & (wanted < LARGEST)
    values = look_up(tt, cores, jnp.where(wanted < LARGEST, wanted, 0))
    kept = jnp.where(known[:, None], rows[place], jnp.where(enters[:, None], values, 0))
    report = Refresh(jnp.sum(enters), jnp.sum(leaves), learnt, jnp.linalg.norm(missing(cores)))
    return cores, kept, new, report


def _fitted(missing: Callable[[Cores], jax.Array], cores: Cores, steps: int) -> Cores:
    """Cores after `steps` of steepest descent on |missing(cores)|^2 / 2, never worse than those given."""

    def step(_: int, cores: Cores) -> Cores:
        residual, back = jax.vjp(missing, cores)
        (slope,) = back(residual)
        moved = jax.jvp(missing, (cores,), (slope,))[1]
        length = sum(jnp.sum(jnp.square(core)) for core in slope) / jnp.maximum(jnp.sum(jnp.square(moved)), 1e-30)

        def along(share: jax.Array) -> Cores:
            return jax.tree.map(lambda core, s: core - share * length * s, cores, slope)

        # The best length of the linear problem may be too long for the true one: take a quarter then, or nothing.
        shares = jnp.array([0.0, 1.0, 0.25])
        errors = lax.map(lambda share: jnp.sum(jnp.square(missing(along(share)))), shares)
        return along(shares[jnp.argmin(errors)])

    return lax.fori_loop(0, steps, step, cores)


def _place(ordered: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.searchsorted(ordered, ids), len(ordered) - 1).astype(jnp.int32)


def _only(
    chosen: jax.Array, ids: jax.Array, offsets: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The chosen ids of each bag, moved together; the rest of the arrays is padding."""
    chosen = chosen & (bag_numbers(offsets, len(ids)) < len(offsets) - 1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chosen, dtype=jnp.int32)])
    place = jnp.where(chosen, before[:-1], len(ids))
    moved = jnp.zeros_like(ids).at[place].set(ids, mode="drop")
    if weights is not None:
        weights = jnp.zeros_like(weights).at[place].set(weights, mode="drop")
    return moved, before[offsets], weights
