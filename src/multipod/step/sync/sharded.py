"""Weights that stay split between updates: FSDP (ZeRO-3), and float32 masters under weights of a smaller type."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from multipod.pytrees import Batch, Grads, OptState, Params, Pytree, Statistics
from multipod.recipe.recipe import Recipe
from multipod.step.accumulate import GradientStep
from multipod.step.loss import Aside, Loss
from multipod.step.specs import arrays_of, as_kept
from multipod.step.sync.sync import GradientSync, Report, combine_alone

GATHERED = "gathered"
"""The name of weights that were gathered for use: what the backward pass gathers again and does not keep."""


class _StoredShares(GradientSync):
    """Weights lie between updates as they do during them."""

    @property
    def stored_shares(self) -> Pytree:
        """How each parameter is kept between updates: as during them."""
        return self.shares

    def combine(self, gradients: Grads) -> tuple[Grads, Report]:
        """The sum of the gradients over the data axes, in shares."""
        return self.reduction.sum(gradients), {}

    def gather(self, params: Params) -> Params:
        """The shares as they are: they are gathered when they are used."""
        return as_kept(params, self.shares)

    def take_shares(self, params: Params) -> Params:
        """The shares that are stored."""
        return arrays_of(params)

    def sum_alone(self) -> Callable[[Params], Params]:
        """The gathering and the sum as a program of its own, to be timed; takes stored parameters."""
        return jax.jit(lambda params: combine_alone(self, self.all_gather(self.take_shares(params))))

    def _gather_for_use(self, shares: Params) -> Params:
        """Whole weights, a layer in a message; their gradients become sums of shares."""
        leaves, structure = jax.tree.flatten(shares)
        for places in self.placement.layers:
            layer = self.reduction.of(places).gather_for_use([leaves[k] for k in places])
            for k, tensor in zip(places, layer, strict=True):
                leaves[k] = checkpoint_name(tensor, GATHERED)
        return jax.tree.unflatten(structure, leaves)


class FullySharded(_StoredShares):
    """FSDP (`Sync.fsdp`, arXiv:1910.02054, stage 3).

    The weights of a layer are gathered before they are used, and again in the backward pass; their gradients are summed
    to shares where they are made.
    """

    @staticmethod
    def serves(recipe: Recipe) -> bool:
        """Whether the weights are to be kept split."""
        return recipe.layout.sync.fsdp

    def differentiate(self, loss: Loss, params: Params, batch: Batch) -> tuple[Grads, Aside]:
        """Summed gradients of the shares, a pass that gathers each layer's weights when it needs them."""
        forget = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
        of_shares = jax.checkpoint(lambda shares: loss(self._gather_for_use(shares)), policy=forget)
        return jax.grad(of_shares, has_aux=True)(params)

    def reduce(self, gradients: Grads, params: Params, optimizer: OptState) -> tuple[Grads, Report]:
        """The gradients as they are: their derivative has summed them."""
        return gradients, {}


class ShardedMasters(_StoredShares):
    """ZeRO-1 with `Sync.gather_dtype`: float32 weights stay split, and each update gathers them in a smaller type."""

    @staticmethod
    def serves(recipe: Recipe) -> bool:
        """Whether updated weights are gathered in a type of their own."""
        return recipe.layout.sync.stores_shards

    def with_weights(self, step: GradientStep) -> GradientStep:
        """`step` on gathered weights; its gradients in the type of the shares."""

        def on_shares(params: Params, statistics: Statistics, key: jax.Array, batch: Batch) -> tuple[Grads, Aside]:
            gradients, aside = step(self._gather_for_use(params), statistics, key, batch)
            return jax.tree.map(lambda share, gradient: gradient.astype(share.dtype), params, gradients), aside

        return on_shares
