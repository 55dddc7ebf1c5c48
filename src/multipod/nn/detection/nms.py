"""Non-maximum suppression: the result of the greedy loop, in a few large steps, or on CPU by a kernel in C++."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from multipod.errors import NativeError
from multipod.nn.detection import nms_native
from multipod.nn.detection.boxes import box_iou

Way = Literal["auto", "tiles", "native"]
"""How boxes are suppressed; the results are the same."""


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
    way: Way = "auto",
) -> jax.Array:
    """The boxes that stay, by falling score: int32 [count], indices into `boxes`; -1 behind the last.

    A box stays unless its IoU with one that stays and has a higher score is above `threshold`: the boxes of the greedy
    loop, and of torchvision's `nms`. Of equal scores the first comes first. Empty boxes overlap nothing and stay.
    Nothing is differentiated.

    Args:
      boxes: [n, 4].
      scores: [n].
      threshold: an IoU.
      count: how many are wanted at most.
      valid: bool [n]; the others neither stay nor suppress. None: all are.
      groups: int [n], classes or levels: boxes of different groups do not suppress each other.
      inclusive: whether the threshold itself suppresses, as in Google's MLPerf submissions.
      tile: boxes in a tile, see `suppress_in_tiles`.
      way: "native" is a kernel in C++ on CPU, for float32; "tiles" is `suppress_in_tiles`, everywhere; "auto" is the
        kernel on CPU where a C++ compiler is found, or else tiles.

    Raises:
      NativeError: way="native", and the kernel cannot be compiled here.
    """
    n = len(boxes)
    if not n:
        return jnp.full(count, -1, jnp.int32)
    boxes, scores = jax.lax.stop_gradient((boxes, scores))
    valid = jnp.ones(n, bool) if valid is None else valid
    groups = jnp.zeros(n, jnp.int32) if groups is None else groups
    order = jnp.argsort(jnp.where(valid, -scores.astype(jnp.float32), jnp.inf), stable=True).astype(jnp.int32)
    tiled = partial(suppress_in_tiles, threshold=threshold, count=count, inclusive=inclusive, tile=tile)
    kernel = partial(nms_native.suppress_sorted, threshold=threshold, count=count, inclusive=inclusive)
    in_order = boxes[order], valid[order], groups[order]
    if boxes.dtype == jnp.float32 and _is_native(way):
        place = jax.lax.platform_dependent(*in_order, cpu=kernel, default=tiled)
    else:
        place = tiled(*in_order)
    return jnp.where(place >= 0, order[place], -1)


def _is_native(way: Way) -> bool:
    if way == "tiles":
        return False
    try:
        nms_native.register()
    except NativeError:
        if way == "native":
            raise
        return False
    return True


def suppress_in_tiles(
    boxes: jax.Array,
    valid: jax.Array,
    groups: jax.Array,
    *,
    threshold: float,
    count: int,
    inclusive: bool = False,
    tile: int = 256,
) -> jax.Array:
    """Which of boxes that are sorted by falling score stay: int32 [count], -1 behind the last; see `nms`.

    They are taken in tiles. A tile is cleared by the survivors so far; inside it, suppression is repeated until nothing
    changes, which is after as many times as the longest chain of boxes that suppress each other. It ends when `count`
    boxes stay; under `jax.vmap`, when all images have as many.

    Source: the algorithm of the MLPerf v0.6 and v0.7 TPU submissions.
    """
    n = len(boxes)
    tile = min(tile, n)
    tiles = -(-n // tile)
    pad = lambda x: jnp.pad(x, [(0, tiles * tile - n)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    sorted_boxes, valid, sorted_groups = pad(boxes), pad(valid), pad(groups)

    def suppresses(first: _Boxes, second: _Boxes) -> jax.Array:
        overlap = box_iou(first.box, second.box)
        over = overlap >= threshold if inclusive else overlap > threshold
        return over & (first.group[:, None] == second.group)

    def next_tile(state: _State) -> _State:
        start = state.tile * tile
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, start, tile)  # noqa: E731
        here = _Boxes(take(sorted_boxes), take(sorted_groups))
        cleared = (suppresses(state.staying, here) & (state.found >= 0)[:, None]).any(0)
        stays = _settle(take(valid) & ~cleared, jnp.triu(suppresses(here, here), 1))
        # Behind the last wanted they are dropped.
        place = jnp.where(stays, state.number + jnp.cumsum(stays) - 1, count)
        put = lambda into, values: into.at[place].set(values, mode="drop")  # noqa: E731
        staying = _Boxes(put(state.staying.box, here.box), put(state.staying.group, here.group))
        found = put(state.found, start + jnp.arange(tile, dtype=jnp.int32))
        return _State(state.tile + 1, state.number + stays.sum(), found, staying)

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
