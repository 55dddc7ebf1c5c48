"""How gradients travel: local gradients in, what the update needs out, and the way back for the weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multipod.execute.sums import SUMS, VectorSum, scheduled
from multipod.execute.trees import Combine, all_gather_tree, reduce_scatter_tree
from multipod.layout.layout import DATA_AXES, Layout
from multipod.layout.mesh import data_sizes, is_split, topology_of, update_spec


@dataclass(frozen=True)
class GradientPath:
    """The replaceable part of a step: what happens to gradients between the devices.

    Attributes:
      combine: inside `shard_map`; each device's gradients to their sum, split as `specs` says.
      gather: outside; a tree of global arrays split as `specs` says to the same tree, whole on every device.
      specs: the `PartitionSpec` of each parameter during the update.
    """

    combine: Combine
    gather: Combine
    specs: Any


def gradient_path(layout: Layout, mesh: Mesh, params: Any) -> GradientPath:
    """The path that `layout` names, for parameters of these shapes."""
    axes = dict(zip(DATA_AXES, data_sizes(mesh), strict=True))
    specs = update_specs(layout, mesh, params)
    total = vector_sum(layout, mesh)
    combine = partial(reduce_scatter_tree, specs=specs, axes=axes, total=total)
    whole = partial(all_gather_tree, specs=specs, axes=axes, total=total)
    gather: Combine = over_data(whole, mesh, (specs,), PartitionSpec())
    if not any(map(is_split, jax.tree.leaves(specs, is_leaf=_is_spec))):
        gather = _unchanged
    return GradientPath(combine, gather, specs)


def vector_sum(layout: Layout, mesh: Mesh) -> VectorSum:
    """The way of summing vectors that `layout` names, for this mesh."""
    if layout.gradient_sum in SUMS:
        return SUMS[layout.gradient_sum](DATA_AXES)
    return scheduled(layout.gradient_sum, topology_of(layout, mesh), DATA_AXES)


def update_specs(layout: Layout, mesh: Mesh, tree: Any) -> Any:
    """The `PartitionSpec` that each tensor of `tree` (parameters or optimizer state) has during the update."""
    if not layout.shard_update:
        return jax.tree.map(lambda _: PartitionSpec(), tree)
    return jax.tree.map(lambda leaf: update_spec(leaf.shape, data_sizes(mesh)), tree)


def over_data(function: Any, mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any) -> Any:
    """`function` in `jax.shard_map`, manual over the data axes and automatic over all others.

    Replication is not checked (`check_vma`): sums written as schedules of sends end equal on every
    device, which no type can tell. Tests compare them with `psum` instead.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(DATA_AXES),
        check_vma=False,
    )


def constrain(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """`tree` with its tensors split as `specs` says, inside `jax.jit`."""
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)), tree, specs
    )


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _unchanged(tree: Any) -> Any:
    return tree
