"""Non-maximum suppression in tiles: the result of the greedy loop, in a few large steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from multipod.nn.detection.boxes import box_iou


def nms(
    boxes: jax.Array,
    scores: jax.Array,
    threshold: float,
    *,
    count: int,
    valid: jax.Array | None = None,
    groups: jax.Array | None = None,
    inclusive: bool = False,
    tile: int = 256,
) -> jax.Array:
    """The boxes that stay, by falling score: int32 [count], indices into `boxes`; -1 behind the last.

    A box stays unless its IoU with one that stays and has a higher score is above `threshold`: the boxes of the greedy
    loop, and of torchvision's `nms`. Of equal scores the first comes first. Empty boxes overlap nothing and stay.

    Boxes are sorted and taken in tiles. A tile is cleared by the survivors so far; inside it, suppression is repeated
    until nothing changes, which is after as many times as the longest chain of boxes that suppress each other. It ends
    when `count` boxes stay; under `jax.vmap`, when all images have as many.

    Args:
      boxes: [n, 4].
      scores: [n].
      threshold: an IoU.
      count: how many are wanted at most.
      valid: bool [n]; the others neither stay nor suppress. None: all are.
      groups: int [n], classes or levels: boxes of different groups do not suppress each other.
      inclusive: whether the threshold itself suppresses, as in Google's MLPerf submissions.
      tile: boxes in a tile.

    Source: the algorithm of the MLPerf v0.6 and v0.7 TPU submissions.
    """
    n = len(boxes)
    tile = max(1, min(tile, n))
    tiles = -(-n // tile)
    valid = jnp.ones(n, bool) if valid is None else valid
    groups = jnp.zeros(n, jnp.int32) if groups is None else groups
    order = jnp.argsort(jnp.where(valid, -scores.astype(jnp.float32), jnp.inf), stable=True).astype(jnp.int32)
    pad = lambda x: jnp.pad(x, [(0, tiles * tile - n)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    sorted_boxes, valid, sorted_groups, order = pad(boxes[order]), pad(valid[order]), pad(groups[order]), pad(order)

    def suppresses(first: _Boxes, second: _Boxes) -> jax.Array:
        overlap = box_iou(first.box, second.box)
        over = overlap >= threshold if inclusive else overlap > threshold
        return over & (first.group[:, None] == second.group)

    def next_tile(state: _State) -> _State:
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, state.tile * tile, tile)  # noqa: E731
        here = _Boxes(take(sorted_boxes), take(sorted_groups))
        cleared = (suppresses(state.staying, here) & (state.found >= 0)[:, None]).any(0)
        stays = _settle(take(valid) & ~cleared, jnp.triu(suppresses(here, here), 1))
        # Behind the last wanted they are dropped.
        place = jnp.where(stays, state.number + jnp.cumsum(stays) - 1, count)
        put = lambda into, values: into.at[place].set(values, mode="drop")  # noqa: E731
        staying = _Boxes(put(state.staying.box, here.box), put(state.staying.group, here.group))
        return _State(state.tile + 1, state.number + stays.sum(), put(state.found, take(order)), staying)

    none = _Boxes(jnp.zeros((count, 4), boxes.dtype), jnp.zeros(count, groups.dtype))
    start = _State(jnp.int32(0), jnp.int32(0), jnp.full(count, -1, jnp.int32), none)
    unfinished = lambda state: (state.tile < tiles) & (state.number < count)  # noqa: E731
    return jax.lax.while_loop(unfinished, next_tile, start).found


class _Boxes(NamedTuple):
    """Boxes [n, 4], and the group of each, [n]."""

    box: jax.Array
    group: jax.Array


class _State(NamedTuple):
    """The next tile, how many boxes stay so far, which, and these boxes themselves."""

    tile: jax.Array
    number: jax.Array
    found: jax.Array
    staying: _Boxes


def _settle(candidates: jax.Array, suppresses: jax.Array) -> jax.Array:
    """The candidates of a tile that stay: bool [tile], with `suppresses` [tile, tile] upper triangular.

    After round r the first r candidates are right, since only boxes before them decide on them. So it ends, and what
    no longer changes is what the greedy loop finds.
    """

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, stays = state
        return stays, candidates & ~(suppresses & stays[:, None]).any(0)

    def changes(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        before, stays = state
        return (before != stays).any()

    return jax.lax.while_loop(changes, step, (jnp.zeros_like(candidates), candidates))[1]
