"""Adasum as an Optax transformation, for programs that call Optax inside `jax.shard_map`.

optimizer = optax.chain(optax.adam(1e-3), adasum("data"))

LARS in both forms (`multipod.optim.lars.lars`), SM3 (`multipod.optim.sm3.scale_by_sm3`) and PipeMare's corrections
(`multipod.optim.pipemare`) are Optax transformations as they are.
"""

import math

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec

from multipod.collectives.adasum import leaves
from multipod.execute.adasum.devices import combine_tree
from multipod.pytrees import Params
from multipod.topology.topology import Topology


def adasum(*axes: str) -> optax.GradientTransformation:
    """Combines updates over the devices by Adasum, tensor by tensor; every device ends with the same updates.

    Last in a chain it combines the changes that the optimizer makes of each device's own gradient, as the paper has it
    for momentum and Adam; first, it combines gradients. So gradients must not be averaged before, and the rate is that
    of one device. The optimizer's state before it stays each device's own. A tensor that is not finite on one device
    becomes NaN on all.

    Args:
      axes: names of the mesh axes of `jax.shard_map` that the devices lie along.

    Raises:
      LayoutError: when applied, more than 128 devices.

    Source: Maleki et al. 2021, arXiv:2006.02924, section 4.1; what is different here: docs/design/adasum.md.
    """

    def init(params: Params) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: Params, state: optax.EmptyState, params: Params | None = None
    ) -> tuple[Params, optax.EmptyState]:
        sizes = {axis: lax.axis_size(axis) for axis in axes}
        specs = jax.tree.map(lambda _: PartitionSpec(), updates)
        tree = leaves(Topology((math.prod(sizes.values()),)))
        return combine_tree(updates, specs, sizes, tree)[0], state

    return optax.GradientTransformation(init, update)
