"""One program for stages that hold different parts: a conditional with a branch for each kind of part."""

from collections.abc import Callable, Hashable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from multipod.execute.pipeline.setup import PipelineSetup
from multipod.execute.pipeline.slots import StageSlots
from multipod.pytrees import Pytree

KindOf = Callable[[int], Hashable]
"""From the number of a part to its kind: parts of one kind share a branch."""


def switch_stages(
    setup: PipelineSetup,
    chunk: int,
    stage: jax.Array,
    kind_of: KindOf,
    branch: Callable[..., Pytree],
    *operands: Pytree,
) -> Pytree:
    """Runs `branch(stage, *operands)` for the device's own stage, compiled once for each kind of part."""
    kinds = [kind_of(setup.schedule.part(p, chunk)) for p in range(setup.schedule.stages)]
    distinct = list(dict.fromkeys(kinds))
    branches = [partial(branch, kinds.index(kind)) for kind in distinct]
    if len(branches) == 1:
        return branches[0](*operands)
    which = jnp.asarray([distinct.index(kind) for kind in kinds], jnp.int32)[stage]
    return lax.switch(which, branches, *operands)


def kind_by_function(setup: PipelineSetup, n: int) -> Hashable:
    """The kind of part n by its function, its shapes, and whether it is the first or the last."""
    kind = setup.parts[n].kind
    return n if kind is None else ("kind", kind, n == 0, n == len(setup.parts) - 1)


def kind_by_optimizer(slots: StageSlots, n: int) -> Hashable:
    """The kind of part n by its update, whatever its function: one branch for all is no conditional.

    A conditional's results are new arrays, as large as the weights and the optimizer's state (JAX 0.10.2).
    """
    (c, p), part = divmod(n, slots.setup.schedule.stages), slots.setup.parts[n]
    trees = tuple((packing.places[p], packing.structures[p]) for packing in (slots.weights[c], slots.states[c]))
    return trees, id(part.optimizer), id(part.backward_weights)
