"""Packs trees of different structure into tuples of equal arrays: devices that run one program hold different trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from multipod.pytrees import Pytree, Shapes, Specs

Slots = tuple[jax.Array, ...]

UNSPLIT = PartitionSpec()


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

    def pack(self, n: int, tree: Pytree) -> Slots:
        """Packs tree number n into slots; zeros where it has nothing."""
        held = dict(zip(self.places[n], jax.tree.leaves(tree), strict=True))
        return tuple(held[k] if k in held else jnp.zeros(s.shape, s.dtype) for k, s in enumerate(self.slots))

    def unpack(self, n: int, slots: Sequence[jax.Array]) -> Pytree:
        """Unpacks tree number n from the slots that hold it."""
        return self.structures[n].unflatten([slots[k] for k in self.places[n]])

    def users(self, slot: int) -> list[int]:
        """Finds the trees that have something in `slot`."""
        return [n for n, places in enumerate(self.places) if slot in places]


def assign_slots(trees: Sequence[Shapes], splits: Sequence[Specs] | None = None) -> SlotPacking:
    """Assigns slots to the leaves of trees of these shapes, the fewest that do.

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
        specs = [_trim(spec) for spec in structure.flatten_up_to(splits[n])] if splits else [UNSPLIT] * len(leaves)
        seen: dict[Any, int] = {}
        numbers = []
        for leaf, spec in zip(leaves, specs, strict=True):
            kind = (tuple(leaf.shape), jnp.dtype(leaf.dtype))
            key = (kind, spec), seen.get((kind, spec), 0)
            seen[key[0]] = key[1] + 1
            if key not in known:
                known[key] = len(slots)
                slots.append(jax.ShapeDtypeStruct(*kind))
                split.append(spec)
            numbers.append(known[key])
        places.append(tuple(numbers))
        structures.append(structure)
    return SlotPacking(tuple(slots), tuple(places), tuple(structures), tuple(split))


def _trim(spec: PartitionSpec) -> PartitionSpec:
    """Drops trailing unsharded dims, so that equal specs compare equal."""
    named = [n for n, axes in enumerate(spec) if axes]
    return PartitionSpec(*spec[: named[-1] + 1]) if named else UNSPLIT
