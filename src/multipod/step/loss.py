"""What a device minimises: its share of a batch's mean loss."""

from collections.abc import Callable
from typing import Any

import jax

from multipod.metrics.objective import masked_sums
from multipod.nn.by_example import NUMBERS, numbered_examples
from multipod.nn.logical_axes import logical_axis_rules
from multipod.nn.padding import padding_mask
from multipod.pytrees import Batch, Params, Statistics
from multipod.step.agreement import refusing_misfits
from multipod.step.placement import MeshPlacement
from multipod.step.state import Sums

Aside = tuple[Statistics, Sums]
"""What a forward pass in training gives beside the loss: new statistics, and sums of the objective's values."""
Loss = Callable[[Params], tuple[jax.Array, Aside]]


def device_loss(placement: MeshPlacement, statistics: Statistics, key: jax.Array, batch: Batch) -> Loss:
    """The function from whole weights to the share of the mean loss that these rows of the batch have.

    The *sum* of the devices' losses is the mean over the batch.
    """
    recipe, images = placement.recipe, placement.batches.images
    batch = dict(batch)
    mask, numbers = batch.pop("mask", None), batch.pop(NUMBERS, None)

    def loss(params: Params) -> tuple[jax.Array, Aside]:
        rules = logical_axis_rules(placement.mesh, placement.splits)
        with padding_mask(mask), numbered_examples(numbers, key) as own, rules:
            rows = images.cut(batch, placement.batches.examples[-1])
            with refusing_misfits(recipe, recipe.model, rows):
                outputs, new = recipe.model.apply(params, statistics, rows, train=True, key=own)
            with refusing_misfits(recipe, recipe.objective, rows):
                sums = masked_sums(recipe.objective(outputs, rows), mask)
        return sums["loss"] / recipe.batch, (new, sums)

    return loss


def gradient_order(placement: MeshPlacement) -> tuple[int, ...]:
    """The places of the parameters in the order in which the backward pass makes their gradients, from a trace."""
    state, key = placement.state, jax.eval_shape(lambda: jax.random.key(0))

    def gradients(params: Params, statistics: Statistics, key: jax.Array, batch: Batch) -> Any:
        return jax.grad(device_loss(placement, statistics, key, batch), has_aux=True)(params)[0]

    batch = placement.batches.device_shapes()
    jaxpr = jax.make_jaxpr(gradients)(state.params, state.statistics, key, batch).jaxpr
    made = {id(out): place for place, equation in enumerate(jaxpr.eqns) for out in equation.outvars}
    return tuple(sorted(range(len(jaxpr.outvars)), key=lambda k: made.get(id(jaxpr.outvars[k]), -1)))
