"""What ZeRO-1 and FSDP do not split over the data devices, in bytes."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from multipod.layout.mesh import is_split
from multipod.layout.shares import Share
from multipod.step.specs import data_specs
from multipod.step.sync.sync import GradientSync


def unshared_bytes(sync: GradientSync) -> dict[str, int]:
    """Bytes on each device that sharding costs beyond equal shares, by what they are; what is 0 is left out.

    `whole`: tensors of optimizer state, and of stored weights under FSDP, that every data device keeps, but for numbers
    without dims. `padding`: zeros behind flat tensors. `gathered`: flat tensors that are made whole in every update
    for an optimizer that needs their shape (`TakesFlatTensors`). Empty where nothing is sharded.
    """
    layout = sync.placement.recipe.layout
    if not layout.sync.shards_update or layout.sync.local_state:
        return {}
    whole = padding = 0
    for share, leaf in _kept(sync):
        each = leaf.dtype.itemsize / math.prod(share.parts)
        if share.is_flat:
            padding += math.ceil((math.prod(share.kept) - leaf.size) * each / share.devices)
        elif leaf.ndim and not is_split(data_specs(sync.placement.mesh, share.spec)):
            whole += int(leaf.size * each)
    found = {"whole": whole, "padding": padding, "gathered": sync.flat_update.gathered_bytes}
    return {name: count for name, count in found.items() if count}


def _kept(sync: GradientSync) -> Iterator[tuple[Share, Any]]:
    state = sync.placement.state
    trees = [(sync.flat_update.state_shares, state.optimizer)]
    if sync.placement.recipe.layout.sync.stores_shards:
        trees.append((sync.shares, state.params))
    for shares, leaves in trees:
        yield from zip(jax.tree.leaves(shares), jax.tree.leaves(leaves), strict=True)
