"""Trees of `PartitionSpec`s, and programs that are manual over the data axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.layout.mesh import data_axes, only
from multipod.pytrees import KeyPath, OptState, Params, Pytree, Shapes, Specs

WHOLE = PartitionSpec()


def over_data(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: tuple[Specs, ...], out_specs: Specs
) -> Callable[..., Any]:
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


def constrain(tree: Pytree, mesh: Mesh | AbstractMesh, specs: Specs) -> Pytree:
    """`tree` with its tensors split as `specs` says, inside `jax.jit`."""
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)), tree, specs
    )


def sharded(shapes: Shapes, mesh: Mesh | AbstractMesh, specs: Specs) -> Shapes:
    """`shapes` with shardings as `specs` says."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


def data_specs(mesh: Mesh | AbstractMesh, specs: Specs) -> Specs:
    """What `specs` say of the data axes: the specs of a program that is manual over those (`over_data`)."""
    axes = data_axes(mesh)
    return jax.tree.map(lambda spec: only(spec, axes), specs, is_leaf=is_spec)


def state_specs(
    state: OptState, params: Params, specs: Specs, other: Callable[[Any], PartitionSpec] = lambda leaf: WHOLE
) -> Specs:
    """The `PartitionSpec` of each tensor of an optimizer's state.

    A tensor with the path of a parameter at the end of its own, and its shape, is split like it; for the others ask
    `other`. No optimizer needs to say what its state means.
    """
    known = {
        jax.tree_util.keystr(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(params)[0], flat_specs(specs), strict=True)
    }

    def spec(path: KeyPath, leaf: Any) -> PartitionSpec:
        for first in range(len(path)):
            shape, of_parameter = known.get(jax.tree_util.keystr(path[first:]), (None, WHOLE))
            if shape == leaf.shape:
                return of_parameter
        return other(leaf)

    return jax.tree_util.tree_map_with_path(spec, state)


def tensor_names(specs: Specs) -> tuple[str, ...]:
    """The names of a tree's tensors, as `blocks.0.weight`, in the order of its leaves; from a tree of specs."""
    paths = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)


def flat_specs(specs: Specs) -> list[PartitionSpec]:
    """The `PartitionSpec`s of a tree in the order of its leaves."""
    return jax.tree.leaves(specs, is_leaf=is_spec)


def is_spec(node: Any) -> bool:
    """Whether `node` of a tree is a `PartitionSpec`."""
    return isinstance(node, PartitionSpec)
