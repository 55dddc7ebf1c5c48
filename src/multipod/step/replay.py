"""Gradients of the same batch on other devices, as fingerprints: to tell a bad chip from a bad batch."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from multipod.layout.mesh import batch_spec, data_devices, replicated
from multipod.step.gradients import data_specs, over_data
from multipod.step.guard import Asked, flipped
from multipod.step.program import Batch, Program
from multipod.step.state import State


def can_move(program: Program) -> bool:
    """Whether a share of a batch can be worked out by another device alone: no device needs others for it."""
    layout = program.recipe.layout
    return layout.replica_devices == 1 and not layout.sync.fsdp and data_devices(program.mesh) > 1


def fingerprints(program: Program, state: State, batch: Batch, asked: Asked, shift: int) -> tuple[np.ndarray, ...]:
    """Of the gradients of each share of the batch, when every share lies `shift` devices further than in an update.

    Returns uint32 [devices, 2], two sums modulo 2^32 over all bits of the gradients of a share (one of them knows the
    places), and bool [devices], whether a share's loss and gradients are finite; both in the order of the shares. Equal
    bits give equal fingerprints; one flipped bit never does. `state` is that before the update. A bit that `asked`
    flips stays with its device.

    Costs a gradient, and the moving of the batch; the first call compiles.
    """
    words, finite = _compiled(program)(state, batch, asked.flip, jnp.int32(shift))
    return np.roll(np.asarray(words), -shift, 0), np.roll(np.asarray(finite), -shift)


_KEPT: dict[int, tuple[Program, Any]] = {}


def _compiled(program: Program) -> Any:
    if id(program) not in _KEPT:
        _KEPT.clear()
        _KEPT[id(program)] = program, jax.jit(partial(_moved, program))
    return _KEPT[id(program)][1]


def _moved(program: Program, state: State, batch: Batch, flip: jax.Array | None, shift: jax.Array) -> Any:
    """[devices, 2] and [devices], in the order of the devices, on every one."""
    mesh, devices = program.mesh, data_devices(program.mesh)
    shardings = program.batch_shardings(batch)
    shares = jnp.roll(jnp.arange(devices, dtype=jnp.int32), shift)
    rows = {name: jnp.roll(array, shift * (array.shape[0] // devices), 0) for name, array in batch.items()}
    rows = {name: lax.with_sharding_constraint(array, shardings[name]) for name, array in rows.items()}

    def local(
        params: Any, statistics: Any, key: jax.Array, batch: Batch, share: jax.Array, flip: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(key, share[0])  # the key belongs to the share, not to the device
        gradients, (_, sums) = program._local_gradients(params, statistics, key, batch)
        gradients = flipped(gradients, flip)
        whole = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]
        return _words(gradients)[None], (jnp.stack(whole).all() & jnp.isfinite(sums["loss"]))[None]

    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.update)
    split, whole = batch_spec(mesh), PartitionSpec()
    in_specs = data_specs(mesh, program.stored_specs), whole, whole, split, split, split
    function = over_data(local, mesh, in_specs, (split, split))
    found = function(state.params, state.statistics, key, rows, shares, flip)
    return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, replicated(mesh)), found)


def _words(tree: Any) -> jax.Array:
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
