"""The post-update hook: what a model does to its own parameters between two updates, and to their optimizer state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from multipod.nn.model import Moved, Rearranging
from multipod.pytrees import KeyPath
from multipod.recipe.recipe import Recipe
from multipod.step.guard import Learnt

PostUpdate = Callable[[Learnt, jax.Array], Learnt]
"""Parameters, statistics and optimizer state after the update of a number, the first being 1."""


def post_update_of(recipe: Recipe, optimizer: optax.GradientTransformation) -> PostUpdate:
    """The hook of the recipe's model; nothing, at no cost, for one without `multipod.nn.model.Rearranging`.

    Optimizer state moves with the rows that it belongs to; that of new rows begins as the optimizer begins. Where every
    device has a state of its own (`layout.sync.local_state`), its first dim counts devices.
    """
    model = recipe.model
    if not isinstance(model, Rearranging) or not (names := model.rearranged_params()):
        return lambda learnt, update: learnt
    return partial(_rearrange, model, names, optimizer, recipe.layout.sync.local_state)


def _rearrange(
    model: Rearranging,
    names: tuple[str, ...],
    optimizer: optax.GradientTransformation,
    each_device: bool,
    learnt: Learnt,
    update: jax.Array,
) -> Learnt:
    params, statistics, state = learnt
    leaves = jax.tree_util.tree_leaves_with_path(state)
    structure: Any = jax.tree.structure(state)
    places = [k for k, (path, leaf) in enumerate(leaves) if _name(path) in names and jnp.ndim(leaf)]

    def act(given: tuple[Any, Any, list[Any]]) -> tuple[Any, Any, list[Any]]:
        few, statistics, moments = given
        few, statistics, moved = model.rearrange(few, statistics)
        fresh = jax.tree.leaves(optimizer.init(params | few))
        follow = [
            _followed(leaf, fresh[k], moved.get(_name(leaves[k][0])), each_device)
            for k, leaf in zip(places, moments, strict=True)
        ]
        return few, statistics, follow

    # Only what may change goes through the branch: a conditional copies what it returns.
    few = {name: params[name] for name in names}
    given = few, statistics, [leaves[k][1] for k in places]
    few, statistics, moments = lax.cond(model.is_due(update), act, lambda same: same, given)
    flat = [leaf for _, leaf in leaves]
    for k, leaf in zip(places, moments, strict=True):
        flat[k] = leaf
    return params | few, statistics, structure.unflatten(flat)


def _followed(leaf: jax.Array, fresh: jax.Array, moved: Moved | None, each_device: bool) -> jax.Array:
    """Optimizer state [rows, ...] of a parameter whose rows have `moved`."""
    if moved is None:
        return leaf
    if each_device:
        return jax.vmap(lambda row: _followed(row, fresh, moved, False))(leaf)
    known = moved.known.reshape(-1, *[1] * (leaf.ndim - 1))
    return jnp.where(known, leaf[moved.place], fresh)


def _name(path: KeyPath) -> str:
    """The last key of a path in a tree of flat dictionaries."""
    return getattr(path[-1], "key", "") if path else ""
