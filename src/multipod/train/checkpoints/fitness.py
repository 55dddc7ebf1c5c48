"""Whether a state is fit to be saved: every number in it finite. A state that is not would push a good one out."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from multipod.layout.mesh import replicated
from multipod.step.program import Program
from multipod.step.state import State


class FiniteCheck:
    """Names the tensors of a state that hold NaN or an infinity; one pass over the state, on its devices.

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
        out = replicated(self._program.mesh)

        def check(tensors: list[jax.Array]) -> list[jax.Array]:
            return [jnp.isfinite(tensor).all() for tensor in tensors]

        return jax.jit(check, out_shardings=out).lower(list(_floats(self._program.shapes).values())).compile()


def _floats(state: State) -> dict[str, Any]:
    """The tensors of a state that can hold what is not finite, by name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
