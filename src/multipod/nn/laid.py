"""Where activations are split: layers name the dims of what they make, and a layout says which axes split them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Splits = Mapping[str, tuple[str, ...]]
"""The mesh axes that split dims of a name."""

_LAYING: ContextVar[tuple[Mesh | AbstractMesh, Splits] | None] = ContextVar("laying", default=None)


@contextmanager
def laying(mesh: Mesh | AbstractMesh, splits: Splits) -> Iterator[None]:
    """While it lasts, what is traced lies on `mesh` as `splits` says."""
    token = _LAYING.set((mesh, splits) if splits else None)
    try:
        yield
    finally:
        _LAYING.reset(token)


def laid(x: jax.Array, *dims: str | None) -> jax.Array:
    """`x` with its last dims, which are named, split as the layout says and whole where it says nothing.

    Dims in front of those are left to the compiler. Without a layout, or with one that splits nothing inside its tiles,
    it is `x` itself. It changes no value; it tells XLA where to add partial sums, and what not to gather.
    """
    found = _LAYING.get()
    if found is None:
        return x
    mesh, splits = found
    split = [splits.get(dim, ()) if dim else () for dim in dims]
    front = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(dims))
    spec = PartitionSpec(*front, *(axes or None for axes in split))
    # In a program that is manual over some axes, JAX wants the mesh that says so.
    inside = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh if inside.empty else inside, spec))
