"""What the host tells an update beside its batch, and the guard that undoes bad updates on the devices."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from multipod.layout.mesh import batch_sharding, data_devices, replicated
from multipod.pytrees import Grads, KeyPath, OptState, Params, Statistics
from multipod.recipe.recipe import Recipe
from multipod.step.state import State, Sums

Learnt = tuple[Params, Statistics, OptState]
"""What an update changes of a state beside its numbers."""
NO_LIMITS = (math.inf, math.inf)


class Controls(NamedTuple):
    """What the host tells an update, beside the batch.

    Attributes:
      stop: int32 [devices], 1 to ask for a stop.
      limits: float32 [2], the highest loss and gradient norm of a good update, infinite for no limit; None where
        updates are not guarded.
      flip: int32 [devices], 1 + the number of a bit to flip in a gradient of that device, 0 for none; None in
        programs that cannot do that, which are all but those made to inject faults.
      halt: int32, 1 for an update that must change nothing, its numbers included: the one before it was bad, and the
        host has not seen that yet. None where updates are not guarded.
    """

    stop: jax.Array
    limits: jax.Array | None = None
    flip: jax.Array | None = None
    halt: jax.Array | None = None


@dataclass(frozen=True)
class Unguarded:
    """Takes every update as it is, at no cost."""

    mesh: Mesh | AbstractMesh
    _known: dict[int, Controls] = field(default_factory=dict, compare=False, repr=False)

    def control_shapes(self) -> Any:
        """Flags alone."""
        return Controls(_flag_shapes(self.mesh))

    def controls(self, stop: int, limits: tuple[float, float], flip: int, halt: jax.Array | None = None) -> Controls:
        """Flags alone, made once for each value."""
        if stop not in self._known:
            self._known[stop] = Controls(_flags(self.mesh, stop))
        return self._known[stop]

    def disturb(self, gradients: Grads, flip: jax.Array | None) -> Grads:
        """The gradients as they are."""
        return gradients

    def judge(self, sums: Sums, gradients: Grads, controls: Controls) -> tuple[jax.Array | None, Sums]:
        """No verdict, and the sums."""
        return None, sums


@dataclass(frozen=True)
class Guarded:
    """Keeps the old values where loss or gradients are bad.

    Attributes:
      minds: whether anything is bad; else an update only tells its gradient norm.
      faulty: whether bits can be flipped.
    """

    mesh: Mesh | AbstractMesh
    minds: bool
    faulty: bool
    _known: dict[int, Controls] = field(default_factory=dict, compare=False, repr=False)

    def control_shapes(self) -> Any:
        """Flags and limits, bits to flip, and whether the update before was bad."""
        flags, whole = _flag_shapes(self.mesh), replicated(self.mesh)
        limits: Any = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=whole)
        halt: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        return Controls(flags, limits, flags if self.faulty else None, halt)

    def controls(self, stop: int, limits: tuple[float, float], flip: int, halt: jax.Array | None = None) -> Controls:
        """Flags and limits, and a bit to flip on the first device of this process; without `halt` the update counts.

        Made once for each value of `stop` where nothing is a spike and no bit flips, as in nearly all updates.
        """
        plain = flip == 0 and limits == NO_LIMITS
        known = self._known.get(stop) if plain else None
        if known is None:
            known = self._make(stop, limits, flip)
            if plain:
                self._known[stop] = known
        return known if halt is None else known._replace(halt=halt)

    def _make(self, stop: int, limits: tuple[float, float], flip: int) -> Controls:
        bounds, zero = np.asarray(limits, np.float32), np.zeros((), np.int32)
        whole = replicated(self.mesh)
        on_mesh = jax.make_array_from_callback((2,), whole, lambda _: bounds)
        go = jax.make_array_from_callback((), whole, lambda _: zero)
        return Controls(_flags(self.mesh, stop), on_mesh, self._flips(flip) if self.faulty else None, go)

    def _flips(self, flip: int) -> jax.Array:
        assert isinstance(self.mesh, Mesh)
        first = min(device.id for device in self.mesh.devices.flat if device.process_index == jax.process_index())
        ids = [device.id for device in self.mesh.devices.reshape(data_devices(self.mesh), -1)[:, 0]]
        flips = np.array([flip if number == first else 0 for number in ids], np.int32)
        return jax.make_array_from_callback((len(ids),), batch_sharding(self.mesh), lambda index: flips[index])

    def disturb(self, gradients: Grads, flip: jax.Array | None) -> Grads:
        """The gradients with a bit flipped, if asked."""
        return flip_bit(gradients, flip)

    def judge(self, sums: Sums, gradients: Grads, controls: Controls) -> tuple[jax.Array | None, Sums]:
        """Whether the update counts, a boolean, and the sums with `bad` and `gradient_norm` added.

        An update that is halted is bad, too, so that those behind it are halted as well.

        Costs one pass over the gradients, and a message of one number where they are split.
        """
        limits = controls.limits
        assert limits is not None
        assert controls.halt is not None
        norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients))
        loss = sums["loss"] / sums["count"]
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        good = finite & (loss <= limits[0]) & (norm <= limits[1]) | (not self.minds)
        good &= controls.halt == 0
        per_example = norm * sums["count"]  # like every sum: divided by the count on the host
        return good, sums | {"bad": 1 - good.astype(jnp.int32), "gradient_norm": per_example}


def keep_good(good: jax.Array | None, new: Learnt, old: Learnt, held: frozenset[str] = frozenset()) -> Learnt:
    """New or old values, on every device the same; the new ones without a verdict. Copies nothing.

    Of tensors whose last name is in `held` both are the same where the update is not good: to ask for the old ones
    would keep them beside the new.
    """
    if good is None:
        return new

    def choose(path: KeyPath, new: jax.Array, old: jax.Array) -> jax.Array:
        return new if path and getattr(path[-1], "key", "") in held else jnp.where(good, new, old)

    return jax.tree_util.tree_map_with_path(choose, new, old)


def count_up(state: State, controls: Controls) -> tuple[jax.Array, jax.Array]:
    """Updates and batches after this update: one more of each, or as many as before if it is halted."""
    one = 1 if controls.halt is None else 1 - controls.halt
    return state.update + one, state.position + one


UpdateGuard = Unguarded | Guarded
"""What decides on the devices whether an update counts, and what the host may tell the update."""


def guard_of(recipe: Recipe, mesh: Mesh | AbstractMesh, faulty: bool = False) -> UpdateGuard:
    """The guard that a recipe asks for; one of a `faulty` program can flip bits."""
    watches = recipe.bad_updates.watches
    return Guarded(mesh, watches, faulty) if watches or faulty else Unguarded(mesh)


def flip_bit(gradients: Grads, flip: jax.Array | None) -> Grads:
    """The gradients of one device with a bit of the first number of the largest tensor flipped, if `flip` says so.

    Args:
      gradients: any tree of floats.
      flip: int32 [1], as in `Controls`.
    """
    if flip is None:
        return gradients
    leaves = jax.tree.leaves(gradients)
    structure: Any = jax.tree.structure(gradients)
    at = max(range(len(leaves)), key=lambda place: leaves[place].size)
    bits = jnp.uint32 if leaves[at].dtype.itemsize == 4 else jnp.uint16
    flat = leaves[at].reshape(-1)
    word = lax.bitcast_convert_type(flat[:1], bits)
    mask = jnp.where(flip > 0, jnp.left_shift(1, jnp.maximum(flip - 1, 0)), 0).astype(bits)
    leaves[at] = flat.at[:1].set(lax.bitcast_convert_type(word ^ mask, flat.dtype)).reshape(leaves[at].shape)
    return structure.unflatten(leaves)


def _flag_shapes(mesh: Mesh | AbstractMesh) -> Any:
    return jax.ShapeDtypeStruct((data_devices(mesh),), jnp.int32, sharding=batch_sharding(mesh))


def _flags(mesh: Mesh | AbstractMesh, stop: int) -> jax.Array:
    flag = np.full(1, stop, np.int32)
    return jax.make_array_from_callback((data_devices(mesh),), batch_sharding(mesh), lambda _: flag)
