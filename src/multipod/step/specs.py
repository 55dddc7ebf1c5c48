"""Trees of `PartitionSpec`s and `Share`s, and programs that are manual over the data axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.layout.mesh import data_axes, only
from multipod.layout.shares import WHOLE, FlatTensor, is_flat_tensor
from multipod.pytrees import KeyPath, OptState, Params, Pytree, Shapes, Specs


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
    leaves, structure = jax.tree.flatten(tree)
    shardings = [NamedSharding(mesh, spec) for spec in flat_specs(specs)]
    return jax.tree.unflatten(structure, map(jax.lax.with_sharding_constraint, leaves, shardings))


def sharded(shapes: Shapes, mesh: Mesh | AbstractMesh, specs: Specs) -> Shapes:
    """`shapes` with shardings as `specs` says."""
    leaves, structure = jax.tree.flatten(shapes)
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, flat_specs(specs), strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def data_specs(mesh: Mesh | AbstractMesh, specs: Specs) -> Specs:
    """What `specs` say of the data axes: the specs of a program that is manual over those (`over_data`)."""
    axes = data_axes(mesh)
    return jax.tree.map(lambda spec: only(spec, axes), specs, is_leaf=is_spec)


def state_specs(
    state: OptState, params: Params, specs: Pytree, other: Callable[[Any], Any] = lambda leaf: WHOLE
) -> Pytree:
    """The `PartitionSpec` of each tensor of an optimizer's state; or what else `specs` says of the parameters.

    A tensor with the path of a parameter at the end of its own, and its shape, is split like it; for the others ask
    `other`. No optimizer needs to say what its state means.
    """
    known = {
        jax.tree_util.keystr(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(params)[0], flat_specs(specs), strict=True)
    }

    def spec(path: KeyPath, leaf: Any) -> Any:
        for first in range(len(path)):
            shape, of_parameter = known.get(jax.tree_util.keystr(path[first:]), (None, WHOLE))
            if shape == leaf.shape:
                return of_parameter
        return other(leaf)

    return jax.tree_util.tree_map_with_path(spec, state)


def arrays_of(tree: Pytree) -> Pytree:
    """A state's tree without its `FlatTensor`s: flat tensors as plain arrays, in the shapes in which they are kept."""
    return jax.tree.map(lambda node: node.array if is_flat_tensor(node) else node, tree, is_leaf=is_flat_tensor)


def keep(tree: Pytree, shares: Pytree) -> Pytree:
    """Whole tensors as `shares` says that they are kept."""
    return as_kept(jax.tree.map(lambda share, tensor: share.flatten(tensor), shares, tree), shares)


def as_kept(arrays: Pytree, shares: Pytree) -> Pytree:
    """Arrays in the shapes in which they are kept, as a state has them: the opposite of `arrays_of`."""
    return jax.tree.map(lambda share, array: FlatTensor(array, share) if share.is_flat else array, shares, arrays)


def whole_tensors(tree: Pytree, mesh: Mesh | AbstractMesh | None = None) -> Pytree:
    """A state's tree with the tensors that `keep` flattened in their own shapes; other tensors stay as they are.

    mesh: (inside `jax.jit`) flat tensors are gathered over its data axes before they are put in shape, in which XLA
    would not split them.
    """

    def whole(node: Any) -> Any:
        if not is_flat_tensor(node):
            return node
        array, share = node.array, node.share
        if mesh is not None:
            rest = only(share.spec, set(mesh.axis_names) - set(share.axes))
            array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, rest))
        return share.unflatten(array)

    return jax.tree.map(whole, tree, is_leaf=is_flat_tensor)


def specs_of(shares: Pytree) -> Specs:
    """The `PartitionSpec` of each tensor as it is kept."""
    return jax.tree.map(lambda share: share.spec, shares)


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
