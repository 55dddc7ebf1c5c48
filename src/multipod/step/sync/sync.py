"""`GradientSync`: what happens to gradients and weights between the devices, the replaceable part of a step."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import jax

from multipod.layout.mesh import is_split
from multipod.layout.shares import Share
from multipod.optim.optimizer import ActsBeforeSum
from multipod.pytrees import Batch, Grads, OptState, Params, Pytree, Specs
from multipod.recipe.recipe import Recipe
from multipod.step.accumulate import GradientStep
from multipod.step.loss import Aside, Loss, gradient_order
from multipod.step.placement import MeshPlacement
from multipod.step.specs import arrays_of, data_specs, flat_specs, keep, over_data, specs_of
from multipod.step.state import Sums
from multipod.step.sync.flat_update import FlatUpdate
from multipod.step.sync.reduction import Reduction

Report = dict[str, jax.Array]
"""What a sum found out, the same on every device: `poisoned`, bool [devices, tensors]; numbers `orthogonality/NAME`."""


@dataclass(frozen=True)
class GradientSync(abc.ABC):
    """One way of summing gradients, and of keeping what is updated. A new way is a class and a line in `choose.WAYS`.

    An update calls, on each device inside `over_data`: `with_weights`, `differentiate`, `reduce`; and on global arrays
    outside of it: `apply`, `gather`. What a class does not say is as in the plain way: weights and optimizer state are
    kept by every device, or, under `layout.sync.shards_update`, the optimizer's state is split over them (ZeRO-1).
    So it has a method for each thing that some way does otherwise; nearly all are a line or two.

    Attributes:
      order: the places of the parameters in the order in which their gradients are sent; empty is their own order.
    """

    placement: MeshPlacement
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, placement: MeshPlacement) -> Self:
        """This way for a placement; buckets are sent in the order in which the backward pass fills them."""
        return cls(placement, gradient_order(placement) if placement.recipe.layout.sync.bucket_bytes else ())

    @staticmethod
    @abc.abstractmethod
    def serves(recipe: Recipe) -> bool:
        """Whether this is the way that the recipe asks for, if none before it in `choose.WAYS` is.

        Raises:
          LayoutError, RecipeError: it is, and something else in the recipe does not go with it.
        """

    @abc.abstractmethod
    def combine(self, gradients: Grads) -> tuple[Grads, Report]:
        """Each device's `gradients` to those of all, kept as `shares` says; inside `over_data`."""

    # How what is kept lies on the mesh.

    @property
    def shares(self) -> Pytree:
        """How each parameter is kept during the update: a `Share` for each."""
        return self.placement.shares

    @cached_property
    def stored_shares(self) -> Pytree:
        """How each parameter is kept between updates."""
        return jax.tree.map(
            lambda leaf, base: Share(leaf.shape, base), self.placement.state.params, self.placement.base
        )

    @property
    def specs(self) -> Specs:
        """The `PartitionSpec` of each parameter during the update, in the shape in which it is kept then."""
        return specs_of(self.shares)

    @property
    def stored_specs(self) -> Specs:
        """The `PartitionSpec` of each parameter between updates, in the shape in which it is kept."""
        return specs_of(self.stored_shares)

    @cached_property
    def flat_update(self) -> FlatUpdate:
        """The optimizer on tensors as they are kept."""
        return FlatUpdate(self.placement)

    def fresh(self, optimizer: OptState) -> OptState:
        """The optimizer's first state in the form in which it is kept."""
        return keep(optimizer, self.flat_update.state_shares)

    def optimizer_specs(self, optimizer: OptState) -> Specs:
        """The `PartitionSpec` of each tensor of the optimizer's state, as it is kept."""
        del optimizer  # the shapes of whole tensors decide
        return specs_of(self.flat_update.state_shares)

    # On each device, inside `over_data`.

    def with_weights(self, step: GradientStep) -> GradientStep:
        """`step`, which takes weights as `differentiate` does, for weights as they are stored."""
        return step

    def differentiate(self, loss: Loss, params: Params, batch: Batch) -> tuple[Grads, Aside]:
        """The gradients of `loss`, which takes whole weights, for these rows of the batch."""
        return jax.grad(loss, has_aux=True)(params)

    def visible_state(self, optimizer: OptState) -> OptState:
        """What `reduce` needs of the optimizer's state, split over the data axes; () for nothing."""
        return ()

    def reduce(self, gradients: Grads, params: Params, optimizer: OptState) -> tuple[Pytree, Report]:
        """Each device's gradients to what `apply` takes; `optimizer` is as `visible_state` gives it."""
        return self.combine(self.before_sum(gradients))

    def before_sum(self, gradients: Grads) -> Grads:
        """What the optimizer does to each device's gradients before they are summed, if it has such a method."""
        optimizer = self.placement.recipe.optimizer
        if not isinstance(optimizer, ActsBeforeSum):
            return gradients
        return optimizer.before_sum(gradients, self.placement.devices)

    @property
    def reduced_specs(self) -> Specs:
        """How the data axes split the result of `reduce`."""
        return data_specs(self.placement.mesh, self.specs)

    # On global arrays.

    def apply(self, reduced: Pytree, optimizer: OptState, params: Params) -> tuple[Params, OptState]:
        """The parameters, kept as `shares` says, and the optimizer's state, updated by the result of `reduce`."""
        return self.flat_update(reduced, optimizer, params)

    def magnitudes(self, reduced: Pytree) -> Pytree:
        """The tensors of the result of `reduce` whose norm says how large the update is."""
        return reduced

    def withhold(self, reduced: Pytree, good: jax.Array | None) -> tuple[Pytree, frozenset[str]]:
        """The result of `reduce`, and the parameters that it does not change where the update is not good.

        For ways that can leave values alone more cheaply than by choosing between new and old ones.
        """
        return reduced, frozenset()

    def gather(self, params: Params) -> Params:
        """Updated parameters, arrays that lie as `shares` says, as a state stores them."""
        return self.all_gather(params)

    def take_shares(self, params: Params) -> Params:
        """Parameters as a state stores them as arrays that lie as `shares` says."""
        return arrays_of(keep(params, self.shares))

    def all_gather(self, params: Params) -> Params:
        """Parameters of which each device has the share that `shares` says, whole over the data axes."""
        mesh, shares = self.placement.mesh, data_specs(self.placement.mesh, self.specs)
        if not any(map(is_split, flat_specs(shares))):
            return params
        return over_data(self.reduction.gather, mesh, (shares,), data_specs(mesh, self.placement.base))(params)

    def check(self, sums: Sums) -> None:
        """Refuses an update of which the sums tell that a device's tensors were not finite.

        Raises:
          PoisonedError: names the tensors and the devices.
        """
        del sums  # of sums nothing is known

    def sum_alone(self) -> Callable[[Params], Params]:
        """The sum and the gathering as a program of its own, to be timed; takes stored parameters for gradients."""
        return jax.jit(lambda params: self.all_gather(combine_alone(self, params)))

    @cached_property
    def reduction(self) -> Reduction:
        """The messages in which trees are summed and gathered."""
        placement = self.placement
        return Reduction(placement.recipe.layout, placement.mesh, self.shares, placement.base, self.order)


def combine_alone(sync: GradientSync, params: Params) -> Params:
    """`GradientSync.combine` of global arrays that are whole over the data axes."""
    mesh = sync.placement.mesh
    whole, shares = (data_specs(mesh, specs) for specs in (sync.placement.base, sync.specs))
    return over_data(lambda tree: sync.combine(tree)[0], mesh, (whole,), shares)(params)
