"""How gradients travel: local gradients in, what the update needs out, and the way back for the weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multipod.collectives.adasum import leaves
from multipod.execute.adasum_jax import combine_tree
from multipod.execute.sums import SUMS, VectorSum, scheduled
from multipod.execute.trees import Combine, all_gather_tree, reduce_scatter_tree
from multipod.layout.layout import DATA_AXES, Layout
from multipod.layout.mesh import data_sizes, is_split, topology_of, update_spec
from multipod.topology.topology import Topology

Values = dict[str, jax.Array]


@dataclass(frozen=True)
class GradientPath:
    """The replaceable part of a step: what happens to gradients between the devices.

    Attributes:
      combine: inside `shard_map`; each device's gradients to their sum, split as `specs` says.
      gather: outside; a tree of global arrays split as `specs` says to the same tree, whole on every device.
      specs: the `PartitionSpec` of each parameter during the update.
      reported: `combine`, with what it found out; None if it finds out nothing.
    """

    combine: Combine
    gather: Combine
    specs: Any
    reported: Callable[[Any], tuple[Any, Values]] | None = None

    def combine_and_report(self, tree: Any) -> tuple[Any, Values]:
        """`combine(tree)`, and what it found out: the same on every device.

        `poisoned` is bool [devices, tensors], `orthogonality/NAME` a number.
        """
        return (self.combine(tree), {}) if self.reported is None else self.reported(tree)


def gradient_path(layout: Layout, mesh: Mesh, params: Any) -> GradientPath:
    """The path that `layout` names, for parameters of these shapes."""
    axes = dict(zip(DATA_AXES, data_sizes(mesh), strict=True))
    specs = update_specs(layout, mesh, params)
    total = vector_sum(layout, mesh)
    combine: Combine = partial(reduce_scatter_tree, specs=specs, axes=axes, total=total)
    reported = None
    if layout.combines:
        reported = adasum(layout, mesh, specs)
        combine = partial(_without_report, reported)
    whole = partial(all_gather_tree, specs=specs, axes=axes, total=total)
    gather: Combine = over_data(whole, mesh, (specs,), PartitionSpec())
    if not any(map(is_split, jax.tree.leaves(specs, is_leaf=_is_spec))):
        gather = _unchanged
    return GradientPath(combine, gather, specs, reported)


def adasum(layout: Layout, mesh: Mesh, specs: Any) -> Callable[[Any], tuple[Any, Values]]:
    """Adasum of trees as `layout` names it, inside `shard_map`; results split as `specs` says.

    Of gradients, each of them a device's share of the mean loss, it is scaled to be the mean where all are parallel;
    changes that optimizers made are combined as they are.
    """
    axes = dict(zip(DATA_AXES, data_sizes(mesh), strict=True))
    rows = layout.gradient_sum == "adasum-rows"
    tree_leaves = leaves(Topology((axes[DATA_AXES[0]],)) if rows else topology_of(layout, mesh))
    names = tensor_names(specs)
    scale = 1 if layout.local_state else math.prod(axes.values())

    def combine(tree: Any) -> tuple[Any, Values]:
        combined, report = combine_tree(tree, specs, axes, tree_leaves, DATA_AXES[1:] if rows else ())
        values = {"poisoned": report.poisoned}
        if layout.report_orthogonality:
            values |= {f"orthogonality/{name}": value for name, value in zip(names, report.orthogonality, strict=True)}
        return jax.tree.map(lambda tensor: tensor * scale, combined) if scale != 1 else combined, values

    return combine


def tensor_names(specs: Any) -> tuple[str, ...]:
    """The names of a tree's tensors, as `blocks.0.weight`, in the order of its leaves; from a tree of specs."""
    paths = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)[0]
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)


def _without_report(reported: Callable[[Any], tuple[Any, Values]], tree: Any) -> Any:
    return reported(tree)[0]


def vector_sum(layout: Layout, mesh: Mesh) -> VectorSum:
    """The way of summing vectors that `layout` names, for this mesh; XLA's where it names no sum (`COMBINATIONS`)."""
    if layout.combines:
        return SUMS["xla"](DATA_AXES)
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
