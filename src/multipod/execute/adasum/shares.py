"""Dots and weighted sums of the shares that a device holds of all vectors, in float32 that is exact where it matters.

Long tensors are cut into blocks, whose products one matrix product adds up in float32. Short ones, over which rounding
errors do not average, are done in double floats, and so are sums that cancel.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.execute.adasum import double_float
from multipod.execute.adasum.double_float import DoubleFloat
from multipod.execute.adasum.weights import GramWeights
from multipod.execute.target import target_platform

BLOCK = 1024
"""Elements whose products one matrix product adds up, in float32; the sums of blocks are added as pairs. The errors of
blocks are independent, so those of a long tensor vanish: 4e-9 of the dots of 2^20 normal numbers."""

EXACT = 256
"""Shares of no more elements have no blocks over which errors could average: their products are taken as pairs."""

LOSS = 16.0
"""Where a sum cancels by more, it is done in pairs too: else its error would pass 1e-6."""

EXACT_PRODUCTS = 1 << 22
"""At most so many of them, on a device: 32 MiB."""


class DtypeGroup(NamedTuple):
    """Tensors of one dtype: their numbers, the lengths of this device's shares, and all vectors' shares, normalised.

    `shares` is [p, sum of lengths].
    """

    tensors: list[int]
    lengths: list[int]
    shares: jax.Array


class BlockArithmetic(Protocol):
    """What the platform decides: how long tensors are dotted and summed, block by block or all at once."""

    def dot(self, shares: jax.Array, blocks: jax.Array) -> jax.Array:
        """float32 [blocks, p, p]: the dots of blocks, each (where it is read, its first and its last + 1 element)."""
        ...

    def sum(self, shares: jax.Array, lengths: Sequence[int], weights: GramWeights) -> jax.Array:
        """The combinations, one after the other, summed in float32 or the tensors' wider dtype."""
        ...


class LoopedBlocks:
    """Block by block, for CPU devices: a loop costs nothing there, and `shares` are not copied.

    Each matrix product of another shape takes a tenth of a second to compile there.
    """

    def dot(self, shares: jax.Array, blocks: jax.Array) -> jax.Array:
        """Dots one block after the other; see `BlockArithmetic`."""
        return lax.map(lambda row: _dot_block(_read_block(shares, row)), blocks)

    def sum(self, shares: jax.Array, lengths: Sequence[int], weights: GramWeights) -> jax.Array:
        """Sums one block after the other; see `BlockArithmetic`."""
        scales = _scales_of(shares, weights)
        length, shares = shares.shape[1], _pad_to_block(shares)
        begins = [0, *itertools.accumulate(lengths)]
        rows = [
            (*block, k)
            for k, size in enumerate(lengths)
            for block in _cut_blocks(begins[k], size, shares.shape[1])
            if size
        ]

        def add_block(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            place = row[0] + lax.iota(jnp.int32, BLOCK)
            part = lax.dynamic_slice_in_dim(shares, row[0], BLOCK, 1)
            new = _weigh(part, *(column[row[3]] for column in scales))
            old = lax.dynamic_slice_in_dim(total, row[0], BLOCK)
            new = jnp.where((place >= row[1]) & (place < row[2]), new, old)
            return lax.dynamic_update_slice_in_dim(total, new, row[0], 0), None

        total = jnp.zeros(shares.shape[1], shares.dtype)
        if not rows:
            return total[:length]
        return lax.scan(add_block, total, jnp.asarray(np.array(rows, np.int32)))[0][:length]


class BatchedBlocks:
    """All blocks in one matrix product, and each tensor in one sum, for accelerators."""

    def dot(self, shares: jax.Array, blocks: jax.Array) -> jax.Array:
        """Dots all blocks at once; see `BlockArithmetic`."""
        return _dot_block(jax.vmap(lambda row: _read_block(shares, row))(blocks))

    def sum(self, shares: jax.Array, lengths: Sequence[int], weights: GramWeights) -> jax.Array:
        """Sums tensor by tensor; see `BlockArithmetic`."""
        scales = _scales_of(shares, weights)
        parts = jnp.split(shares, list(itertools.accumulate(lengths))[:-1], axis=1)
        return jnp.concatenate([_weigh(part, *(column[k] for column in scales)) for k, part in enumerate(parts)])


def choose_arithmetic() -> BlockArithmetic:
    """The arithmetic for the devices that the program is traced for."""
    return LoopedBlocks() if target_platform() == "cpu" else BatchedBlocks()


def dot_shares(group: DtypeGroup, arithmetic: BlockArithmetic) -> DoubleFloat:
    """[tensors, p, p]: the dots of this device's shares of each tensor."""
    lengths, shares = group.lengths, _pad_to_block(group.shares)
    long, short = _split_by_length(lengths, len(shares) ** 2)
    begins = [0, *itertools.accumulate(lengths)]
    blocks = [block for k in long for block in _cut_blocks(begins[k], lengths[k], shares.shape[1])]
    columns = [column for k in short for column in range(begins[k], begins[k + 1])]
    products = []
    if blocks:
        high = arithmetic.dot(shares, jnp.asarray(np.array(blocks, np.int32)))
        products.append(DoubleFloat(high, jnp.zeros_like(high)))
    if columns:
        few = shares[:, np.array(columns)].astype(jnp.float32).T
        products.append(double_float.two_product(few[:, :, None], few[:, None, :]))
    counts = [*(max(1, -(-lengths[k] // BLOCK)) for k in long), *(lengths[k] for k in short)]
    sums = double_float.sum_runs(double_float.concatenate(products), counts)
    return sums.map(lambda part: part[np.argsort([*long, *short])])


def sum_shares(group: DtypeGroup, weights: GramWeights, arithmetic: BlockArithmetic) -> list[jax.Array]:
    """The combination of each tensor's shares, in the tensors' dtype."""
    count = len(group.lengths)
    ends = [0, *itertools.accumulate(group.lengths)]
    long, short = _split_by_length(group.lengths, len(group.shares))
    combined: list[jax.Array] = [group.shares[0]] * count
    for tensors in (short, long):
        if not tensors:
            continue
        columns = np.concatenate([np.arange(ends[k], ends[k + 1]) for k in tensors])
        chosen = GramWeights(*(column[np.array(tensors)] for column in weights))
        lengths = [group.lengths[k] for k in tensors]
        shares = group.shares if len(tensors) == count else group.shares[:, columns]
        if tensors is short:
            total = _sum_exactly(shares, lengths, chosen)
        else:
            total = _sum_by_loss(shares, lengths, chosen, arithmetic)
        for k, part in zip(tensors, jnp.split(total, list(itertools.accumulate(lengths))[:-1]), strict=True):
            combined[k] = part
    return combined


def _split_by_length(lengths: Sequence[int], products: int) -> tuple[list[int], list[int]]:
    """The numbers of long and of short tensors, of which an element takes so many products.

    All count as long where the short ones together would take more than `EXACT_PRODUCTS`.
    """
    short = [k for k, length in enumerate(lengths) if 0 < length <= EXACT]
    if products * sum(lengths[k] for k in short) > EXACT_PRODUCTS:
        short = []
    return [k for k in range(len(lengths)) if k not in set(short)], short


def _pad_to_block(shares: jax.Array) -> jax.Array:
    """Pads shares with zeros to at least one block."""
    missing = max(BLOCK - shares.shape[1], 0)
    return jnp.pad(shares, ((0, 0), (0, missing))) if missing else shares


def _cut_blocks(begin: int, length: int, width: int) -> list[tuple[int, int, int]]:
    """The blocks of a tensor at `begin`: where each is read, the first and the last + 1 of its elements."""
    lows = range(begin, begin + max(length, 1), BLOCK)
    return [(min(low, width - BLOCK), low, min(low + BLOCK, begin + length)) for low in lows]


def _read_block(shares: jax.Array, row: jax.Array) -> jax.Array:
    """[p, BLOCK] in float32, with zeros for other tensors' elements."""
    place = row[0] + lax.iota(jnp.int32, BLOCK)
    part = lax.dynamic_slice_in_dim(shares, row[0], BLOCK, 1).astype(jnp.float32)
    return jnp.where((place >= row[1]) & (place < row[2]), part, 0)


def _dot_block(part: jax.Array) -> jax.Array:
    return jnp.einsum("...ib,...jb->...ij", part, part, precision=lax.Precision.HIGHEST)


def _scales_of(shares: jax.Array, weights: GramWeights) -> tuple[jax.Array, jax.Array]:
    """The weights, and the powers of two behind them, in the dtype in which shares are summed."""
    wide = jnp.promote_types(shares.dtype, jnp.float32)
    return weights.high.astype(wide), double_float.power_of_two(weights.top).astype(wide)


def _weigh(part: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """The weighted sum of `part` [p, elements], rounded once to its dtype."""
    total = jnp.einsum("p,ps->s", weight, part.astype(weight.dtype), precision=lax.Precision.HIGHEST)
    return (total * scale).astype(part.dtype)


def _sum_by_loss(
    shares: jax.Array, lengths: Sequence[int], weights: GramWeights, arithmetic: BlockArithmetic
) -> jax.Array:
    """The combinations, exactly where one of them cancels."""
    return lax.cond(
        (weights.loss > LOSS).any(),
        lambda shares, weights: _sum_exactly(shares, lengths, weights),
        lambda shares, weights: arithmetic.sum(shares, lengths, weights),
        shares,
        weights,
    )


def _sum_exactly(shares: jax.Array, lengths: Sequence[int], weights: GramWeights) -> jax.Array:
    """The combinations in double floats: some ten times the arithmetic of `BlockArithmetic.sum`."""
    ends = jnp.asarray(np.cumsum(lengths), jnp.int32)
    tensor = jnp.searchsorted(ends, lax.iota(jnp.int32, shares.shape[1]), side="right")

    def spread(column: jax.Array) -> jax.Array:
        return column[tensor]

    def add_vector(k: jax.Array, total: DoubleFloat) -> DoubleFloat:
        vector = shares[k].astype(jnp.float32)
        weight = DoubleFloat(spread(weights.high[:, k]), spread(weights.low[:, k]))
        return double_float.add(total, double_float.multiply(weight, DoubleFloat(vector, zeros)))

    zeros = jnp.zeros(shares.shape[1], jnp.float32)
    total = lax.fori_loop(0, len(shares), add_vector, DoubleFloat(zeros, zeros))
    return ((total.high + total.low) * spread(double_float.power_of_two(weights.top))).astype(shares.dtype)
