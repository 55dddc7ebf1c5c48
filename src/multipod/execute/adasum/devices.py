"""Adasum inside `jax.shard_map`, in float32 that is as good as float64 where it matters.

The Gram form: every device gets its share of all vectors (an all-to-all), their p x p dots are summed, and of these
alone follow the weights of the one sum that is left to do. So a combination takes the bytes of a sum and a few small
messages, where halving takes log2 p exchanges that wait for each other. `multipod.execute.adasum.operator` has the
operator, its rules, and the plain forms.

Float64 is not to be had on many devices, and float32 has neither its digits nor its range:

- Each tensor of each device travels divided by a power of two that brings its largest element near 1, which changes no
  digit. So squares neither overflow nor vanish, and the largest elements tell which tensors are not finite.
- Dots are added up as pairs (high, low) of float32 with the rounding errors kept, 48 bits together, and the
  weights are computed in such pairs too.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from multipod.errors import LayoutError
from multipod.execute.adasum.double_float import (
    NOTHING,
    Pair,
    added_up,
    exponent_of,
    joined,
    negative,
    over,
    plus,
    power_of_two,
    select,
    sums_of_runs,
    times,
    two_product,
)
from multipod.execute.bucketing import ends, share_shape, structure_of, to_rows

Tree = Any

BLOCK = 1024
"""Elements whose products one matrix product adds up, in float32; the sums of blocks are added as pairs. The errors of
blocks are independent, so those of a long tensor vanish: 4e-9 of the dots of 2^20 normal numbers."""

EXACT = 256
"""Shares of no more elements have no blocks over which errors could average: their products are taken as pairs."""

LOSS = 16.0
"""Where a sum cancels by more, it is done in pairs too: else its error would pass 1e-6."""

EXACT_PRODUCTS = 1 << 22
"""At most so many of them, on a device: 32 MiB."""

CANCELLED = 2.0**-40
"""Squared lengths of this share of what went in count as none: they are rounding errors of the pairs."""

MOST = 128
"""Vectors that the Gram form takes. The p x p dots of each tensor, and their p products an element, grow with p."""


class Report(NamedTuple):
    """What a combination found out, for each tensor in the order of `jax.tree.leaves`; the same on every device.

    Attributes:
      orthogonality: float32 [tensors]: |combined|^2 / sum |g_i|^2; 1 if all are orthogonal, 1/p if all are equal.
      poisoned: bool [devices, tensors]: whose tensor is not finite. It is NaN on every device then.
    """

    orthogonality: jax.Array
    poisoned: jax.Array


def combine_tree(
    tree: Tree, specs: Tree, axes: Mapping[str, int], leaves: Sequence[int], inside: Sequence[str] = ()
) -> tuple[Tree, Report]:
    """Adasum of `tree` over the devices, tensor by tensor, each tensor split as its `PartitionSpec` says.

    Tensors whose spec splits nothing end whole on every device. Costs the bytes of a reduce-scatter (and an
    all-gather, if nothing is split), p multiplications an element for the dots and p for the sum.

    Args:
      tree: this device's tensors, of floating dtypes. Float64 is combined with the weights of its float32 values.
      specs: as for `reduce_scatter_tree`.
      axes: (name to size, in row-major order) the devices.
      leaves: of the binary tree, rank or -1 (`multipod.collectives.adasum.leaves`); of nodes, with `inside`.
      inside: the last of the axes, within which vectors are averaged first: a node. Adasum is between the nodes.

    Raises:
      LayoutError: more vectors than `MOST`; axes inside that are not the last.
    """
    names = tuple(axes)
    outer = names[: len(names) - len(inside)]
    if names[len(outer) :] != tuple(inside):
        raise LayoutError(f"adasum: axes {tuple(inside)} are not the last of {names}. Average inside the last axes.")
    p = math.prod(axes[name] for name in outer)
    if p > MOST:
        raise LayoutError(
            f"adasum: {p} vectors are too many for the {p} x {p} dots of each tensor; the most are {MOST}. "
            "Average inside nodes first (adasum-rows), or take a smaller mesh."
        )
    structure, tensors = structure_of(tree), jax.tree.leaves(tree)
    tensor_specs = structure.flatten_up_to(specs)
    if not tensors:
        return tree, Report(jnp.zeros(0), jnp.zeros((math.prod(axes.values()), 0), bool))
    groups, exponents, poisoned = _exchange(tensors, tensor_specs, axes, outer, tuple(inside))
    gram = joined([_dots(group.shares, group.lengths) for group in groups])
    order = [place for group in groups for place in group.places]
    found = _weights(gram, exponents[np.array(order)], names, leaves)
    combined = list(tensors)
    begin = 0
    for group in groups:
        end = begin + len(group.places)
        for place, part in zip(group.places, _summed(group, found.at(begin, end)), strict=True):
            combined[place] = part
        begin = end
    spread = _spread(combined, tensors, tensor_specs, axes)
    return structure.unflatten(spread), Report(found.orthogonality[np.argsort(order)], poisoned)


class Group(NamedTuple):
    """Tensors of one dtype: this device's share of all vectors, [p, sum of lengths], normalised."""

    places: list[int]
    lengths: list[int]
    shares: jax.Array


def _exchange(
    tensors: list[jax.Array],
    specs: list[PartitionSpec],
    axes: Mapping[str, int],
    outer: tuple[str, ...],
    inside: tuple[str, ...],
) -> tuple[list[Group], jax.Array, jax.Array]:
    """The tensors by dtype; their exponents, int32 [tensors, p]; what is poisoned."""
    names = tuple(axes)
    devices, p = math.prod(axes.values()), math.prod(axes[name] for name in outer)
    largest = jnp.stack([jnp.max(jnp.abs(t), initial=0).astype(jnp.float32) for t in tensors])
    largest = lax.all_gather(largest, names)  # [devices, tensors]
    poisoned = ~jnp.isfinite(largest)
    exponents = exponent_of(largest.reshape(p, -1, len(tensors)).max(1))  # of the vectors: one for all of a node
    mine = exponents[lax.axis_index(outer) if outer else 0]
    groups = []
    for dtype in sorted({str(tensor.dtype) for tensor in tensors}):
        places = [k for k, tensor in enumerate(tensors) if str(tensor.dtype) == dtype]
        rows = [_rows(tensors[k] * power_of_two(-mine[k]).astype(dtype), specs[k], axes) for k in places]
        matrix = jnp.concatenate(rows, axis=1)
        if inside:
            matrix = matrix.reshape(p, devices // p, -1) / (devices // p)
            matrix = lax.psum_scatter(matrix, inside, scatter_dimension=1)
        matrix = lax.all_to_all(matrix, outer, 0, 0, tiled=True) if outer else matrix
        groups.append(Group(places, [row.shape[1] for row in rows], matrix))
    return groups, exponents.T, poisoned


def _is_split(spec: PartitionSpec) -> bool:
    return any(names is not None for names in spec)


def _rows(tensor: jax.Array, spec: PartitionSpec, axes: Mapping[str, int]) -> jax.Array:
    """[devices, share] of a tensor; one that is not split is padded with zeros, which change no dot."""
    if _is_split(spec):
        return to_rows(tensor, spec, dict(axes))
    devices = math.prod(axes.values())
    return jnp.pad(tensor.ravel(), (0, -tensor.size % devices)).reshape(devices, -1)


def _spread(
    combined: list[jax.Array], tensors: list[jax.Array], specs: list[PartitionSpec], axes: Mapping[str, int]
) -> list[jax.Array]:
    """The shares in the shapes of their specs; unsplit ones gathered, in one message for each dtype."""
    results = list(combined)
    for k, spec in enumerate(specs):
        if _is_split(spec):
            results[k] = combined[k].reshape(share_shape(tensors[k].shape, spec, dict(axes)))
    whole = [k for k, spec in enumerate(specs) if not _is_split(spec)]
    for dtype in sorted({str(tensors[k].dtype) for k in whole}):
        places = [k for k in whole if str(tensors[k].dtype) == dtype]
        rows = lax.all_gather(jnp.concatenate([combined[k] for k in places]), tuple(axes))
        parts = jnp.split(rows, ends([combined[k].shape for k in places]), axis=1)
        for k, part in zip(places, parts, strict=True):
            results[k] = part.ravel()[: tensors[k].size].reshape(tensors[k].shape)
    return results


# Dots and weights.


def _dots(shares: jax.Array, lengths: Sequence[int]) -> Pair:
    """[tensors, p, p]: the dots of this device's shares of tensors, which are so long.

    The blocks are one matrix product each, of the place in `shares` where they lie, with zeros for other tensors'
    elements: no copy of `shares` is made on CPU devices, where a loop costs nothing.
    """
    p, shares = len(shares), _wide(shares)
    short = [0 < length <= EXACT for length in lengths]
    if p * p * sum(n for n, yes in zip(lengths, short, strict=True) if yes) > EXACT_PRODUCTS:
        short = [False] * len(lengths)
    blocks: list[tuple[int, int, int]] = []
    exact: list[int] = []
    counts: list[int] = []
    order: list[int] = []
    begin = 0
    for k, length in enumerate(lengths):
        if short[k]:
            exact += range(begin, begin + length)
        else:
            blocks += _blocks(begin, length, shares.shape[1])
        begin += length
    for yes in (False, True):
        chosen = [k for k in range(len(lengths)) if short[k] == yes]
        order += chosen
        counts += [lengths[k] if yes else max(1, -(-lengths[k] // BLOCK)) for k in chosen]
    products = []
    if blocks:
        high = _block_dots(shares, jnp.asarray(np.array(blocks, np.int32)))
        products.append(Pair(high, jnp.zeros_like(high)))
    if exact:
        few = shares[:, np.array(exact)].astype(jnp.float32).T
        products.append(two_product(few[:, :, None], few[:, None, :]))
    return Pair(*(part[np.argsort(order)] for part in sums_of_runs(joined(products), counts)))


def _wide(shares: jax.Array) -> jax.Array:
    """At least one block."""
    missing = max(BLOCK - shares.shape[1], 0)
    return jnp.pad(shares, ((0, 0), (0, missing))) if missing else shares


def _blocks(begin: int, length: int, width: int) -> list[tuple[int, int, int]]:
    """The blocks of a tensor at `begin`: where each is read, the first and the last + 1 of its elements."""
    lows = range(begin, begin + max(length, 1), BLOCK)
    return [(min(low, width - BLOCK), low, min(low + BLOCK, begin + length)) for low in lows]


def _block_dots(shares: jax.Array, blocks: jax.Array) -> jax.Array:
    """[blocks, p, p]; a block is (where it is read, the first and the last + 1 of its elements)."""

    def block(row: jax.Array) -> jax.Array:
        place = row[0] + lax.iota(jnp.int32, BLOCK)
        part = lax.dynamic_slice_in_dim(shares, row[0], BLOCK, 1).astype(jnp.float32)
        return jnp.where((place >= row[1]) & (place < row[2]), part, 0)

    def dots(part: jax.Array) -> jax.Array:
        return jnp.einsum("...ib,...jb->...ij", part, part, precision=lax.Precision.HIGHEST)

    if jax.default_backend() == "cpu":
        return lax.map(lambda row: dots(block(row)), blocks)
    return dots(jax.vmap(block)(blocks))


def _weights(dots: Pair, exponents: jax.Array, names: tuple[str, ...], leaves: Sequence[int]) -> "Weights":
    """The weights of the normalised vectors, from the dots of this device's shares.

    Each device adds the dots of some tensors and finds their weights, then all tell theirs.
    """
    devices, tensors = lax.axis_size(names), len(exponents)
    padding = -tensors % devices
    each = (tensors + padding) // devices

    def own(part: jax.Array) -> jax.Array:
        part = jnp.pad(part, ((0, padding), (0, 0), (0, 0)))
        return lax.all_to_all(part, names, 0, 0, tiled=True).reshape(devices, each, *part.shape[1:])

    gram = added_up(Pair(own(dots.high), own(dots.low)))
    place = lax.axis_index(names) * each
    exponents = lax.dynamic_slice_in_dim(jnp.pad(exponents, ((0, padding), (0, 0))), place, each)
    found = tree_weights(gram, exponents, leaves)
    columns = jnp.stack([found.top.astype(jnp.float32), found.orthogonality, found.loss], 1)
    told = lax.all_gather(jnp.concatenate([columns, found.high, found.low], 1), names)
    told = told.reshape(devices * each, -1)[:tensors]
    high, low = jnp.split(told[:, 3:], 2, axis=1)
    return Weights(high, low, told[:, 0].astype(jnp.int32), told[:, 1], told[:, 2])


class Weights(NamedTuple):
    """Of each tensor: the combination is 2^top sum_i (high + low)[i] normalised[i].

    Attributes:
      high: float32 [tensors, p].
      low: float32 [tensors, p], the rest of them.
      top: int32 [tensors].
      orthogonality: float32 [tensors], |combined|^2 / sum |g_i|^2.
      loss: float32 [tensors], sum_i |weight| |g_i| / |combined|: by so much rounding errors of the sum grow.
    """

    high: jax.Array
    low: jax.Array
    top: jax.Array
    orthogonality: jax.Array
    loss: jax.Array

    def at(self, begin: int, end: int) -> "Weights":
        """Those of some tensors."""
        return Weights(*(column[begin:end] for column in self))


def tree_weights(gram: Pair, exponents: jax.Array, leaves: Sequence[int]) -> Weights:
    """The weights of normalised vectors, from their dots: `operator.gram_weights` in pairs of float32.

    With vector i being 2^exponents[i] times its normalised self, the combination is 2^top sum_i weights[i]
    normalised[i]. Each node of the tree has an exponent of its own, so that nothing leaves float32's range.

    Args:
      gram: [tensors, p, p], the dots of normalised vectors.
      exponents: int32 [tensors, p].
      leaves: ranks, or -1 where there is no vector; a power of two of them.
    """
    ranks = np.array(leaves)
    there, taken = ranks >= 0, np.maximum(ranks, 0)
    both = there[:, None] & there[None, :]
    gram = Pair(*(jnp.where(both, part[:, taken][:, :, taken], 0) for part in gram))
    exponents = jnp.where(there, exponents[:, taken], NOTHING)
    ones, zeros = jnp.ones(exponents.shape), jnp.zeros(exponents.shape)
    lengths = jnp.sqrt(jnp.maximum(_diagonal(gram).high, 0))
    nodes = _Nodes(gram, exponents, jnp.asarray(there, jnp.float32), lengths)
    begin = nodes, Pair(ones, zeros), jnp.arange(len(ranks))

    def level(_: int, carry: tuple[_Nodes, Pair, jax.Array]) -> tuple[_Nodes, Pair, jax.Array]:
        nodes, weights, node_of_leaf = carry
        above, factor = _level(nodes)
        return above, times(weights, Pair(*(part[:, node_of_leaf] for part in factor))), node_of_leaf // 2

    levels = len(ranks).bit_length() - 1
    top, weights, _ = lax.fori_loop(0, levels, level, begin) if levels else begin
    squared, exponent = top.gram.high[:, 0, 0], top.exponent[:, 0]
    together = jnp.square(lengths * power_of_two(exponents - exponent[:, None])).sum(1)
    orthogonality = jnp.where(together > 0, squared / jnp.where(together > 0, together, 1), 1.0)
    went_in = (jnp.abs(weights.high) * lengths).sum(1)
    length = jnp.maximum(jnp.sqrt(jnp.maximum(squared, 0)), jnp.finfo(jnp.float32).tiny)
    order = np.argsort(ranks)[len(ranks) - there.sum() :]
    return Weights(
        weights.high[:, order],
        weights.low[:, order],
        exponent,
        jnp.where(jnp.isnan(together), jnp.nan, orthogonality),
        jnp.where(went_in > 0, went_in / length, 1.0),
    )


class _Nodes(NamedTuple):
    """The nodes of a level of the tree, in the first places; what follows them is zero.

    `gram` are their dots in units of 2^exponent, `size` in the same units at least the length of what went in.
    """

    gram: Pair
    exponent: jax.Array
    leaves: jax.Array
    size: jax.Array


def _level(nodes: _Nodes) -> tuple[_Nodes, Pair]:
    """The nodes above, and the factor of each node in the one above it."""
    gram, exponent, leaves, size = nodes
    half = len(leaves) // 2
    squared = _diagonal(gram)
    none = squared.high <= CANCELLED * jnp.square(size)
    top = jnp.maximum(exponent[:, ::2], exponent[:, 1::2])
    scale = power_of_two(exponent - jnp.repeat(top, 2, axis=1))
    zeros = jnp.zeros_like(scale)
    dot = Pair(*(jnp.repeat(jnp.diagonal(part[:, ::2, 1::2], axis1=1, axis2=2), 2, axis=1) for part in gram))
    ratio = over(dot, select(none, Pair(zeros + 1, zeros), squared))
    together = jnp.repeat(jnp.maximum(leaves[::2] + leaves[1::2], 1), 2)
    share = over(Pair(zeros + leaves, zeros), Pair(zeros + together, zeros))
    less = times(times(share, ratio), Pair(_swapped(scale), zeros))
    plain = Pair(scale, zeros)
    factor = select(none, plain, plus(plain, negative(less)))
    size = jnp.abs(factor.high) * size
    return _Nodes(
        Pair(*(jnp.pad(part, ((0, 0), (0, half), (0, half))) for part in _merged(gram, factor))),
        jnp.pad(top, ((0, 0), (0, half)), constant_values=NOTHING),
        jnp.pad(leaves[::2] + leaves[1::2], (0, half)),
        jnp.pad(size[:, ::2] + size[:, 1::2], ((0, 0), (0, half))),
    ), factor


def _diagonal(gram: Pair) -> Pair:
    return Pair(*(jnp.diagonal(part, axis1=1, axis2=2) for part in gram))


def _swapped(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1, 2)[:, :, ::-1].reshape(x.shape)


def _merged(gram: Pair, factor: Pair) -> Pair:
    """The dots of the nodes above: each the sum of two, with their factors."""
    for axis in (1, 2):
        along = Pair(*(jnp.expand_dims(part, 3 - axis) for part in factor))
        scaled = times(gram, Pair(*(jnp.broadcast_to(part, gram.high.shape) for part in along)))
        even = (slice(None),) * axis + (slice(0, None, 2),)
        odd = (slice(None),) * axis + (slice(1, None, 2),)
        gram = plus(Pair(*(part[even] for part in scaled)), Pair(*(part[odd] for part in scaled)))
    return gram


def _summed(group: Group, weights: Weights) -> list[jax.Array]:
    """The combination of each tensor's shares, in the tensors' dtype."""
    p = len(group.shares)
    ends = [0, *itertools.accumulate(group.lengths)]
    short = [0 < length <= EXACT for length in group.lengths]
    if p * sum(n for n, yes in zip(group.lengths, short, strict=True) if yes) > EXACT_PRODUCTS:
        short = [False] * len(short)
    found: list[jax.Array] = [group.shares[0]] * len(short)
    for yes in (True, False):
        chosen = [k for k in range(len(short)) if short[k] == yes]
        if not chosen:
            continue
        columns = np.concatenate([np.arange(ends[k], ends[k + 1]) for k in chosen])
        own = Weights(*(part[np.array(chosen)] for part in weights))
        lengths = [group.lengths[k] for k in chosen]
        matrix = group.shares if len(chosen) == len(short) else group.shares[:, columns]
        if yes:
            total = _exact_sum(matrix, lengths, own)
        else:
            loses = (own.loss > LOSS).any()
            total = lax.cond(
                loses, lambda m, w, n=lengths: _exact_sum(m, n, w), lambda m, w, n=lengths: _sum(m, n, w), matrix, own
            )
        for k, part in zip(chosen, jnp.split(total, list(itertools.accumulate(lengths))[:-1]), strict=True):
            found[k] = part
    return found


def _sum(shares: jax.Array, lengths: Sequence[int], weights: Weights) -> jax.Array:
    """The combinations, one after the other, summed in float32 or the tensors' wider dtype.

    On CPU devices block by block: there each matrix product of another shape takes a tenth of a second to compile.
    """
    wide = jnp.promote_types(shares.dtype, jnp.float32)
    scales = weights.high.astype(wide), power_of_two(weights.top).astype(wide)

    def summed(part: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
        total = jnp.einsum("p,ps->s", weight, part.astype(wide), precision=lax.Precision.HIGHEST)
        return (total * scale).astype(shares.dtype)

    if jax.default_backend() != "cpu":
        parts = jnp.split(shares, list(itertools.accumulate(lengths))[:-1], axis=1)
        return jnp.concatenate([summed(part, *(one[k] for one in scales)) for k, part in enumerate(parts)])
    length, shares = shares.shape[1], _wide(shares)
    begins = [0, *itertools.accumulate(lengths)]
    rows = [
        (*block, k) for k, size in enumerate(lengths) for block in _blocks(begins[k], size, shares.shape[1]) if size
    ]

    def block(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        place = row[0] + lax.iota(jnp.int32, BLOCK)
        new = summed(lax.dynamic_slice_in_dim(shares, row[0], BLOCK, 1), *(one[row[3]] for one in scales))
        old = lax.dynamic_slice_in_dim(total, row[0], BLOCK)
        new = jnp.where((place >= row[1]) & (place < row[2]), new, old)
        return lax.dynamic_update_slice_in_dim(total, new, row[0], 0), None

    begin = jnp.zeros(shares.shape[1], shares.dtype)
    if not rows:
        return begin[:length]
    return lax.scan(block, begin, jnp.asarray(np.array(rows, np.int32)))[0][:length]


def _exact_sum(shares: jax.Array, lengths: Sequence[int], weights: Weights) -> jax.Array:
    """The same in pairs of float32: some ten times the arithmetic."""
    ends = jnp.asarray(np.cumsum(lengths), jnp.int32)
    tensor = jnp.searchsorted(ends, lax.iota(jnp.int32, shares.shape[1]), side="right")

    def spread(column: jax.Array) -> jax.Array:
        return column[tensor]

    def add(k: jax.Array, total: Pair) -> Pair:
        one = shares[k].astype(jnp.float32)
        return plus(total, times(Pair(spread(weights.high[:, k]), spread(weights.low[:, k])), Pair(one, zeros)))

    zeros = jnp.zeros(shares.shape[1], jnp.float32)
    total = lax.fori_loop(0, len(shares), add, Pair(zeros, zeros))
    return ((total.high + total.low) * spread(power_of_two(weights.top))).astype(shares.dtype)
