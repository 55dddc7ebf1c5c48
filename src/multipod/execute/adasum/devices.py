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

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from multipod.errors import LayoutError
from multipod.execute.adasum import double_float
from multipod.execute.adasum.double_float import DoubleFloat
from multipod.execute.adasum.shares import BlockArithmetic, DtypeGroup, choose_arithmetic, dot_shares, sum_shares
from multipod.execute.adasum.weights import GramWeights, find_tree_weights
from multipod.execute.bucketing import ends, share_shape, structure_of, to_rows
from multipod.pytrees import Grads, Specs

MOST = 128
"""Vectors that the Gram form takes. The p x p dots of each tensor, and their p products an element, grow with p."""


class AdasumReport(NamedTuple):
    """What a combination tells of each tensor, in the order of `jax.tree.leaves`; the same on every device.

    Attributes:
      orthogonality: float32 [tensors]: |combined|^2 / sum |g_i|^2; 1 if all are orthogonal, 1/p if all are equal.
      poisoned: bool [devices, tensors]: whose tensor is not finite. It is NaN on every device then.
    """

    orthogonality: jax.Array
    poisoned: jax.Array


def combine_tree(
    tree: Grads,
    specs: Specs,
    axes: Mapping[str, int],
    leaves: Sequence[int],
    inside: Sequence[str] = (),
    arithmetic: BlockArithmetic | None = None,
) -> tuple[Grads, AdasumReport]:
    """Adasum of `tree` over the devices, tensor by tensor, each tensor split as its `PartitionSpec` says.

    Tensors whose spec splits nothing end whole on every device. Costs the bytes of a reduce-scatter (and an
    all-gather, if nothing is split), p multiplications an element for the dots and p for the sum.

    Args:
      tree: this device's tensors, of floating dtypes. Float64 is combined with the weights of its float32 values.
      specs: as for `reduce_scatter_tree`.
      axes: (name to size, in row-major order) the devices.
      leaves: of the binary tree, rank or -1 (`multipod.collectives.adasum.leaves`); of nodes, with `inside`.
      inside: the last of the axes, within which vectors are averaged first: a node. Adasum is between the nodes.
      arithmetic: how long tensors are dotted and summed; None: as suits the devices that this is traced for.

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
        return tree, AdasumReport(jnp.zeros(0), jnp.zeros((math.prod(axes.values()), 0), bool))
    groups, exponents, poisoned = _exchange(tensors, tensor_specs, axes, outer, tuple(inside))
    arithmetic = arithmetic or choose_arithmetic()
    gram = double_float.concatenate([dot_shares(group, arithmetic) for group in groups])
    order = [k for group in groups for k in group.tensors]
    weights = _find_weights(gram, exponents[np.array(order)], names, leaves)
    combined = list(tensors)
    begin = 0
    for group in groups:
        end = begin + len(group.tensors)
        for k, share in zip(group.tensors, sum_shares(group, weights.at(begin, end), arithmetic), strict=True):
            combined[k] = share
        begin = end
    gathered = _gather_unsplit(combined, tensors, tensor_specs, axes)
    return structure.unflatten(gathered), AdasumReport(weights.orthogonality[np.argsort(order)], poisoned)


def _exchange(
    tensors: list[jax.Array],
    specs: list[PartitionSpec],
    axes: Mapping[str, int],
    outer: tuple[str, ...],
    inside: tuple[str, ...],
) -> tuple[list[DtypeGroup], jax.Array, jax.Array]:
    """Gives each device its share of all vectors.

    Returns the tensors by dtype; their exponents, int32 [tensors, p]; whose are not finite, bool [devices, tensors].
    """
    names = tuple(axes)
    devices, p = math.prod(axes.values()), math.prod(axes[name] for name in outer)
    largest = jnp.stack([jnp.max(jnp.abs(t), initial=0).astype(jnp.float32) for t in tensors])
    largest = lax.all_gather(largest, names)  # [devices, tensors]
    poisoned = ~jnp.isfinite(largest)
    exponents = double_float.exponent_of(
        largest.reshape(p, -1, len(tensors)).max(1)
    )  # of the vectors: one for all of a node
    mine = exponents[lax.axis_index(outer) if outer else 0]
    groups = []
    for dtype in sorted({str(tensor.dtype) for tensor in tensors}):
        chosen = [k for k, tensor in enumerate(tensors) if str(tensor.dtype) == dtype]
        rows = [
            _cut_shares(tensors[k] * double_float.power_of_two(-mine[k]).astype(dtype), specs[k], axes) for k in chosen
        ]
        matrix = jnp.concatenate(rows, axis=1)
        if inside:
            matrix = matrix.reshape(p, devices // p, -1) / (devices // p)
            matrix = lax.psum_scatter(matrix, inside, scatter_dimension=1)
        matrix = lax.all_to_all(matrix, outer, 0, 0, tiled=True) if outer else matrix
        groups.append(DtypeGroup(chosen, [row.shape[1] for row in rows], matrix))
    return groups, exponents.T, poisoned


def _is_split(spec: PartitionSpec) -> bool:
    return any(names is not None for names in spec)


def _cut_shares(tensor: jax.Array, spec: PartitionSpec, axes: Mapping[str, int]) -> jax.Array:
    """[devices, share] of a tensor; one that is not split is padded with zeros, which change no dot."""
    if _is_split(spec):
        return to_rows(tensor, spec, dict(axes))
    devices = math.prod(axes.values())
    return jnp.pad(tensor.ravel(), (0, -tensor.size % devices)).reshape(devices, -1)


def _gather_unsplit(
    combined: list[jax.Array], tensors: list[jax.Array], specs: list[PartitionSpec], axes: Mapping[str, int]
) -> list[jax.Array]:
    """The shares in the shapes of their specs; unsplit ones gathered, in one message for each dtype."""
    results = list(combined)
    for k, spec in enumerate(specs):
        if _is_split(spec):
            results[k] = combined[k].reshape(share_shape(tensors[k].shape, spec, dict(axes)))
    unsplit = [k for k, spec in enumerate(specs) if not _is_split(spec)]
    for dtype in sorted({str(tensors[k].dtype) for k in unsplit}):
        chosen = [k for k in unsplit if str(tensors[k].dtype) == dtype]
        rows = lax.all_gather(jnp.concatenate([combined[k] for k in chosen]), tuple(axes))
        parts = jnp.split(rows, ends([combined[k].shape for k in chosen]), axis=1)
        for k, part in zip(chosen, parts, strict=True):
            results[k] = part.ravel()[: tensors[k].size].reshape(tensors[k].shape)
    return results


def _find_weights(
    dots: DoubleFloat, exponents: jax.Array, names: tuple[str, ...], leaves: Sequence[int]
) -> "GramWeights":
    """Finds the weights of the normalised vectors from the dots of this device's shares.

    Each device adds the dots of some tensors and finds their weights; an all-gather then gives all devices all weights.
    """
    devices, tensors = lax.axis_size(names), len(exponents)
    padding = -tensors % devices
    each = (tensors + padding) // devices

    def exchange(part: jax.Array) -> jax.Array:
        part = jnp.pad(part, ((0, padding), (0, 0), (0, 0)))
        return lax.all_to_all(part, names, 0, 0, tiled=True).reshape(devices, each, *part.shape[1:])

    gram = double_float.sum_first_axis(dots.map(exchange))
    first = lax.axis_index(names) * each
    exponents = lax.dynamic_slice_in_dim(jnp.pad(exponents, ((0, padding), (0, 0))), first, each)
    mine = find_tree_weights(gram, exponents, leaves)
    columns = jnp.stack([mine.top.astype(jnp.float32), mine.orthogonality, mine.loss], 1)
    table = lax.all_gather(jnp.concatenate([columns, mine.high, mine.low], 1), names)
    table = table.reshape(devices * each, -1)[:tensors]
    high, low = jnp.split(table[:, 3:], 2, axis=1)
    return GramWeights(high, low, table[:, 0].astype(jnp.int32), table[:, 1], table[:, 2])
