"""Non-maximum suppression in tiles: the result of the greedy loop, in a few large steps."""

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
    order = jnp.argsort(jnp.where(valid, -scores.astype(jnp.float32), jnp.inf), stable=True)
    pad = lambda x: jnp.pad(x[order], [(0, tiles * tile - n)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    boxes, valid, groups = pad(boxes), pad(valid), pad(groups)

    def suppresses(start: jax.Array) -> jax.Array:
        """bool [all, tile]: which boxes would suppress which of the tile."""
        of_tile = lambda x: jax.lax.dynamic_slice_in_dim(x, start, tile)  # noqa: E731
        overlap = box_iou(boxes, of_tile(boxes))
        over = overlap >= threshold if inclusive else overlap > threshold
        return over & (groups[:, None] == of_tile(groups))

    def next_tile(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, stays = state
        start = number * tile
        over = suppresses(start)
        # `stays` is false from this tile on, so only earlier boxes clear it.
        here = jax.lax.dynamic_slice_in_dim(valid, start, tile) & ~(over & stays[:, None]).any(0)
        inside = jnp.triu(jax.lax.dynamic_slice_in_dim(over, start, tile), 1)
        return number + 1, jax.lax.dynamic_update_slice_in_dim(stays, _settle(here, inside), start, 0)

    def unfinished(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, stays = state
        return (number < tiles) & (stays.sum() < count)

    _, stays = jax.lax.while_loop(unfinished, next_tile, (jnp.int32(0), jnp.zeros(tiles * tile, bool)))
    place = jnp.where(stays, jnp.cumsum(stays) - 1, count)
    found = jnp.full(count, -1, jnp.int32)
    return found.at[place[:n]].set(order.astype(jnp.int32), mode="drop")


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
