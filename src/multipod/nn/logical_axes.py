"""Where activations are split: layers name the dims of what they make, and a layout says which axes split them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Splits = Mapping[str, tuple[str, ...]]
"""The mesh axes that split dims of a name."""

_LAYING: ContextVar[tuple[Mesh | AbstractMesh, Splits] | None] = ContextVar("laying", default=None)


@contextmanager
def logical_axis_rules(mesh: Mesh | AbstractMesh, splits: Splits) -> Iterator[None]:
    """While it lasts, what is traced lies on `mesh` as `splits` says."""
    token = _LAYING.set((mesh, splits) if splits else None)
    try:
        yield
    finally:
        _LAYING.reset(token)


def with_logical_constraint(x: jax.Array, *dims: str | None) -> jax.Array:
    """`x` with its last dims, which are named, split as the layout says and whole where it says nothing.

    Dims in front of those are left to the compiler. Without a layout, or with one that splits nothing inside its tiles,
    it is `x` itself. It changes no value; it tells XLA where to add partial sums, and what not to gather.

    A dim of fewer elements than its axes have devices stays whole: some devices would have nothing to do, and of a
    convolution with strides whose output is so small XLA's partitioner computes a wrong kernel gradient
    (docs/design/spatial.md).
    """
    found = _LAYING.get()
    if found is None:
        return x
    mesh, splits = found
    sizes = x.shape[x.ndim - len(dims) :]
    split = [_split(size, splits.get(dim, ()) if dim else (), mesh) for size, dim in zip(sizes, dims, strict=True)]
    front = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(dims))
    spec = PartitionSpec(*front, *(axes or None for axes in split))
    # In a program that is manual over some axes, JAX wants the mesh that says so.
    inside = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh if inside.empty else inside, spec))


def axes_of_dim(dim: str) -> tuple[str, ...]:
    """The mesh axes that split dims of a name where this is traced; () where nothing does."""
    found = _LAYING.get()
    return () if found is None else found[1].get(dim, ())


def _split(size: int, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    return axes if size >= math.prod(mesh.shape[axis] for axis in axes) else ()
