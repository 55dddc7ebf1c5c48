"""Gradient bucketing: small tensors of one dtype travel as one vector, large ones as they are.

The upper half of the seam: a `Combine` takes the gradients that each device has computed from its share of the batch
and returns what the update needs, whole or scattered.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from multipod.execute.sums import VectorSum
from multipod.pytrees import Grads, Pytree, Specs

Shape = Sequence[int]
Combine = Callable[[Grads], Grads]


def all_reduce_tree(tree: Pytree, total: VectorSum, devices: int) -> Pytree:
    """Sums `tree` over the devices, whole on each: one message for each dtype, one for each large tensor."""

    def summed(leaves: list[jax.Array]) -> list[jax.Array]:
        vector = jnp.concatenate([leaf.ravel() for leaf in leaves])
        padding = -len(vector) % devices
        vector = total.all_reduce(jnp.pad(vector, (0, padding)) if padding else vector)
        return _cut(vector, [leaf.shape for leaf in leaves])

    return _in_messages(summed, total.alone_bytes, tree)


def reduce_scatter_tree(tree: Pytree, specs: Specs, axes: dict[str, int], total: VectorSum) -> Pytree:
    """Sums `tree` over the devices, each tensor split as its `PartitionSpec` says.

    Tensors whose spec splits nothing are summed whole. The others must be split over all `axes`
    (name to size, in row-major order).
    """
    devices = math.prod(axes.values())

    def summed(leaves: list[jax.Array], leaf_specs: list[PartitionSpec]) -> list[jax.Array]:
        rows = [to_rows(leaf, spec, axes) for leaf, spec in zip(leaves, leaf_specs, strict=True)]
        share = total.reduce_scatter(jnp.concatenate(rows, axis=1).ravel())
        shapes = [share_shape(leaf.shape, spec, axes) for leaf, spec in zip(leaves, leaf_specs, strict=True)]
        return _cut(share, shapes)

    split = partial(_in_messages, summed, total.alone_bytes)
    return _split_and_unsplit(split, lambda unsplit: all_reduce_tree(unsplit, total, devices), tree, specs)


def all_gather_tree(tree: Pytree, specs: Specs, axes: dict[str, int], total: VectorSum) -> Pytree:
    """Gathers whole tensors from the shares that `reduce_scatter_tree` leaves; unsplit ones pass through."""
    devices = math.prod(axes.values())

    def gathered(leaves: list[jax.Array], leaf_specs: list[PartitionSpec]) -> list[jax.Array]:
        rows = total.all_gather(jnp.concatenate([leaf.ravel() for leaf in leaves])).reshape(devices, -1)
        parts = jnp.split(rows, ends([leaf.shape for leaf in leaves]), axis=1)
        return [_from_rows(p, leaf.shape, spec, axes) for p, leaf, spec in zip(parts, leaves, leaf_specs, strict=True)]

    # It is the whole tensors that are sent, so it is those that are large or small.
    alone = total.alone_bytes and total.alone_bytes // devices
    return _split_and_unsplit(partial(_in_messages, gathered, alone), lambda unsplit: unsplit, tree, specs)


def _in_messages(
    function: Callable[..., list[jax.Array]], alone_bytes: int | None, tree: Pytree, *others: Pytree
) -> Pytree:
    """Applies `function` to each large leaf, and to the others of each dtype at once, with those of `others`."""
    leaves, structure = jax.tree.leaves(tree), structure_of(tree)
    rows = list(zip(leaves, *(structure.flatten_up_to(other) for other in others), strict=True))
    results: list[Any] = [None] * len(leaves)
    for members in _messages(leaves, alone_bytes):
        columns = [list(column) for column in zip(*(rows[k] for k in members), strict=True)]
        for k, result in zip(members, function(*columns), strict=True):
            results[k] = result
    return structure.unflatten(results)


def _messages(leaves: Sequence[jax.Array], alone_bytes: int | None) -> list[list[int]]:
    """Finds which leaves travel together: their numbers, for each message."""
    large = [k for k, leaf in enumerate(leaves) if alone_bytes and leaf.nbytes >= alone_bytes]
    small = [k for k in range(len(leaves)) if k not in set(large)]
    dtypes = sorted({str(leaves[k].dtype) for k in small})
    return [*([k] for k in large), *([k for k in small if str(leaves[k].dtype) == dtype] for dtype in dtypes)]


def _split_and_unsplit(split: Callable[..., list[jax.Array]], unsplit: Combine, tree: Pytree, specs: Specs) -> Pytree:
    """Sends the leaves that their spec splits through `split`, with their specs, and the rest through `unsplit`."""
    leaves, structure = jax.tree.leaves(tree), structure_of(tree)
    leaf_specs = structure.flatten_up_to(specs)
    is_split = [any(names is not None for names in spec) for spec in leaf_specs]
    parted_specs = [spec for spec, yes in zip(leaf_specs, is_split, strict=True) if yes]
    parted = iter(split([leaf for leaf, yes in zip(leaves, is_split, strict=True) if yes], parted_specs))
    rest = iter(unsplit([leaf for leaf, yes in zip(leaves, is_split, strict=True) if not yes]))
    return structure.unflatten([next(parted) if yes else next(rest) for yes in is_split])


def structure_of(tree: Pytree) -> Any:
    """Returns the structure of a tree: what `unflatten` needs beside the leaves."""
    return jax.tree.structure(tree)  # JAX gives this class no types


def ends(shapes: Sequence[Shape]) -> list[int]:
    """Where each but the last of these shapes ends in one flat vector of them all."""
    return list(itertools.accumulate(map(math.prod, shapes)))[:-1]


def _cut(vector: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Cuts `vector` into consecutive pieces of these shapes; what is left over is padding."""
    pieces = jnp.split(vector[: sum(map(math.prod, shapes))], ends(shapes))
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _parts(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    names = spec[dim] if dim < len(spec) else None
    return (names,) if isinstance(names, str) else tuple(names or ())


def share_shape(shape: Shape, spec: PartitionSpec, axes: dict[str, int]) -> tuple[int, ...]:
    """The shape of one device's share of a tensor of `shape` split as `spec` says."""
    return tuple(n // math.prod(axes[a] for a in _parts(spec, d)) for d, n in enumerate(shape))


def _dims(share: Shape, spec: PartitionSpec, axes: dict[str, int]) -> tuple[list[int], list[int]]:
    """A tensor's shape with each split dim opened into (its axes..., rest), and the order that puts axes first."""
    opened: list[int] = []
    dim_of: dict[str, int] = {}
    rest: list[int] = []
    for dim, n in enumerate(share):
        for axis in _parts(spec, dim):
            dim_of[axis] = len(opened)
            opened.append(axes[axis])
        rest.append(len(opened))
        opened.append(n)
    return opened, [*(dim_of[axis] for axis in axes), *rest]


def to_rows(tensor: jax.Array, spec: PartitionSpec, axes: dict[str, int]) -> jax.Array:
    """[devices, share]: row r holds what the device with row-major number r owns of `tensor`."""
    opened, order = _dims(share_shape(tensor.shape, spec, axes), spec, axes)
    return tensor.reshape(opened).transpose(order).reshape(math.prod(axes.values()), -1)


def _from_rows(rows: jax.Array, share: Shape, spec: PartitionSpec, axes: dict[str, int]) -> jax.Array:
    """The inverse of `to_rows`, given the shape of one share."""
    opened, order = _dims(share, spec, axes)
    back = sorted(range(len(order)), key=order.__getitem__)
    shape = [n * math.prod(axes[a] for a in _parts(spec, d)) for d, n in enumerate(share)]
    return rows.reshape([opened[k] for k in order]).transpose(back).reshape(shape)
