"""Updates of a part of the parameters: the rest is frozen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from multipod.errors import RecipeError, nearest
from multipod.optim.optimizer import Builds, flattens, leading_dims

Rule = Callable[[str], bool]


def _expert(path: str) -> bool:
    return "/experts/" in path


def _attention(path: str) -> bool:
    return any(part in path for part in ("/attention/", "/cross/"))


def _sparse(path: str) -> bool:
    return "/sparse/" in path  # the experts, and their router


SUBSETS: dict[str, Rule] = {
    "all": lambda path: True,
    "experts": _expert,
    "sparse": _sparse,
    "non-experts": lambda path: not _expert(path),
    "non-sparse": lambda path: not _sparse(path),
    "dense": lambda path: "/mlp/" in path,
    "attention": _attention,
    "non-attention": lambda path: not _attention(path),
    "router": lambda path: path.endswith("/router"),
}
"""Parts of a sparse model, by the paths of their parameters: experts; experts and routers (`sparse`); dense
feed-forward blocks; attention; routers."""


@dataclass(frozen=True)
class Partly:
    """An optimizer of which only the steps of some parameters are taken.

    The state is the whole optimizer's, so that fine-tuning can go on with the state of pre-training: resetting it hurts
    (arXiv:2202.08906, table 20). What is frozen costs the same time and memory as what is not.

    Attributes:
      optimizer: anything with `build(updates)`.
      train: names of `SUBSETS`, or parts of paths such as `encoder/0/`; what one of them names is updated.
    """

    optimizer: Builds
    train: tuple[str, ...] = ("all",)

    def __post_init__(self) -> None:
        unknown = [name for name in self.train if name not in SUBSETS and "/" not in name]
        if unknown or not self.train:
            known = [*SUBSETS, "or a part of a path with a slash, as encoder/0/"]
            said = " ".join(f"{name!r}: {nearest(name, SUBSETS)}" for name in unknown)
            raise RecipeError(
                f"train={','.join(self.train)}: no such part. {said or 'Known: ' + ', '.join(known) + '.'}"
            )

    def is_trained(self, path: str) -> bool:
        """Whether the parameter of this path is updated."""
        return any(SUBSETS[name](path) if name in SUBSETS else name in path for name in self.train)

    @property
    def flattens(self) -> bool:
        """Whether the optimizer may be given flat tensors: which of its steps are taken changes nothing."""
        return flattens(self.optimizer)

    def leading_dims(self, name: str) -> int:
        """Returns the optimizer's own."""
        return leading_dims(self.optimizer, name)

    def build(self, updates: int) -> optax.GradientTransformation:
        """Returns the Optax transformation for a run of `updates`.

        Raises:
          RecipeError: nothing is left to train.
        """
        inner = self.optimizer.build(updates)

        def step(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            trained = jax.tree.map_with_path(lambda path, _: self.is_trained(_name(path)), gradients)
            if not any(jax.tree.leaves(trained)):
                raise RecipeError(f"train={','.join(self.train)}: no parameter of the model is named so.")
            changes, state = inner.update(gradients, state, params)
            taken = jax.tree.map(lambda change, yes: change if yes else jnp.zeros_like(change), changes, trained)
            return taken, state

        return optax.GradientTransformation(inner.init, step)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
