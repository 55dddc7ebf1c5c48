"""Small DLRMs on generated clicks whose best AUC is known; about a minute each on two cores."""

from dataclasses import replace

from multipod.data.clicks.multi_hot import MultiHotClicks
from multipod.data.clicks.synthetic import Synthetic
from multipod.data.source import Data
from multipod.metrics.binary import BinaryClassification
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_interactions import CrossInteraction
from multipod.optim.adagrad import Adagrad
from multipod.optim.rates import Constant
from multipod.recipe.recipe import Recipe


def dlrm_small() -> Recipe:
    """DLRM, its three largest tables as tensor trains, one epoch of 300,000 generated clicks."""
    data = Synthetic()
    model = Dlrm(rows=data.rows, bottom=(64,), top=(64,), tt_rows=20_000, tt_rank=8)
    return _recipe("dlrm-small", model, data, data.examples)


def dlrm_v2_small() -> Recipe:
    """DLRM-DCNv2 in small: up to 8 ids a field, a cross network of rank 32, one epoch of 300,000 generated clicks."""
    clicks, hots = Synthetic(), (8, 4, 2, 3, 1, 2, 1, 1)
    model = Dlrm(rows=clicks.rows, bottom=(64,), top=(64,), hots=hots, interaction=CrossInteraction(2, 32))
    recipe = _recipe("dlrm-v2-small", model, MultiHotClicks(clicks, hots), clicks.examples)
    return replace(recipe, optimizer=Adagrad(Constant(0.04), sparse=True))  # its tables are dense, and large


def _recipe(name: str, model: Dlrm, data: Data, examples: int) -> Recipe:
    batch = 512
    updates = examples // batch
    return Recipe(
        name=name,
        model=model,
        data=data,
        objective=BinaryClassification(),
        optimizer=Adagrad(Constant(0.04)),
        batch=batch,
        updates=updates,
        evaluate_every=updates // 20,  # as MLPerf's DLRM is evaluated: twenty times an epoch
        evaluation_batch=10_000,
        checkpoint_every=updates // 2,
    )
