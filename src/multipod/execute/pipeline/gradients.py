"""Sums of a pipeline's gradients, inside `shard_map`: over the data axes, and over the parts that share weights."""

import jax
import jax.numpy as jnp
from jax import lax

from multipod.execute.pipeline.in_flight import find_leaf
from multipod.execute.pipeline.packing import Slots
from multipod.execute.pipeline.slots import StageSlots


def sum_over_data(slots: StageSlots, gradients: tuple[Slots, ...]) -> tuple[Slots, ...]:
    """Adds gradients, as slots of each chunk, over the data axes."""
    setup = slots.setup
    if setup.data_devices == 1:
        return gradients
    if setup.over_data is None:
        return lax.psum(gradients, setup.data_axes)
    if not setup.splits:
        return setup.over_data(gradients)
    # A tensor would be gathered over the other axes before it is packed into a message.
    specs = tuple(p.splits for p in slots.weights)
    others = set(setup.mesh.axis_names) - set(setup.manual_axes)
    over_data = jax.shard_map(setup.over_data, in_specs=(specs,), out_specs=specs, axis_names=others, check_vma=False)
    return over_data(gradients)


def sum_tied(slots: StageSlots, gradients: tuple[Slots, ...], stage: jax.Array) -> tuple[Slots, ...]:
    """Adds the gradients of tied weights over the parts that hold them."""
    setup = slots.setup
    changed = [list(chunk) for chunk in gradients]
    for group in setup.tied:
        copies = []
        for part, name in group:
            c, p = divmod(part, setup.schedule.stages)
            copies.append((c, p, slots.weights[c].places[p][find_leaf(setup.weights[part], name)]))
        mine = sum(jnp.where(stage == p, changed[c][slot], 0) for c, p, slot in copies)
        total = lax.psum(mine, setup.stage_axis)
        for c, p, slot in copies:
            changed[c][slot] = jnp.where(stage == p, total, changed[c][slot])
    return tuple(map(tuple, changed))
