"""Gradients of the same batch on other devices, as fingerprints: to tell a bad chip from a bad batch."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from multipod.layout.mesh import batch_sharding, batch_spec, replicated
from multipod.nn.by_example import NUMBERS, numbered
from multipod.pytrees import Batch, Grads, Params, Statistics
from multipod.step.guard import Controls, flip_bit
from multipod.step.placement import MeshPlacement
from multipod.step.specs import arrays_of, data_specs, over_data
from multipod.step.state import State, update_key
from multipod.step.sync.sync import GradientSync
from multipod.step.update import device_gradients


def replay_of(placement: MeshPlacement, sync: GradientSync) -> "Replay | None":
    """The replays of a program; None where devices need others to work out a share of a batch."""
    layout = placement.recipe.layout
    alone = layout.replica_devices == 1 and not layout.sync.fsdp and placement.devices > 1
    return Replay(placement, sync) if alone else None


@dataclass(frozen=True)
class Replay:
    """Works out shares of a batch on other devices than an update does. The first call compiles."""

    placement: MeshPlacement
    sync: GradientSync

    def fingerprints(self, state: State, batch: Batch, controls: Controls, shift: int) -> tuple[np.ndarray, np.ndarray]:
        """Fingerprints of each share's gradients, every share of the batch `shift` devices further than in an update.

        Returns uint32 [devices, 2], two sums modulo 2^32 over all bits of the gradients of a share (one of them knows
        the places), and bool [devices], whether a share's loss and gradients are finite; both in the order of the
        shares. Equal bits give equal fingerprints; one flipped bit never does. `state` is that before the update. A bit
        that `controls` flip stays with its device.

        Costs a gradient, and the moving of the batch.
        """
        words, finite = self._compiled(state, batch, controls.flip, jnp.int32(shift))
        return np.roll(np.asarray(words), -shift, 0), np.roll(np.asarray(finite), -shift)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._moved)

    def _moved(self, state: State, batch: Batch, flip: jax.Array | None, shift: jax.Array) -> Any:
        """[devices, 2] and [devices], in the order of the devices, on every one."""
        mesh, devices = self.placement.mesh, self.placement.devices
        shardings = self.placement.batches.shardings(batch) | {NUMBERS: batch_sharding(mesh)}
        rows = numbered(batch)  # what is drawn belongs to the rows, not to the device
        rows = {name: jnp.roll(array, shift * (array.shape[0] // devices), 0) for name, array in rows.items()}
        rows = {name: lax.with_sharding_constraint(array, shardings[name]) for name, array in rows.items()}

        def local(
            params: Params,
            statistics: Statistics,
            key: jax.Array,
            batch: Batch,
            flip: jax.Array | None,
        ) -> tuple[jax.Array, jax.Array]:
            gradients, (_, sums) = device_gradients(self.placement, self.sync, params, statistics, key, batch)
            gradients = flip_bit(gradients, flip)
            finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]
            return _words(gradients)[None], (jnp.stack(finite).all() & jnp.isfinite(sums["loss"]))[None]

        split, whole = batch_spec(mesh), PartitionSpec()
        in_specs = data_specs(mesh, self.sync.stored_specs), whole, whole, split, split
        function = over_data(local, mesh, in_specs, (split, split))
        results = function(arrays_of(state.params), state.statistics, update_key(state), rows, flip)
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, replicated(mesh)), results)


def _words(tree: Grads) -> jax.Array:
    """uint32 [2] of a tree of floats: the sum of its words, and their sum with odd weights that grow with the place."""
    plain = weighted = jnp.uint32(0)
    before = 0
    for leaf in jax.tree.leaves(tree):
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
        words = lax.bitcast_convert_type(leaf, kind).reshape(-1).astype(jnp.uint32)
        weights = 2 * (jnp.arange(words.size, dtype=jnp.uint32) + jnp.uint32(before % 2**31)) + 1
        plain += words.sum(dtype=jnp.uint32)
        weighted += (words * weights).sum(dtype=jnp.uint32)
        before += math.prod(words.shape)
    return jnp.stack([plain, weighted])
