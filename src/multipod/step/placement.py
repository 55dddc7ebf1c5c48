"""Where a whole model lies on a mesh, as plain data: nothing is compiled or allocated."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from multipod.layout.check import place_tensors
from multipod.layout.mesh import data_axes, data_devices, names_of, splits_of, to_spec
from multipod.layout.rules import ParamTensor, Placement
from multipod.layout.shares import Share, share_of, update_spec
from multipod.nn.dims import dims_of
from multipod.nn.model import Rearranging
from multipod.optim.optimizer import leading_dims
from multipod.pytrees import Specs
from multipod.recipe.recipe import Recipe
from multipod.step.batches import BatchPlacement
from multipod.step.state import State, fresh_state, optimizer_of


@dataclass(frozen=True)
class MeshPlacement:
    """A recipe's model, state and batches on a mesh, before anything is chosen about how gradients are summed."""

    recipe: Recipe
    mesh: Mesh | AbstractMesh

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The recipe's Optax transformation."""
        return optimizer_of(self.recipe)

    @cached_property
    def state(self) -> State:
        """The recipe's first state as shapes without shardings."""
        return jax.eval_shape(lambda: fresh_state(self.recipe, self.optimizer))

    @property
    def devices(self) -> int:
        """The number of devices that a batch is split over."""
        return data_devices(self.mesh)

    @cached_property
    def batches(self) -> BatchPlacement:
        """Where batches lie."""
        return BatchPlacement(self.recipe, self.mesh, self.splits)

    @cached_property
    def splits(self) -> dict[str, tuple[str, ...]]:
        """The inner axes that split dims of a name: of activations, and of the weights where no path says otherwise."""
        return splits_of(self.recipe.layout, self.mesh)

    @cached_property
    def tensors(self) -> dict[str, ParamTensor]:
        """The parameters by their path, in the order of the tree's leaves."""
        dims = dims_of(self.recipe.model)
        leaves = jax.tree_util.tree_flatten_with_path(self.state.params)[0]
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        return {name: ParamTensor(leaf.shape, dims.get(name, ()), leaf.dtype.itemsize) for name, leaf in named.items()}

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """How the axes inside the tiles split each parameter.

        Raises:
          LayoutError: all that is wrong with the layout for this model.
        """
        return place_tensors(self.recipe.layout, self.tensors, set(self.batches.images.dims))

    @cached_property
    def base(self) -> Specs:
        """How the axes inside the tiles split each parameter, as `PartitionSpec`s."""
        structure: Any = jax.tree.structure(self.state.params)
        return structure.unflatten([to_spec(placed.axes) for placed in self.placements.values()])

    @cached_property
    def shares(self) -> Specs:
        """How each parameter is kept during the update: a `Share` for each, with `base` and the data axes in it."""
        params: Any = self.state.params
        if not self.recipe.layout.sync.shards_update:
            return jax.tree.map(lambda leaf, base: Share(leaf.shape, base), params, self.base)
        names = jax.tree.unflatten(jax.tree.structure(params), list(self.tensors))
        return jax.tree.map(lambda name, leaf, base: self._share(name, leaf.shape, base), names, params, self.base)

    def _share(self, name: str, shape: tuple[int, ...], base: Any) -> Share:
        sizes = {axis: self.mesh.shape[axis] for axis in data_axes(self.mesh) if axis not in names_of(base)}
        model = self.recipe.model
        if isinstance(model, Rearranging) and name in model.rearranged_params():
            return Share(shape, update_spec(shape, sizes, base))  # its rows are moved between updates
        return share_of(shape, sizes, base, self.mesh.shape, leading_dims(self.recipe.optimizer, name))

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The places of each layer's parameters: what is gathered together before it is used.

        Parameters belong together whose paths agree up to their last number, or, without any, in the first word.
        """
        groups: dict[tuple[str, ...], list[int]] = {}
        for place, name in enumerate(self.tensors):
            words = name.replace("/", ".").split(".")
            numbers = [k for k, word in enumerate(words) if word.isdecimal()]
            groups.setdefault(tuple(words[: numbers[-1] + 1] if numbers else words[:1]), []).append(place)
        return tuple(map(tuple, groups.values()))
