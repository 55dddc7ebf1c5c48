"""Data parallelism and ZeRO-1: gradients are summed, and weights are whole on every device when they are used."""

from multipod.pytrees import Grads
from multipod.recipe.recipe import Recipe
from multipod.step.sync.sync import GradientSync, Report


class SummedGradients(GradientSync):
    """Sums gradients, whole or (`layout.sync.shards_update`, ZeRO-1) in shares, and gathers the updated weights."""

    @staticmethod
    def serves(recipe: Recipe) -> bool:
        """Whatever the recipe: this is the plain way."""
        return True

    def combine(self, gradients: Grads) -> tuple[Grads, Report]:
        """The sum of the gradients over the data axes."""
        return self.reduction.sum(gradients), {}
