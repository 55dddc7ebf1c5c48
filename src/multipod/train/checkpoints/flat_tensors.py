"""Tensors that a checkpoint holds flat: how they were kept, so that any layout can read them.

A checkpoint holds arrays as the run kept them. Those that were flattened and padded for the run's own number of
devices (`layout.shares`) are listed beside; all others have their own shapes, as in every checkpoint of before. Where a
run that restores keeps a tensor in another way than the one that saved it, it passes through the memory of the host.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from multipod.layout.shares import FlatTensor, Share, is_flat_tensor
from multipod.pytrees import Pytree, Shapes

SHARES = "shares.json"
"""In a checkpoint with flat tensors: how each of them is kept, by its path."""


def shares_of(tree: Pytree) -> dict[str, Share]:
    """How the flat tensors of a tree are kept, by their paths."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_flat_tensor)[0]
    return {_name(path): node.share for path, node in nodes if is_flat_tensor(node)}


def write_shares(folder: Path, shares: Mapping[str, Share]) -> None:
    """Notes in a checkpoint which of its tensors are flat; nothing where none is."""
    if shares:
        (folder / SHARES).write_text(json.dumps({name: share.to_json() for name, share in shares.items()}))


def read_shares(folder: Path) -> dict[str, Share]:
    """Which tensors of a checkpoint are flat, and how; none in one of before there were any."""
    path = folder / SHARES
    if not path.is_file():
        return {}
    return {name: Share.from_json(saved) for name, saved in json.loads(path.read_text()).items()}


@dataclass(frozen=True)
class SavedShares:
    """Reads tensors that were `saved` flat, or whole, into `shapes`, where they may be kept in another way."""

    saved: Mapping[str, Share]
    shapes: Shapes

    @cached_property
    def changed(self) -> frozenset[str]:
        """The paths of tensors that are kept in another way than they were."""
        wanted = shares_of(self.shapes)
        return frozenset(name for name in wanted.keys() | self.saved.keys() if wanted.get(name) != self.saved.get(name))

    def to_restore(self) -> Pytree:
        """What to ask of a checkpoint: `shapes` without nodes, and arrays of this host for what has changed."""

        def ask(name: str, node: Any) -> Any:
            leaf = node.array if is_flat_tensor(node) else node
            if name not in self.changed:
                return leaf
            shape = self.saved[name].kept if name in self.saved else node.share.shape
            return np.empty(shape, leaf.dtype)

        return _map(ask, self.shapes)

    def place(self, restored: Pytree) -> Pytree:
        """What was restored as `shapes` says, on its devices.

        Raises:
          ValueError: a tensor has another shape than the model's.
        """
        arrays = iter(jax.tree.leaves(restored))

        def put(name: str, node: Any) -> Any:
            array = next(arrays)
            share = node.share if is_flat_tensor(node) else None
            if name in self.changed:
                array = self._converted(name, array, share, node.array if share else node)
            return FlatTensor(array, share) if share else array

        return _map(put, self.shapes)

    def _converted(self, name: str, array: Any, share: Share | None, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = np.asarray(array)
        tensor = self.saved[name].unflatten(array) if name in self.saved else array
        expected = share.shape if share else leaf.shape
        if tensor.shape != expected:
            raise ValueError(f"{name} has shape {tensor.shape} there, and {expected} in this run's model")
        kept = share.flatten(tensor) if share else tensor
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: kept[index])


def _map(function: Any, tree: Pytree) -> Pytree:
    return jax.tree_util.tree_map_with_path(
        lambda path, node: function(_name(path), node), tree, is_leaf=is_flat_tensor
    )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
