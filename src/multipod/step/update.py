"""One update of a whole model: gradients, optimizer, weights. `UpdateStep.update` is the step of the whole project."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multipod.execute.bucketing import all_reduce_tree
from multipod.execute.sums import ordered
from multipod.layout.mesh import batch_spec, data_axes, data_devices
from multipod.nn.by_example import numbered
from multipod.pytrees import Batch, Grads, OptState, Params, Pytree, Statistics
from multipod.step.accumulate import accumulate
from multipod.step.guard import Controls, UpdateGuard, count_up, keep_good
from multipod.step.loss import Aside, device_loss
from multipod.step.placement import MeshPlacement
from multipod.step.post_update import PostUpdate
from multipod.step.specs import WHOLE, arrays_of, constrain, data_specs, over_data
from multipod.step.state import State, Sums, update_key
from multipod.step.sync.sync import GradientSync


@dataclass(frozen=True)
class UpdateStep:
    """An update, made of parts that know nothing of each other.

    Attributes:
      sync: what happens to gradients and weights between the devices.
      post_update: what the model does to its own parameters afterwards.
      guard: whether the update counts.
    """

    placement: MeshPlacement
    sync: GradientSync
    post_update: PostUpdate
    guard: UpdateGuard

    def update(self, state: State, batch: Batch, controls: Controls) -> tuple[State, Sums]:
        """One update. Returns the new state and the sums of the batch's values (`metrics.objective`).

        The sums also hold `stop`: how many devices asked for one; and what the guard found out.
        """
        sync, params = self.sync, self._split(self.sync.take_shares(state.params))
        reduced, statistics, sums = self.reduced(state, batch, controls)
        good, sums = self.guard.judge(sums, sync.magnitudes(reduced), controls)
        reduced, held = sync.withhold(reduced, good)
        params, optimizer = sync.apply(reduced, state.optimizer, params)
        optimizer = constrain(optimizer, self.placement.mesh, sync.optimizer_specs(optimizer))
        params = sync.gather(self._split(params))
        learnt = self.post_update((params, statistics, optimizer), state.update + 1)
        learnt = keep_good(good, learnt, state[:3], held)
        return State(*learnt, state.key, *count_up(state, controls)), sums

    def reduced(self, state: State, batch: Batch, controls: Controls) -> tuple[Pytree, Statistics, Sums]:
        """What the devices' gradients become between them, new statistics, and the sums of the batch's values."""

        def local(
            params: Params,
            optimizer: OptState,
            statistics: Statistics,
            key: jax.Array,
            batch: Batch,
            stop: jax.Array,
            flip: jax.Array | None,
        ) -> tuple[Pytree, Statistics, Sums]:
            gradients, (statistics, sums) = device_gradients(self.placement, sync, params, statistics, key, batch)
            gradients = self.guard.disturb(gradients, flip)
            reduced, report = sync.reduce(gradients, params, optimizer)
            statistics, sums = reduce_metrics(mesh, statistics, sums | {"stop": stop.sum()})
            return reduced, statistics, sums | _per_example(report, sums)

        mesh, sync, rows = self.placement.mesh, self.sync, batch_spec(self.placement.mesh)
        in_specs = data_specs(mesh, sync.stored_specs), rows, WHOLE, WHOLE, rows, rows, rows
        function = over_data(local, mesh, in_specs, (sync.reduced_specs, WHOLE, WHOLE))
        optimizer, key = sync.visible_state(state.optimizer), update_key(state)
        params = arrays_of(state.params)
        return function(params, optimizer, state.statistics, key, numbered(batch), controls.stop, controls.flip)

    def _split(self, params: Params) -> Params:
        return constrain(params, self.placement.mesh, self.sync.specs)


def device_gradients(
    placement: MeshPlacement,
    sync: GradientSync,
    params: Params,
    statistics: Statistics,
    key: jax.Array,
    batch: Batch,
) -> tuple[Grads, Aside]:
    """Gradients of this device's share of the batch's mean loss, with new statistics and sums; inside `over_data`.

    `params` are as they are stored, flat tensors as plain arrays.
    """

    def step(params: Params, statistics: Statistics, key: jax.Array, rows: Batch) -> tuple[Grads, Aside]:
        return sync.differentiate(device_loss(placement, statistics, key, rows), params, rows)

    step_on_stored = sync.with_weights(accumulate(step, placement.recipe.accumulate))
    return step_on_stored(params, statistics, key, batch)


def reduce_metrics(mesh: Any, statistics: Statistics, sums: Sums) -> tuple[Statistics, Sums]:
    """Statistics averaged and sums added over the mesh, in one message for each dtype; inside `over_data`.

    Statistics that pool over the mesh themselves are the same everywhere, and stay as they are.
    """
    devices = data_devices(mesh)
    leaves = jax.tree.leaves(statistics)
    structure: Any = jax.tree.structure(statistics)
    floats = [leaf / devices for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    means, sums = all_reduce_tree((floats, sums), ordered(data_axes(mesh)), devices)
    averaged = iter(means)
    merged = [next(averaged) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]
    return structure.unflatten(merged), sums


def _per_example(report: Sums, sums: Sums) -> Sums:
    """Numbers of a report times the count of examples, which means are divided by."""
    return {name: value * sums["count"] if value.ndim == 0 else value for name, value in report.items()}
