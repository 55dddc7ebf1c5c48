"""Trees of different structure in one tuple of arrays: for devices that run one program and hold different things."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Slots = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Packing:
    """Where each leaf of each of several trees lies in a tuple of `slots`.

    Leaves of equal shape and type share a slot, so trees that are alike cost nothing, and nothing is ever copied or
    reshaped to fit. A device pays for the slots that other trees need and its own does not.

    Attributes:
      slots: shapes and types.
      places: for each tree, the slot of each of its leaves.
      structures: of the trees.
    """

    slots: tuple[jax.ShapeDtypeStruct, ...]
    places: tuple[tuple[int, ...], ...]
    structures: tuple[Any, ...]

    def pack(self, n: int, tree: Any) -> Slots:
        """The slots that hold tree number n; zeros where it has nothing."""
        held = dict(zip(self.places[n], jax.tree.leaves(tree), strict=True))
        return tuple(held[k] if k in held else jnp.zeros(s.shape, s.dtype) for k, s in enumerate(self.slots))

    def unpack(self, n: int, slots: Sequence[jax.Array]) -> Any:
        """Tree number n out of the slots that hold it."""
        return self.structures[n].unflatten([slots[place] for place in self.places[n]])

    def users(self, slot: int) -> list[int]:
        """The trees that have something in `slot`."""
        return [n for n, places in enumerate(self.places) if slot in places]


def packing(trees: Sequence[Any]) -> Packing:
    """The packing of trees of these shapes, with the fewest slots."""
    slots: list[jax.ShapeDtypeStruct] = []
    known: dict[tuple[Any, int], int] = {}  # (shape and type, how many a tree had of it before) to the slot
    places, structures = [], []
    for tree in trees:
        leaves, structure = jax.tree.flatten(tree)
        seen: dict[Any, int] = {}
        own = []
        for leaf in leaves:
            kind = (tuple(leaf.shape), jnp.dtype(leaf.dtype))
            key = (kind, seen.get(kind, 0))
            seen[kind] = seen.get(kind, 0) + 1
            if key not in known:
                known[key] = len(slots)
                slots.append(jax.ShapeDtypeStruct(*kind))
            own.append(known[key])
        places.append(tuple(own))
        structures.append(structure)
    return Packing(tuple(slots), tuple(places), tuple(structures))
