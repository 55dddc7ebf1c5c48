"""A closer look at an update that was bad: at its examples one by one, its gradients tensor by tensor, its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multipod.layout.mesh import batch_spec, replicated
from multipod.nn.logical_axes import logical_axis_rules
from multipod.nn.padding import padding_mask
from multipod.pytrees import Batch, Params, Pytree, Statistics
from multipod.step.guard import Controls
from multipod.step.specs import WHOLE, data_specs, over_data, whole_tensors
from multipod.step.state import State
from multipod.step.update import UpdateStep


@dataclass(frozen=True)
class Examination:
    """Programs that look at one batch and one state. Each is compiled by its first call, and gives nothing up.

    Attributes:
      step: the update that was bad.
      fresh: the state before the first update, to be traced.
      shardings: of that state.
    """

    step: UpdateStep
    fresh: Callable[[], State]
    shardings: State

    def first(self) -> State:
        """Returns the state before the first update without its optimizer's: weights that no rate has moved."""
        shardings = self.shardings._replace(optimizer=None)
        return jax.jit(lambda: self.fresh()._replace(optimizer=None), out_shardings=shardings)()

    def losses(self, state: State, batch: Batch) -> np.ndarray:
        """Returns each example's own loss, float32 [rows]; the model is as in evaluation: none disturbs another."""
        return np.asarray(self._losses(state._replace(optimizer=None), batch))

    def gradients(self, state: State, batch: Batch, controls: Controls) -> dict[str, bool]:
        """Returns whether the summed gradient of each tensor is finite, by its name, in the order of the parameters."""
        return {name: bool(finite) for name, finite in jax.device_get(self._gradients(state, batch, controls))}

    def inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Returns which examples of each array of floats have numbers that are not finite: bool [rows], by field."""
        floats = {name: array for name, array in batch.items() if jnp.issubdtype(array.dtype, jnp.floating)}
        return {name: np.asarray(rows) for name, rows in self._inputs(floats).items()}

    def largest(self, state: State) -> dict[str, float]:
        """Returns the largest magnitude in each parameter, NaN or infinite where one is, by its name."""
        named = _named(state.params)
        return dict(zip(named, map(float, self._largest(list(named.values()))), strict=True))

    @cached_property
    def _losses(self) -> Any:
        placement, mesh = self.step.placement, self.step.placement.mesh
        recipe, batches = placement.recipe, placement.batches

        def local(params: Params, statistics: Statistics, batch: Batch) -> jax.Array:
            batch = dict(batch)
            mask = batch.pop("mask", None)
            with padding_mask(mask), logical_axis_rules(mesh, placement.splits):
                rows = batches.images.cut(batch, batches.examples[-1])
                outputs, _ = recipe.model.apply(params, statistics, rows, train=False, key=jax.random.key(0))
                return recipe.objective(outputs, rows)["loss"].astype(jnp.float32)

        def run(state: State, batch: Batch) -> jax.Array:
            specs = data_specs(mesh, placement.base), WHOLE, batch_spec(mesh)
            function = over_data(local, mesh, specs, batch_spec(mesh))
            return self._everywhere(function(whole_tensors(state.params, mesh), state.statistics, batch))

        return jax.jit(run)

    @cached_property
    def _gradients(self) -> Callable[[State, Batch, Controls], list[tuple[str, Any]]]:
        names: list[str] = []

        def run(state: State, batch: Batch, controls: Controls) -> list[jax.Array]:
            tensors = _named(self.step.sync.magnitudes(self.step.reduced(state, batch, controls)[0]))
            names[:] = tensors
            return [self._everywhere(jnp.isfinite(tensor).all()) for tensor in tensors.values()]

        compiled = jax.jit(run)

        def flags(state: State, batch: Batch, controls: Controls) -> list[tuple[str, Any]]:
            finite = compiled(state, batch, controls)
            return list(zip(names, finite, strict=True))

        return flags

    @cached_property
    def _inputs(self) -> Any:
        def spoiled(array: jax.Array) -> jax.Array:
            return self._everywhere(~jnp.isfinite(array).reshape(array.shape[0], -1).all(1))

        return jax.jit(lambda batch: jax.tree.map(spoiled, batch))

    @cached_property
    def _largest(self) -> Any:
        return jax.jit(lambda tensors: [self._everywhere(jnp.abs(tensor).max()) for tensor in tensors])

    def _everywhere(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, replicated(self.step.placement.mesh))


def _named(tree: Pytree) -> dict[str, jax.Array]:
    """The arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves if leaf.size}
