"""Adasum's weights on JAX devices: from the dots of normalised vectors, in double floats, up the binary tree."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.execute.adasum import double_float
from multipod.execute.adasum.double_float import DoubleFloat

CANCELLED = 2.0**-40
"""Squared lengths of this share of what went in count as none: they are rounding errors of the pairs."""


class GramWeights(NamedTuple):
    """The weights of each tensor's vectors: the combination is 2^top sum_i (high + low)[i] normalised[i].

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

    def at(self, begin: int, end: int) -> "GramWeights":
        """Selects the weights of the tensors `begin` to `end - 1`."""
        return GramWeights(*(column[begin:end] for column in self))


def find_tree_weights(gram: DoubleFloat, exponents: jax.Array, leaves: Sequence[int]) -> GramWeights:
    """Finds the weights of normalised vectors from their dots: `operator.gram_weights` in double floats.

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
    gram = gram.map(lambda part: jnp.where(both, part[:, taken][:, :, taken], 0))
    exponents = jnp.where(there, exponents[:, taken], double_float.NOTHING)
    ones, zeros = jnp.ones(exponents.shape), jnp.zeros(exponents.shape)
    lengths = jnp.sqrt(jnp.maximum(_diagonal(gram).high, 0))
    nodes = _Nodes(gram, exponents, jnp.asarray(there, jnp.float32), lengths)
    begin = nodes, DoubleFloat(ones, zeros), jnp.arange(len(ranks))

    def level(_: int, carry: tuple[_Nodes, DoubleFloat, jax.Array]) -> tuple[_Nodes, DoubleFloat, jax.Array]:
        nodes, weights, node_of_leaf = carry
        above, factor = _climb(nodes)
        return above, double_float.multiply(weights, factor.map(lambda part: part[:, node_of_leaf])), node_of_leaf // 2

    levels = len(ranks).bit_length() - 1
    top, weights, _ = lax.fori_loop(0, levels, level, begin) if levels else begin
    squared, exponent = top.gram.high[:, 0, 0], top.exponent[:, 0]
    together = jnp.square(lengths * double_float.power_of_two(exponents - exponent[:, None])).sum(1)
    orthogonality = jnp.where(together > 0, squared / jnp.where(together > 0, together, 1), 1.0)
    went_in = (jnp.abs(weights.high) * lengths).sum(1)
    length = jnp.maximum(jnp.sqrt(jnp.maximum(squared, 0)), jnp.finfo(jnp.float32).tiny)
    order = np.argsort(ranks)[len(ranks) - there.sum() :]
    return GramWeights(
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

    gram: DoubleFloat
    exponent: jax.Array
    leaves: jax.Array
    size: jax.Array


def _climb(nodes: _Nodes) -> tuple[_Nodes, DoubleFloat]:
    """Returns the nodes one level up, and the factor of each node in the one above it."""
    gram, exponent, leaves, size = nodes
    half = len(leaves) // 2
    squared = _diagonal(gram)
    none = squared.high <= CANCELLED * jnp.square(size)
    top = jnp.maximum(exponent[:, ::2], exponent[:, 1::2])
    scale = double_float.power_of_two(exponent - jnp.repeat(top, 2, axis=1))
    zeros = jnp.zeros_like(scale)
    dot = gram.map(lambda part: jnp.repeat(jnp.diagonal(part[:, ::2, 1::2], axis1=1, axis2=2), 2, axis=1))
    ratio = double_float.divide(dot, double_float.where(none, DoubleFloat(zeros + 1, zeros), squared))
    together = jnp.repeat(jnp.maximum(leaves[::2] + leaves[1::2], 1), 2)
    share = double_float.divide(DoubleFloat(zeros + leaves, zeros), DoubleFloat(zeros + together, zeros))
    less = double_float.multiply(double_float.multiply(share, ratio), DoubleFloat(_swap_siblings(scale), zeros))
    plain = DoubleFloat(scale, zeros)
    factor = double_float.where(none, plain, double_float.add(plain, double_float.negate(less)))
    size = jnp.abs(factor.high) * size
    return _Nodes(
        _merge_nodes(gram, factor).map(lambda part: jnp.pad(part, ((0, 0), (0, half), (0, half)))),
        jnp.pad(top, ((0, 0), (0, half)), constant_values=double_float.NOTHING),
        jnp.pad(leaves[::2] + leaves[1::2], (0, half)),
        jnp.pad(size[:, ::2] + size[:, 1::2], ((0, 0), (0, half))),
    ), factor


def _diagonal(gram: DoubleFloat) -> DoubleFloat:
    return gram.map(lambda part: jnp.diagonal(part, axis1=1, axis2=2))


def _swap_siblings(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1, 2)[:, :, ::-1].reshape(x.shape)


def _merge_nodes(gram: DoubleFloat, factor: DoubleFloat) -> DoubleFloat:
    """Finds the dots of the nodes above, each the sum of two nodes with their factors."""
    for axis in (1, 2):
        scaled = _scale_along(gram, factor, axis)
        gram = double_float.add(_take_every_second(scaled, axis, 0), _take_every_second(scaled, axis, 1))
    return gram


def _scale_along(gram: DoubleFloat, factor: DoubleFloat, axis: int) -> DoubleFloat:
    along = factor.map(lambda part: jnp.expand_dims(part, 3 - axis))
    return double_float.multiply(gram, along.map(lambda part: jnp.broadcast_to(part, gram.high.shape)))


def _take_every_second(numbers: DoubleFloat, axis: int, first: int) -> DoubleFloat:
    places = (*(slice(None),) * axis, slice(first, None, 2))
    return numbers.map(lambda part: part[places])
