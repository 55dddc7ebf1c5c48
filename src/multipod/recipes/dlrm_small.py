"""A small DLRM with tensor-train tables on generated clicks whose best AUC is known; under a minute on two cores."""

from multipod.data.clicks.synthetic import Synthetic
from multipod.metrics.binary import BinaryClassification
from multipod.models.dlrm import Dlrm
from multipod.optim.adagrad import Adagrad
from multipod.optim.rates import Constant
from multipod.recipe.recipe import Recipe


def dlrm_small() -> Recipe:
    """DLRM, its three largest tables as tensor trains, one epoch of 300,000 generated clicks."""
    data = Synthetic()
    batch = 512
    updates = data.examples // batch
    return Recipe(
        name="dlrm-small",
        model=Dlrm(rows=data.rows, bottom=(64,), top=(64,), tt_rows=20_000, tt_rank=8),
        data=data,
        objective=BinaryClassification(),
        optimizer=Adagrad(Constant(0.04)),
        batch=batch,
        updates=updates,
        evaluate_every=updates // 20,  # as MLPerf's DLRM is evaluated: twenty times an epoch
        evaluation_batch=10_000,
        checkpoint_every=updates // 2,
    )
