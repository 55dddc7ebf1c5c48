"""Which way of summing a recipe asks for."""

from multipod.step.checks import check_step
from multipod.step.placement import MeshPlacement
from multipod.step.sync.adasum import AdasumOfChanges, AdasumOfGradients
from multipod.step.sync.sharded import FullySharded, ShardedMasters
from multipod.step.sync.summed import SummedGradients
from multipod.step.sync.sync import GradientSync
from multipod.step.sync.touched_rows import TouchedRows

WAYS: tuple[type[GradientSync], ...] = (
    TouchedRows,
    AdasumOfChanges,
    AdasumOfGradients,
    FullySharded,
    ShardedMasters,
    SummedGradients,
)
"""The ways, special ones first: the first that `serves` a recipe is its own."""


def sync_of(placement: MeshPlacement) -> GradientSync:
    """The way in which the recipe of `placement` sums its gradients.

    Raises:
      LayoutError, RecipeError: what the recipe asks for does not go together.
    """
    check_step(placement.recipe, lambda: placement.batches.device_rows)
    return next(way for way in WAYS if way.serves(placement.recipe)).of(placement)
