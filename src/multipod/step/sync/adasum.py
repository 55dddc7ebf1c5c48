"""Adasum between devices: of their gradients, or of the changes that every device's own optimizer makes."""

import abc
import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from multipod.collectives.adasum import leaves
from multipod.execute.adasum.devices import combine_tree
from multipod.execute.adasum.operator import refuse_poisoned
from multipod.layout.axes import DATA_AXES
from multipod.layout.mesh import batch_spec, topology_of
from multipod.pytrees import Grads, OptState, Params, Pytree, Specs
from multipod.recipe.recipe import Recipe
from multipod.step.specs import data_specs, tensor_names
from multipod.step.state import Sums
from multipod.step.sync.sync import GradientSync, Report
from multipod.topology.topology import Topology

RESUME = "The weights are lost: lower the rate, or see which examples do that, and go on from the last checkpoint."


class _Adasum(GradientSync, abc.ABC):
    """Combines trees by Adasum as the layout names it, and refuses what is not finite."""

    @property
    def _axes(self) -> dict[str, int]:
        return {axis: self.placement.mesh.shape[axis] for axis in DATA_AXES}

    @cached_property
    def _mean_axes(self) -> tuple[str, ...]:
        """The axes over which the mean is taken instead: those inside a row of the mesh."""
        return DATA_AXES[1:] if self.placement.recipe.layout.sync.gradient_sum == "adasum-rows" else ()

    def _combined(self, tree: Pytree) -> tuple[Pytree, Report]:
        layout = self.placement.recipe.layout
        tree_of = Topology((self._axes[DATA_AXES[0]],)) if self._mean_axes else topology_of(layout, self.placement.mesh)
        flat = jax.tree.map(lambda share, tensor: share.local.flatten(tensor), self.shares, tree)
        combined, report = combine_tree(flat, self.specs, self._axes, leaves(tree_of), self._mean_axes)
        values = {"poisoned": report.poisoned}
        if layout.sync.report_orthogonality:
            names = tensor_names(self.specs)
            values |= {f"orthogonality/{name}": value for name, value in zip(names, report.orthogonality, strict=True)}
        return combined, values

    def check(self, sums: Sums) -> None:
        """Refuses an update in which a device had tensors that are not finite.

        Raises:
          PoisonedError: names the tensors and the devices.
        """
        if "poisoned" in sums:
            refuse_poisoned("update", np.asarray(sums["poisoned"]), tensor_names(self.specs), RESUME)


class AdasumOfGradients(_Adasum):
    """Combines the devices' gradients; one optimizer takes the result."""

    @staticmethod
    def serves(recipe: Recipe) -> bool:
        """Whether gradients are combined by Adasum."""
        return recipe.layout.sync.combines

    def combine(self, gradients: Grads) -> tuple[Grads, Report]:
        """Adasum of the devices' shares of the mean loss's gradient, scaled to be the mean where all are parallel."""
        combined, report = self._combined(gradients)
        scale = math.prod(self._axes.values())
        return jax.tree.map(lambda tensor: tensor * scale, combined) if scale != 1 else combined, report


class AdasumOfChanges(_Adasum):
    """Combines the changes that the devices' own optimizers make, each from its own gradients and its own state.

    What `reduce` returns are the combined changes and the device's own state (arXiv:2006.02924, section 4.1). The
    optimizer's state is kept with a first dim of devices.
    """

    @staticmethod
    def serves(recipe: Recipe) -> bool:
        """Whether every device has an optimizer state of its own."""
        return recipe.layout.sync.local_state

    def fresh(self, optimizer: OptState) -> OptState:
        """One first state for each device."""
        devices = self.placement.devices
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (devices, *leaf.shape)), optimizer)

    def optimizer_specs(self, optimizer: OptState) -> Specs:
        """Each device's state on that device."""
        return jax.tree.map(lambda _: batch_spec(self.placement.mesh), optimizer)

    def visible_state(self, optimizer: OptState) -> OptState:
        """The optimizers' states: they run inside `over_data`."""
        return optimizer

    def combine(self, gradients: Grads) -> tuple[Grads, Report]:
        """Adasum of the devices' changes."""
        return self._combined(gradients)

    def reduce(self, gradients: Grads, params: Params, optimizer: OptState) -> tuple[Pytree, Report]:
        """The combined changes, and the state of this device's optimizer after it has seen its own mean's gradient."""
        devices = self.placement.devices
        gradients = jax.tree.map(lambda tensor: tensor * devices, self.before_sum(gradients))
        local: Any = jax.tree.map(lambda leaf: leaf[0], optimizer)
        changes, local = self.placement.optimizer.update(gradients, local, params)
        changes, report = self.combine(changes)
        return (changes, jax.tree.map(lambda leaf: leaf[None], local)), report

    @property
    def reduced_specs(self) -> Specs:
        """How the data axes split the changes, and the optimizers' states."""
        return data_specs(self.placement.mesh, self.specs), batch_spec(self.placement.mesh)

    def apply(self, reduced: Pytree, optimizer: OptState, params: Params) -> tuple[Params, OptState]:
        """The parameters with the combined changes, and the optimizers' states."""
        changes, optimizer = reduced
        return optax.apply_updates(params, changes), optimizer

    def magnitudes(self, reduced: Pytree) -> Pytree:
        """The combined changes."""
        return reduced[0]
