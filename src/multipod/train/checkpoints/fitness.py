"""Whether a state is fit to be saved: every number in it finite. A state that is not would push a good one out."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from multipod.layout.mesh import data_axes, names_of, replicated
from multipod.layout.shares import update_spec
from multipod.step.program import Program
from multipod.step.state import State


class FiniteCheck:
    """Names the tensors of a state that hold NaN or an infinity; one pass over the state, shared by its devices.

    All processes call it at the same point, and all get the same names.
    """

    def __init__(self, program: Program) -> None:
        self._program = program

    def compile(self) -> None:
        """Compiles the pass, so that no save has to."""
        _ = self._compiled

    def __call__(self, state: State) -> list[str]:
        """Returns the names of tensors that are not finite, as `params/in`, in the order of the state."""
        named = _floats(state)
        finite = jax.device_get(self._compiled(list(named.values())))
        return [name for name, good in zip(named, finite, strict=True) if not good]

    @cached_property
    def _compiled(self) -> Any:
        shapes = list(_floats(self._program.shapes).values())
        shares = [_share(leaf, self._program.mesh) for leaf in shapes]

        def check(tensors: list[jax.Array]) -> list[jax.Array]:
            parts = map(jax.lax.with_sharding_constraint, tensors, shares)
            return [jnp.isfinite(part).all() for part in parts]

        return jax.jit(check, out_shardings=replicated(self._program.mesh)).lower(shapes).compile()


def _share(leaf: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """How the data devices share the work on a tensor: what each of them has whole is split, where a dim divides."""
    spec = leaf.sharding.spec
    sizes = {axis: mesh.shape[axis] for axis in data_axes(mesh) if axis not in names_of(spec)}
    return NamedSharding(mesh, update_spec(leaf.shape, sizes, spec) if sizes else spec)


def _floats(state: State) -> dict[str, Any]:
    """The tensors of a state that can hold what is not finite, by name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
