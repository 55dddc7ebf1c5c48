"""Trees of different structure in one tuple of arrays: for devices that run one program and hold different things."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Slots = tuple[jax.Array, ...]

WHOLE = PartitionSpec()


@dataclass(frozen=True)
class SlotPacking:
    """Where each leaf of each of several trees lies in a tuple of `slots`.

    Leaves of equal shape and type share a slot, so trees that are alike cost nothing, and nothing is ever copied or
    reshaped to fit. A device pays for the slots that other trees need and its own does not.

    Attributes:
      slots: shapes and types.
      places: for each tree, the slot of each of its leaves.
      structures: of the trees.
      splits: how each slot is split over axes inside a stage.
    """

    slots: tuple[jax.ShapeDtypeStruct, ...]
    places: tuple[tuple[int, ...], ...]
    structures: tuple[Any, ...]
    splits: tuple[PartitionSpec, ...]

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


def assign_slots(trees: Sequence[Any], splits: Sequence[Any] | None = None) -> SlotPacking:
    """The packing of trees of these shapes, with the fewest slots.

    splits: for each tree, a tree like it of `PartitionSpec`s; None: nothing is split. Leaves that are split differently
    do not share a slot.
    """
    slots: list[jax.ShapeDtypeStruct] = []
    split: list[PartitionSpec] = []
    known: dict[tuple[Any, int], int] = {}  # (shape, type and split, how many a tree had of it before) to the slot
    places, structures = [], []
    for n, tree in enumerate(trees):
        leaves = jax.tree.leaves(tree)
        structure: Any = jax.tree.structure(tree)
        specs = [_trim(spec) for spec in structure.flatten_up_to(splits[n])] if splits else [WHOLE] * len(leaves)
        seen: dict[Any, int] = {}
        own = []
        for leaf, spec in zip(leaves, specs, strict=True):
            kind = (tuple(leaf.shape), jnp.dtype(leaf.dtype))
            key = (kind, spec), seen.get((kind, spec), 0)
            seen[key[0]] = key[1] + 1
            if key not in known:
                known[key] = len(slots)
                slots.append(jax.ShapeDtypeStruct(*kind))
                split.append(spec)
            own.append(known[key])
        places.append(tuple(own))
        structures.append(structure)
    return SlotPacking(tuple(slots), tuple(places), tuple(structures), tuple(split))


def _trim(spec: PartitionSpec) -> PartitionSpec:
    """The same without what it says of the last dims, if that is nothing: so that equal ones compare equal."""
    named = [n for n, axes in enumerate(spec) if axes]
    return PartitionSpec(*spec[: named[-1] + 1]) if named else WHOLE
