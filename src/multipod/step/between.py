"""What a model does to its own parameters between two updates, and what that means for their optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from multipod.nn.model import Moved, Rearranging
from multipod.recipe.recipe import Recipe


def rearranged(
    recipe: Recipe, optimizer: optax.GradientTransformation, values: tuple[Any, Any, Any], update: jax.Array
) -> tuple[Any, Any, Any]:
    """Parameters, statistics and optimizer state after update number `update`, rearranged if the model says so.

    Of a model without `multipod.nn.model.Rearranging` they are as they were, at no cost. Optimizer state moves with the
    rows that it belongs to; that of new rows begins as the optimizer begins. Where every device has a state of its own
    (`layout.local_state`), its first dim counts devices.
    """
    model = recipe.model
    if not isinstance(model, Rearranging) or not (names := model.rearranged_params()):
        return values
    params, statistics, state = values
    leaves = jax.tree_util.tree_leaves_with_path(state)
    structure: Any = jax.tree.structure(state)
    own = [k for k, (path, leaf) in enumerate(leaves) if _name(path) in names and jnp.ndim(leaf)]

    def act(given: tuple[Any, Any, list[Any]]) -> tuple[Any, Any, list[Any]]:
        few, statistics, kept = given
        few, statistics, moved = model.rearrange(few, statistics)
        begun = jax.tree.leaves(optimizer.init(params | few))
        follow = [
            _followed(leaf, begun[k], moved.get(_name(leaves[k][0])), recipe.layout.local_state)
            for k, leaf in zip(own, kept, strict=True)
        ]
        return few, statistics, follow

    # Only what may change goes through the branch: a conditional copies what it returns.
    few = {name: params[name] for name in names}
    given = few, statistics, [leaves[k][1] for k in own]
    few, statistics, kept = lax.cond(model.is_due(update), act, lambda same: same, given)
    flat = [leaf for _, leaf in leaves]
    for k, leaf in zip(own, kept, strict=True):
        flat[k] = leaf
    return params | few, statistics, structure.unflatten(flat)


def _followed(leaf: jax.Array, begun: jax.Array, moved: Moved | None, each_device: bool) -> jax.Array:
    """Optimizer state [rows, ...] of a parameter whose rows have `moved`."""
    if moved is None:
        return leaf
    if each_device:
        return jax.vmap(lambda one: _followed(one, begun, moved, False))(leaf)
    known = moved.known.reshape(-1, *[1] * (leaf.ndim - 1))
    return jnp.where(known, leaf[moved.place], begun)


def _name(path: tuple[Any, ...]) -> str:
    """The last key of a path in a tree of flat dictionaries."""
    return getattr(path[-1], "key", "") if path else ""
