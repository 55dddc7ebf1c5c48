"""What an optimizer sees of tensors that are kept flat, and what becomes of its results."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax

from multipod.layout.mesh import data_axes
from multipod.layout.shares import Share, share_of
from multipod.optim.optimizer import flattens
from multipod.pytrees import Grads, OptState, Params, Pytree
from multipod.step.placement import MeshPlacement
from multipod.step.specs import arrays_of, as_kept, constrain, keep, specs_of, state_specs, whole_tensors


@dataclass(frozen=True)
class FlatUpdate:
    """The optimizer's update of tensors that lie as `MeshPlacement.shares` says, and of its state.

    An optimizer that may see flat tensors (`TakesFlatTensors`) gets its share of each as it is kept. Any other gets
    whole tensors in place of flat ones, gathered in every update: it computes the same on every device, and only its
    state is split.
    """

    placement: MeshPlacement

    @property
    def sees_flat(self) -> bool:
        """Whether the optimizer is given tensors as they are kept."""
        return flattens(self.placement.recipe.optimizer)

    @cached_property
    def state_shares(self) -> Pytree:
        """How each tensor of the optimizer's state is kept: as the parameter whose path and shape it has.

        Of other shapes, such as SM3's vectors, each is kept as a tensor of its own.
        """
        placement, mesh = self.placement, self.placement.mesh
        sizes = {axis: mesh.shape[axis] for axis in data_axes(mesh)}
        splits = placement.recipe.layout.sync.shards_update

        def other(leaf: Any) -> Share:
            return share_of(leaf.shape, sizes) if splits else Share(leaf.shape)

        return state_specs(placement.state.optimizer, placement.state.params, placement.shares, other)

    @cached_property
    def _of_parameters(self) -> Pytree:
        """Whether each tensor of the state is kept as a parameter."""
        state, params = self.placement.state.optimizer, self.placement.state.params
        return state_specs(state, params, jax.tree.map(lambda _: True, params), lambda leaf: False)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of flat tensors that a device has whole in an update, for an optimizer that needs their shape."""
        placement = self.placement
        tensors = _pairs(self.state_shares, placement.state.optimizer)
        if self.sees_flat:
            own = jax.tree.leaves(self._of_parameters)
            tensors = [tensor for tensor, of_parameter in zip(tensors, own, strict=True) if not of_parameter]
        else:  # weights and gradients too
            tensors += 2 * _pairs(placement.shares, placement.state.params)
        return sum(leaf.size * leaf.dtype.itemsize // math.prod(s.parts) for s, leaf in tensors if s.is_flat)

    def __call__(self, gradients: Grads, state: OptState, params: Params) -> tuple[Params, OptState]:
        """The parameters, as they were given, and the state after an update; on global arrays, inside `jax.jit`."""
        shares, mesh = self.placement.shares, self.placement.mesh
        if self.sees_flat:
            kept = jax.tree.map(
                lambda of_parameter, node: arrays_of(node) if of_parameter else whole_tensors(node, mesh),
                self._of_parameters,
                state,
            )
        else:
            gradients, params = (whole_tensors(as_kept(tree, shares), mesh) for tree in (gradients, params))
            kept = whole_tensors(state, mesh)
        changes, new = self.placement.optimizer.update(gradients, kept, params)
        params = optax.apply_updates(params, changes)
        if not self.sees_flat:
            params = constrain(arrays_of(keep(params, shares)), mesh, specs_of(shares))
        return params, self._kept(new)

    def _kept(self, state: OptState) -> OptState:
        def kept(of_parameter: bool, share: Share, tensor: Any) -> Any:
            return (as_kept if of_parameter and self.sees_flat else keep)(tensor, share)

        return jax.tree.map(kept, self._of_parameters, self.state_shares, state)


def _pairs(shares: Pytree, tensors: Pytree) -> list[tuple[Share, Any]]:
    return list(zip(jax.tree.leaves(shares), jax.tree.leaves(tensors), strict=True))
