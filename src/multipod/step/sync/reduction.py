"""Sums trees of gradients over the data axes, and gathers weights, in the messages that a layout asks for."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from multipod.execute.bucketing import all_gather_tree, reduce_scatter_tree
from multipod.execute.sums import SUMS, VectorSum, build_scheduled_sum, sum_in_tile_first
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout
from multipod.layout.mesh import data_axes, inner_axes, names_of, only, topology_of
from multipod.pytrees import Grads, Params, Pytree, Specs
from multipod.step.specs import flat_specs, is_spec, specs_of

SUM_SCOPE = "gradient_sum"
"""In the names of a program's operations, for profiles and for the planner: those that sum and gather here."""


@dataclass(frozen=True)
class SumGroup:
    """Tensors that are summed over the same axes.

    Attributes:
      places: theirs among the leaves of the tree, in the order in which they are sent.
      axes: names and sizes.
      total: the way of summing vectors over the axes.
    """

    places: tuple[int, ...]
    axes: dict[str, int]
    total: VectorSum


@dataclass(frozen=True)
class Reduction:
    """Sums and gathers trees inside `over_data`, where dims may still be split over the inner axes of the mesh.

    Attributes:
      layout: who adds, in which type and in how large messages.
      shares: how a sum lies, and what is gathered from, a `Share` for each tensor: `base` with data axes added, or
        `base` itself.
      base: how the inner axes split each tensor, and the data axes over which it is another tensor on each device, as
        experts are.
      order: the places of the leaves in the order in which they are summed; empty is the order of the leaves.
    """

    layout: Layout
    mesh: Mesh | AbstractMesh
    shares: Pytree
    base: Specs
    order: tuple[int, ...] = ()

    @cached_property
    def specs(self) -> Specs:
        """How the mesh splits each tensor as `shares` keeps it."""
        return specs_of(self.shares)

    @jax.named_scope(SUM_SCOPE)
    def sum(self, tree: Grads) -> Grads:
        """The sum of `tree` over the data axes, each tensor kept as `shares` says."""
        total = self._on_parts(self._sum, self.base, self.specs)(_cast(tree, self.layout.sync.sum_dtype))
        return jax.tree.map(lambda part, leaf: part.astype(leaf.dtype), total, tree)

    @jax.named_scope(SUM_SCOPE)
    def gather(self, tree: Params) -> Params:
        """Tensors whole over the data axes, of what `shares` says is kept, in the sync's `gather_dtype`."""
        return self._on_parts(self._gather, self.specs, self.base)(_cast(tree, self.layout.sync.gather_dtype))

    def of(self, places: Sequence[int]) -> "Reduction":
        """The reduction of a list of some tensors alone."""
        shares, base = jax.tree.leaves(self.shares), flat_specs(self.base)
        return Reduction(self.layout, self.mesh, [shares[k] for k in places], [base[k] for k in places])

    def gather_for_use(self, shares: list[jax.Array]) -> list[jax.Array]:
        """`gather`, whose derivative sums the gradients of whole weights to gradients of shares."""
        dtypes = [share.dtype for share in shares]

        def backward(_: None, gradients: list[jax.Array]) -> tuple[list[jax.Array]]:
            # They come in the type that the weights were gathered in, and are summed in that of what is kept.
            wide = [gradient.astype(dtype) for gradient, dtype in zip(gradients, dtypes, strict=True)]
            return (self.sum(wide),)

        gathered = jax.custom_vjp(self.gather)
        gathered.defvjp(lambda shares: (self.gather(shares), None), backward)
        return gathered(shares)

    @cached_property
    def groups(self) -> tuple[SumGroup, ...]:
        """The tensors by the axes that they are summed over, those of fewer axes first.

        A tensor that `base` splits over a data axis is another on every device of that axis: it is not summed over it.
        """
        base = flat_specs(self.base)
        sizes = {axis: self.mesh.shape[axis] for axis in data_axes(self.mesh)}
        by_axes: dict[tuple[str, ...], list[int]] = {}
        for k in self.order or range(len(base)):
            by_axes.setdefault(tuple(axis for axis in sizes if axis not in names_of(base[k])), []).append(k)
        return tuple(
            SumGroup(tuple(places), {axis: sizes[axis] for axis in axes}, vector_sum(self.layout, self.mesh, axes))
            for axes, places in sorted(by_axes.items(), key=lambda group: len(group[0]))
        )

    def _sum(self, tree: Grads) -> Grads:
        def in_buckets(group: SumGroup, tensors: list[jax.Array], specs: Specs) -> Iterator[jax.Array]:
            for bucket in buckets([tensor.nbytes for tensor in tensors], self.layout.sync.bucket_bytes):
                part = slice(bucket.start, bucket.stop)
                yield from reduce_scatter_tree(tensors[part], specs[part], group.axes, group.total)

        flat = jax.tree.map(lambda share, tensor: share.local.flatten(tensor), self.shares, tree)
        return self._by_group(flat, in_buckets, lambda places: places)

    def _gather(self, tree: Params) -> Params:
        def whole(group: SumGroup, tensors: list[jax.Array], specs: Specs) -> list[jax.Array]:
            return all_gather_tree(tensors, specs, group.axes, group.total)

        flat = self._by_group(tree, whole, sorted)
        return jax.tree.map(lambda share, kept: share.local.unflatten(kept), self.shares, flat)

    def _by_group(self, tree: Pytree, function: Callable[..., Any], order: Callable[..., Sequence[int]]) -> Pytree:
        """Sends each group's tensors through `function`, with what `specs` says of its axes."""
        leaves, specs = jax.tree.leaves(tree), flat_specs(self.specs)
        structure: Any = jax.tree.structure(tree)
        for group in self.groups:
            places = order(group.places)
            across = [only(specs[k], group.axes) for k in places]
            for k, result in zip(places, function(group, [leaves[k] for k in places], across), strict=True):
                leaves[k] = result
        return structure.unflatten(leaves)

    def _on_parts(
        self, function: Callable[[Pytree], Pytree], before: Specs, after: Specs
    ) -> Callable[[Pytree], Pytree]:
        """`function` on each device's part of tensors that the inner axes of the mesh split as `before` says.

        Without it a tensor would be gathered over those axes before it is packed into a message.
        """
        inner = inner_axes(self.mesh)
        if not any(set(names_of(spec)) & set(inner) for spec in flat_specs(self.base)):
            return function
        given, made = (
            jax.tree.map(lambda spec: only(spec, inner), specs, is_leaf=is_spec) for specs in (before, after)
        )
        return jax.shard_map(function, in_specs=(given,), out_specs=made, axis_names=set(inner), check_vma=False)


def vector_sum(layout: Layout, mesh: Mesh | AbstractMesh, axes: Sequence[str] = DATA_AXES) -> VectorSum:
    """The way of summing vectors over `axes` that `layout` names; XLA's where it names no sum (`COMBINATIONS`).

    Over an axis inside the tiles, as `expert`, the sum goes first, within each tile: the tiles then exchange a share.
    """
    inside = tuple(axis for axis in axes if axis not in DATA_AXES)
    if layout.sync.combines:
        total = SUMS["xla"](DATA_AXES)
    elif layout.sync.gradient_sum in SUMS:
        total = SUMS[layout.sync.gradient_sum](DATA_AXES)
    else:
        total = build_scheduled_sum(layout.sync.gradient_sum, topology_of(layout, mesh), DATA_AXES)
    return sum_in_tile_first(total, inside, math.prod(mesh.shape[axis] for axis in DATA_AXES)) if inside else total


def buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive runs of tensors with `sizes` bytes: each as long as it stays within `limit`; 0 is no limit.

    A tensor of more than that is a run of its own.
    """
    runs, first, nbytes = [], 0, 0
    for place, size in enumerate(sizes):
        if limit and place > first and nbytes + size > limit:
            runs.append(range(first, place))
            first, nbytes = place, 0
        nbytes += size
    return [*runs, range(first, len(sizes))] if sizes else []


def _cast(tree: Pytree, dtype: str) -> Pytree:
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )
