"""How gradients travel: local gradients in, what the update needs out, and the way back for the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.collectives.adasum import leaves
from multipod.execute.adasum.devices import combine_tree
from multipod.execute.bucketing import Combine, all_gather_tree, reduce_scatter_tree
from multipod.execute.sums import SUMS, VectorSum, build_scheduled_sum, sum_in_tile_first
from multipod.layout.layout import DATA_AXES, Layout
from multipod.layout.mesh import data_axes, data_sizes, inner_axes, is_split, names_of, only, topology_of, update_spec
from multipod.topology.topology import Topology

Values = dict[str, jax.Array]

GATHERED = "gathered"
"""The name of weights that were gathered for use: what the backward pass gathers again and does not keep."""


@dataclass(frozen=True)
class GradientPath:
    """The replaceable part of a step: what happens to gradients and weights between the devices.

    Attributes:
      combine: inside `over_data`; each device's gradients to their sum, split over the data axes as `specs` says.
      gather: outside; a tree of global arrays split as `specs` says to the same tree, whole over the data axes.
      use: inside `over_data`; weights split over the data axes as `specs` says to whole ones. With its derivative: the
        gradients of whole weights become sums, split again.
      specs: the `PartitionSpec` of each parameter during the update.
      base: how the inner axes of the mesh split each parameter; `specs` adds data axes.
      reported: `combine`, with what it found out; None if it finds out nothing.
    """

    combine: Combine
    gather: Combine
    use: Combine
    specs: Any
    base: Any
    reported: Callable[[Any], tuple[Any, Values]] | None = None

    def combine_and_report(self, tree: Any) -> tuple[Any, Values]:
        """`combine(tree)`, and what it found out: the same on every device.

        `poisoned` is bool [devices, tensors], `orthogonality/NAME` a number.
        """
        return (self.combine(tree), {}) if self.reported is None else self.reported(tree)


def gradient_path(
    layout: Layout, mesh: Mesh | AbstractMesh, params: Any, base: Any, order: Sequence[int] = ()
) -> GradientPath:
    """The path that `layout` names, for parameters of these shapes, split by `base` over the inner axes of the mesh.

    `order` are the places of the leaves in the order in which the backward pass makes their gradients; empty is the
    order of the leaves.
    """
    specs = update_specs(layout, mesh, params, base)
    travel = _Travel(layout, mesh, specs, base, tuple(order) or tuple(range(len(jax.tree.leaves(params)))))
    combine: Combine = travel.summed
    reported = None
    if layout.combines:
        reported = adasum(layout, mesh, specs)
        combine = partial(_without_report, reported)
    across = data_specs(mesh, specs)
    gather: Combine = over_data(travel.gathered, mesh, (across,), data_specs(mesh, base))
    if not any(map(is_split, jax.tree.leaves(across, is_leaf=is_spec))):
        gather = _unchanged
    return GradientPath(combine, gather, travel.used, specs, base, reported)


@dataclass(frozen=True)
class _Travel:
    """Sums and gathers trees inside `over_data`, where dims may still be split over the inner axes of the mesh."""

    layout: Layout
    mesh: Mesh | AbstractMesh
    specs: Any
    base: Any
    order: tuple[int, ...]

    def summed(self, tree: Any) -> Any:
        """The sum of the gradients `tree` over the data axes, each tensor split as `specs` says."""
        wire = self.layout.sum_dtype
        sent = jax.tree.map(lambda leaf: leaf.astype(wire) if wire and _is_float(leaf) else leaf, tree)
        total = self._on_parts(self._sum, self.specs, self.specs)(sent)
        return jax.tree.map(lambda part, leaf: part.astype(leaf.dtype), total, tree)

    def gathered(self, tree: Any) -> Any:
        """Tensors whole over the data axes, of the shares that `specs` says, in `layout.gather_dtype`."""
        return self._on_parts(self._gather, self.specs, self.specs)(_cast(tree, self.layout.gather_dtype))

    def used(self, shares: Any) -> Any:
        """`gathered`, a layer in a message, with a derivative that sums gradients of whole weights to shares."""
        leaves, structure = jax.tree.leaves(shares), _structure(shares)
        specs, base = (structure.flatten_up_to(tree) for tree in (self.specs, self.base))
        whole = list(leaves)
        for group in _layers(tensor_names(self.specs)):
            own = [[tree[k] for k in group] for tree in (specs, base)]
            part = _Travel(self.layout, self.mesh, own[0], own[1], tuple(range(len(group))))
            for k, tensor in zip(group, part.with_derivative([leaves[k] for k in group]), strict=True):
                whole[k] = checkpoint_name(tensor, GATHERED)
        return structure.unflatten(whole)

    def with_derivative(self, shares: list[jax.Array]) -> list[jax.Array]:
        """`gathered`, whose derivative sums the gradients of whole weights to gradients of shares."""
        kinds = [share.dtype for share in shares]

        def backward(_: None, gradients: list[jax.Array]) -> tuple[list[jax.Array]]:
            # They come in the type that the weights were gathered in, and are summed in that of what is kept.
            wide = [gradient.astype(kind) for gradient, kind in zip(gradients, kinds, strict=True)]
            return (self.summed(wide),)

        gathered = jax.custom_vjp(self.gathered)
        gathered.defvjp(lambda shares: (self.gathered(shares), None), backward)
        return gathered(shares)

    def _sum(self, tree: Any) -> Any:
        return self._by_axes(tree, lambda axes, total, part, specs: self._in_buckets(axes, total, part, specs))

    def _gather(self, tree: Any) -> Any:
        return self._by_axes(
            tree, lambda axes, total, part, specs: all_gather_tree(part, specs, axes, total), in_order=False
        )

    def _by_axes(self, tree: Any, function: Callable[..., list[jax.Array]], in_order: bool = True) -> Any:
        """Sends the tensors that are split over the experts, and the others, through `function`, each as a list.

        The former are summed over y and x alone: on every device of `expert` they are other weights.
        """
        leaves, structure = jax.tree.leaves(tree), _structure(tree)
        specs, base = (structure.flatten_up_to(tree) for tree in (self.specs, self.base))
        results = list(leaves)
        order = self.order if in_order else range(len(leaves))
        for of_experts in (True, False):
            # By `base`: the update splits other tensors over that axis too.
            places = [k for k in order if ("expert" in names_of(base[k])) == of_experts]
            if places:
                axes = _axes(self.mesh, ("expert",) if of_experts else ())
                across = [only(specs[k], axes) for k in places]
                total = vector_sum(self.layout, self.mesh, tuple(axes))
                for k, result in zip(places, function(axes, total, [leaves[k] for k in places], across), strict=True):
                    results[k] = result
        return structure.unflatten(results)

    def _in_buckets(
        self, axes: dict[str, int], total: VectorSum, tensors: list[jax.Array], specs: list[PartitionSpec]
    ) -> list[jax.Array]:
        """The tensors summed in messages of about `layout.bucket_bytes`, in their order."""
        results: list[jax.Array] = []
        for bucket in buckets([tensor.nbytes for tensor in tensors], self.layout.bucket_bytes):
            part = slice(bucket.start, bucket.stop)
            results += reduce_scatter_tree(tensors[part], specs[part], axes, total)
        return results

    def _on_parts(self, function: Combine, in_specs: Any, out_specs: Any) -> Combine:
        """`function` on each device's part of tensors that the inner axes of the mesh split.

        Without it a tensor would be gathered over those axes before it is packed into a message.
        """
        inner = inner_axes(self.mesh)
        if not any(set(names_of(spec)) & set(inner) for spec in jax.tree.leaves(self.specs, is_leaf=is_spec)):
            return function
        specs = [jax.tree.map(lambda spec: only(spec, inner), tree, is_leaf=is_spec) for tree in (in_specs, out_specs)]
        return jax.shard_map(function, in_specs=(specs[0],), out_specs=specs[1], axis_names=set(inner), check_vma=False)


def buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive runs of tensors with `sizes` bytes: each as long as it stays within `limit`; 0 is no limit.

    A tensor of more than that is a run of its own.
    """
    runs, first, held = [], 0, 0
    for place, size in enumerate(sizes):
        if limit and place > first and held + size > limit:
            runs.append(range(first, place))
            first, held = place, 0
        held += size
    return [*runs, range(first, len(sizes))] if sizes else []


def order_made(function: Callable[..., Any], *shapes: Any) -> tuple[int, ...]:
    """The places of the leaves of `function`'s result, first made first, in a trace for arguments of `shapes`."""
    closed = jax.make_jaxpr(function)(*shapes)
    made = {id(out): place for place, equation in enumerate(closed.jaxpr.eqns) for out in equation.outvars}
    return tuple(sorted(range(len(closed.jaxpr.outvars)), key=lambda k: made.get(id(closed.jaxpr.outvars[k]), -1)))


def adasum(layout: Layout, mesh: Mesh | AbstractMesh, specs: Any) -> Callable[[Any], tuple[Any, Values]]:
    """Adasum of trees as `layout` names it, inside `shard_map`; results split as `specs` says.

    Of gradients, each of them a device's share of the mean loss, it is scaled to be the mean where all are parallel;
    changes that optimizers made are combined as they are.
    """
    axes = _axes(mesh)
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
    paths = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)


def vector_sum(layout: Layout, mesh: Mesh | AbstractMesh, axes: Sequence[str] = DATA_AXES) -> VectorSum:
    """The way of summing vectors over `axes` that `layout` names; XLA's where it names no sum (`COMBINATIONS`).

    Over an axis inside the tiles, `expert`, the sum goes first, within each tile, so that the tiles exchange a share.
    """
    inside = tuple(axis for axis in axes if axis not in DATA_AXES)
    if layout.combines:
        total = SUMS["xla"](DATA_AXES)
    elif layout.gradient_sum in SUMS:
        total = SUMS[layout.gradient_sum](DATA_AXES)
    else:
        total = build_scheduled_sum(layout.gradient_sum, topology_of(layout, mesh), DATA_AXES)
    return sum_in_tile_first(total, inside, math.prod(mesh.shape[axis] for axis in DATA_AXES)) if inside else total


def update_specs(layout: Layout, mesh: Mesh | AbstractMesh, tree: Any, base: Any) -> Any:
    """The `PartitionSpec` that each tensor of `tree` has during the update; `base` is how inner axes split it."""
    if not layout.splits_update:
        return base
    return jax.tree.map(lambda leaf, spec: update_spec(leaf.shape, _axes(mesh, names_of(spec)), spec), tree, base)


def state_specs(state: Any, params: Any, specs: Any, other: Callable[[Any], PartitionSpec]) -> Any:
    """The `PartitionSpec` of each tensor of an optimizer's state.

    A tensor with the path of a parameter at the end of its own, and its shape, is split like it; for the others ask
    `other`. No optimizer needs to say what its state means.
    """
    known = {
        _suffix(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(specs, is_leaf=is_spec), strict=True
        )
    }

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        for first in range(len(path)):
            shape, found = known.get(_suffix(path[first:]), (None, None))
            if shape == leaf.shape:
                return found
        return other(leaf)

    return jax.tree_util.tree_map_with_path(spec, state)


def data_specs(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """What `specs` say of the data axes: the specs of a program that is manual over those (`over_data`)."""
    axes = data_axes(mesh)
    return jax.tree.map(lambda spec: only(spec, axes), specs, is_leaf=is_spec)


def over_data(function: Any, mesh: Mesh | AbstractMesh, in_specs: tuple[Any, ...], out_specs: Any) -> Any:
    """`function` in `jax.shard_map`, manual over the data axes and automatic over all others.

    Replication is not checked (`check_vma`): sums written as schedules of sends end equal on every
    device, which no type can tell. Tests compare them with `psum` instead.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(data_axes(mesh)),
        check_vma=False,
    )


def constrain(tree: Any, mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """`tree` with its tensors split as `specs` says, inside `jax.jit`."""
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)), tree, specs
    )


def is_spec(node: Any) -> bool:
    """Whether `node` of a tree is a `PartitionSpec`."""
    return isinstance(node, PartitionSpec)


def _axes(mesh: Mesh | AbstractMesh, without: Sequence[str] = ()) -> dict[str, int]:
    sizes: Mapping[str, int] = dict(zip(data_axes(mesh), data_sizes(mesh), strict=True))
    return {axis: size for axis, size in sizes.items() if axis not in without}


def _layers(names: Sequence[str]) -> list[list[int]]:
    """The places of the tensors of each layer: names agree up to their last number, else in the first word."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        words = name.replace("/", ".").split(".")
        numbers = [k for k, word in enumerate(words) if word.isdecimal()]
        groups.setdefault(".".join(words[: numbers[-1] + 1] if numbers else words[:1]), []).append(place)
    return list(groups.values())


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if dtype and _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _suffix(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)  # JAX gives this class no types


def _without_report(reported: Callable[[Any], tuple[Any, Values]], tree: Any) -> Any:
    return reported(tree)[0]


def _unchanged(tree: Any) -> Any:
    return tree
