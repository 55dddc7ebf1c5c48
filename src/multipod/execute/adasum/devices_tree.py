"""Adasum inside `jax.shard_map` by its schedule: the tree, level by level, for any number of devices.

The Gram form beside this (`devices.py`) is what training uses: it waits less, and its arithmetic grows with the number
of vectors, so it ends at 128. Here each level costs an exchange and two short messages; what one device computes does
not grow with their number. Float32 suffices, as there: tensors are scaled by powers of two to lie near 1, products are
pairs of float32, and so are coefficients.

Dots are sums of integers: each product is cut into a few numbers of so many bits that the sum over a whole tensor fits
32. So nothing is rounded, neither on a device nor between devices, whose parts a schedule of plain sums adds.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.collectives.adasum import combinations, dot_sums, split
from multipod.collectives.schedule import COPY, Schedule
from multipod.errors import ScheduleError
from multipod.execute.adasum.devices import Report
from multipod.execute.adasum.double_float import (
    NOTHING,
    Pair,
    exponent_of,
    negative,
    over,
    plus,
    power_of_two,
    select,
    times,
    two_product,
)
from multipod.execute.adasum.operator import Layers
from multipod.execute.adasum.ranks import meeting
from multipod.execute.engines.jax import run

LONGEST = 1 << 27

DIGITS = 48
"""Bits behind the point of a product that count."""


def all_reduce(schedule: Schedule, vector: jax.Array, axes: Sequence[str], layers: Layers) -> tuple[jax.Array, Report]:
    """Adasum of the devices' float32 vectors, tensor by tensor, on each of them; and what was found out.

    The device with row-major number r over `axes` is the live chip of rank r. A tensor that is not finite on some
    device becomes NaN on all, and the report says whose it was. Costs the bytes of the schedule; some hundred
    operations for each element that is received to be combined.

    Args:
      schedule: that combines, as `multipod.collectives.adasum.halving` builds it.
      vector: float32, flat.
      axes: of the mesh.
      layers: of the vector.

    Raises:
      ScheduleError: layers that do not fit, another dtype, a tensor of `LONGEST` elements or more, or axes that do not
        fit the schedule.
    """
    names = tuple(axes)
    layers.check(len(vector))
    if vector.dtype != jnp.float32 or max(layers.sizes, default=0) >= LONGEST:
        raise ScheduleError(
            f"{schedule}: tensors of up to {max(layers.sizes, default=0):,} {vector.dtype} elements, and the tree on "
            f"JAX takes float32 and fewer than {LONGEST:,}. Cast the vector, or cut its tensors."
        )
    if not len(vector):
        shape = lax.axis_size(names), len(layers.sizes)
        return vector, Report(jnp.ones(len(layers.sizes)), jnp.zeros(shape, bool))
    tensor = jnp.searchsorted(jnp.asarray(layers.ends[1:], jnp.int32), lax.iota(jnp.int32, len(vector)), side="right")
    broken = jax.ops.segment_max((~jnp.isfinite(vector)).astype(jnp.int32), tensor, len(layers.sizes)) > 0
    poisoned = lax.all_gather(broken, names)
    # What is poisoned takes no part in the arithmetic: infinities would spoil what they are scaled with.
    begun = vector = jnp.where(broken[tensor], 0, vector)
    for number, steps in split(schedule):
        vector = _combined(schedule, number, vector, names, layers) if steps is None else run(steps, vector, names)
    orthogonality = _orthogonality(begun, vector, tensor, names, len(layers.sizes))
    spoilt = poisoned.any(0)
    return (
        jnp.where(spoilt[tensor], jnp.nan, vector),
        Report(jnp.where(spoilt, jnp.nan, orthogonality), poisoned),
    )


class _Table(NamedTuple):
    """A step that combines, by rank.

    Attributes:
      spans: int32 [spans, ranks, 2]: from and to of what each receives; empty ones at the end.
      group: int32 [ranks]: the number of the combination; that of nobody for those that have none.
      left: bool [ranks]: whether its own vector is the left one.
      share: float32 [ranks, 2]: the leaves of its own and of the other vector, as shares of both.
      groups: how many combinations there are.
    """

    spans: np.ndarray
    group: np.ndarray
    left: np.ndarray
    share: np.ndarray
    groups: int


@lru_cache(maxsize=64)
def _table(schedule: Schedule, number: int, layers: Layers) -> _Table:
    met = combinations(schedule)[number]
    parts = [meeting(schedule, number, rank, layers) for rank in range(len(schedule.topology.chips))]
    most = max(len(part.receives) for part in parts if part is not None)
    spans = np.zeros((most, len(parts), 2), np.int32)
    group, left = np.full(len(parts), len(met), np.int32), np.zeros(len(parts), bool)
    share = np.zeros((len(parts), 2), np.float32)
    for rank, part in enumerate(parts):
        if part is None:
            continue
        for k, span in enumerate(part.receives):
            spans[k, rank] = span.begin, span.end
        group[rank] = next(k for k, one in enumerate(met) if rank in one.members)
        left[rank], together = part.left, part.own + part.others
        share[rank] = part.own / together, part.others / together
    return _Table(spans, group, left, share, len(met))


@lru_cache(maxsize=64)
def _swap(schedule: Schedule, number: int) -> Schedule:
    """The messages of a step that combines, copied."""
    step = schedule.steps[number]
    copied = step._replace(op=np.full_like(step.op, COPY))
    return Schedule("broadcast", "swap", schedule.topology, schedule.denominator, schedule.bounds, [copied])


class _Window(NamedTuple):
    """A piece of both vectors: where it begins, which of it was received, and the tensor of each element."""

    start: jax.Array
    inside: jax.Array
    tensor: jax.Array
    mine: jax.Array
    theirs: jax.Array


def _combined(schedule: Schedule, number: int, vector: jax.Array, names: tuple[str, ...], layers: Layers) -> jax.Array:
    """The vector after a step that combines."""
    table, rank = _table(schedule, number, layers), lax.axis_index(names)
    other = run(_swap(schedule, number), vector, names)
    windows = [_window(spans, rank, vector, other, layers) for spans in table.spans]
    left, share = jnp.asarray(table.left)[rank], jnp.asarray(table.share)[rank]
    own, others = _exponents(windows, table, rank, left, names, len(layers.sizes))
    dots = sum(
        (_dots(window, own, others, left, layers) for window in windows[1:]),
        _dots(windows[0], own, others, left, layers),
    )
    adder = dot_sums(schedule)[number]
    if adder is not None:
        dots = run(adder, dots.reshape(-1), names).reshape(dots.shape)
    sums = _turned(_numbers(dots, _bits(layers)), left)
    factors = _factors(sums, own, others, share)
    for window in windows:
        new = _blended(window, own, others, factors)
        old = lax.dynamic_slice(vector, (window.start,), new.shape)
        vector = lax.dynamic_update_slice(vector, jnp.where(window.inside, new, old), (window.start,))
    return vector


def _window(spans: np.ndarray, rank: jax.Array, vector: jax.Array, other: jax.Array, layers: Layers) -> _Window:
    width = max(1, int((spans[:, 1] - spans[:, 0]).max()))
    begin, end = jnp.asarray(spans)[rank]
    start = jnp.minimum(begin, len(vector) - width)
    place = start + lax.iota(jnp.int32, width)
    inside = (place >= begin) & (place < end)
    tensor = jnp.searchsorted(jnp.asarray(layers.ends[1:], jnp.int32), place, side="right")
    mine, theirs = (jnp.where(inside, lax.dynamic_slice(one, (start,), (width,)), 0) for one in (vector, other))
    return _Window(start, inside, tensor, mine, theirs)


def _exponents(
    windows: Sequence[_Window], table: _Table, rank: jax.Array, left: jax.Array, names: tuple[str, ...], tensors: int
) -> tuple[jax.Array, jax.Array]:
    """int32 [tensors] each: of both vectors, the powers of two that bring each tensor's largest element near 1."""
    largest = jnp.zeros((2, tensors))
    for window in windows:
        for side, part in ((0, window.mine), (1, window.theirs)):
            largest = largest.at[side].max(jax.ops.segment_max(jnp.abs(part), window.tensor, tensors))
    # One row for nobody, who has none.
    told = jnp.zeros((table.groups + 1, 2, tensors))
    told = told.at[jnp.asarray(table.group)[rank]].set(jnp.where(left, largest, largest[::-1]))
    both = lax.pmax(told, names)[jnp.asarray(table.group)[rank]]
    both = exponent_of(jnp.where(left, both, both[::-1]))
    return both[0], both[1]


def _bits(layers: Layers) -> int:
    """Of each integer that a product is cut into, without its sign."""
    return 30 - max(layers.sizes).bit_length()


def _dots(window: _Window, own: jax.Array, others: jax.Array, left: jax.Array, layers: Layers) -> jax.Array:
    """int32 [integers, tensors, 3]: left.right, left.left, right.right of normalised vectors, of this device's part."""
    mine = window.mine * power_of_two(-own)[window.tensor]
    theirs = window.theirs * power_of_two(-others)[window.tensor]
    a, b = jnp.where(left, mine, theirs), jnp.where(left, theirs, mine)
    products, bits, found = two_product(jnp.stack([a, a, b], 1), jnp.stack([b, a, b], 1)), _bits(layers), []
    high, low = products
    for k in range(1, -(-DIGITS // bits) + 1):
        # Both are left with what is finer than this grid: powers of two times integers, so nothing is rounded.
        whole = [jnp.round(part * 2.0 ** (bits * k)) for part in (high, low)]
        high, low = (part - one * 2.0 ** (-bits * k) for part, one in zip((high, low), whole, strict=True))
        found.append(jax.ops.segment_sum((whole[0] + whole[1]).astype(jnp.int32), window.tensor, len(layers.sizes)))
    return jnp.stack(found)


def _numbers(dots: jax.Array, bits: int) -> Pair:
    """[tensors, 3]: what the integers stand for."""
    total = Pair(*(jnp.zeros(dots.shape[1:]) for _ in range(2)))
    for k in range(len(dots), 0, -1):
        for part, unit in ((dots[k - 1] & 0xFFFF, 1.0), (dots[k - 1] >> 16, 65536.0)):
            exact = part.astype(jnp.float32) * (unit * 2.0 ** (-bits * k))
            total = plus(Pair(exact, jnp.zeros_like(exact)), total)
    return total


def _turned(dots: Pair, left: jax.Array) -> Pair:
    """From (left, right), in which all devices of a combination agree, to (mine, theirs)."""
    return Pair(*(jnp.where(left, part, part[:, np.array([0, 2, 1])]) for part in dots))


def _factors(dots: Pair, own: jax.Array, others: jax.Array, share: jax.Array) -> tuple[Pair, Pair, jax.Array]:
    """Of both normalised vectors the factors, in units of 2^top; and top, int32 [tensors]."""
    top = jnp.maximum(own, others)
    found = []
    for side, mine, theirs in ((1, own, others), (2, others, own)):
        dot, squared = (Pair(part.high[:, k], part.low[:, k]) for part, k in ((dots, 0), (dots, side)))
        none = squared.high == 0
        zeros = jnp.zeros_like(dot.high)
        ratio = over(dot, select(none, Pair(zeros + 1, zeros), squared))
        plain = Pair(power_of_two(mine - top), zeros)
        weight = Pair(zeros + share[side - 1], zeros)
        less = times(times(weight, ratio), Pair(power_of_two(theirs - top), zeros))
        found.append(select(none, plain, plus(plain, negative(less))))
    return found[0], found[1], top


def _blended(window: _Window, own: jax.Array, others: jax.Array, factors: tuple[Pair, Pair, jax.Array]) -> jax.Array:
    first, second, top = factors
    total = None
    for part, exponent, factor in ((window.mine, own, first), (window.theirs, others, second)):
        scaled = part * power_of_two(-exponent)[window.tensor]
        along = Pair(*(one[window.tensor] for one in factor))
        term = times(along, Pair(scaled, jnp.zeros_like(scaled)))
        total = term if total is None else plus(total, term)
    assert total is not None
    top = jnp.maximum(top, NOTHING)
    return (total.high + total.low) * power_of_two(top)[window.tensor]


def _orthogonality(
    begun: jax.Array, combined: jax.Array, tensor: jax.Array, names: tuple[str, ...], tensors: int
) -> jax.Array:
    """|combined|^2 / sum |vector|^2 of each tensor, to float32's digits."""
    largest = lax.pmax(jax.ops.segment_max(jnp.abs(begun), tensor, tensors), names)
    scale = power_of_two(-exponent_of(largest))[tensor]

    def squares(vector: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(jnp.square(vector * scale), tensor, tensors)

    together = lax.psum(squares(begun), names)
    return jnp.where(together > 0, squares(combined) / jnp.where(together > 0, together, 1), 1.0)
