"""DLRM on Criteo's logs as `multipod clicks prepare` leaves them, the large tables as tensor trains.

multipod clicks prepare train.txt --rows kaggle --out clicks/kaggle
multipod train dlrm-kaggle                                             # or --set data.folder=ELSEWHERE
multipod train dlrm-kaggle --set model.tt_rows=0 --set model.tables.place=auto --layout expert=8    # dense, split
"""

from typing import Any

from multipod.data.clicks.records import Clicks
from multipod.metrics.binary import BinaryClassification
from multipod.models.dlrm_published import kaggle, mlperf
from multipod.optim.adagrad import Adagrad
from multipod.optim.rates import Constant
from multipod.recipe.recipe import Recipe


def dlrm_kaggle() -> Recipe:
    """DLRM on Criteo's Kaggle logs: one epoch; the 7 largest tables as tensor trains of rank 32, 118 times smaller."""
    return _recipe("dlrm-kaggle", kaggle(tt_rows=142_572, tt_rank=32), 39_291_958, batch=2048, rate=0.02)


def dlrm_mlperf() -> Recipe:
    """MLPerf's DLRM on Criteo's Terabyte logs, 187.8 M rows: 13 tables as tensor trains; ends at AUC 0.8025."""
    model = mlperf(tt_rows=10_000, tt_rank=32)
    return _recipe("dlrm-mlperf", model, 4_195_197_692, batch=65_536, rate=0.005, target="auc >= 0.8025")


def _recipe(name: str, model: Any, examples: int, batch: int, rate: float, target: str = "") -> Recipe:
    """One epoch under Adagrad without warm-up or decay, as MLPerf's rules have had it since v2.1; 20 evaluations."""
    updates = examples // batch
    return Recipe(
        name=name,
        model=model,
        data=Clicks(f"clicks/{name.removeprefix('dlrm-')}"),
        objective=BinaryClassification(),
        optimizer=Adagrad(Constant(rate)),
        batch=batch,
        updates=updates,
        evaluate_every=examples // (20 * batch),
        evaluation_batch=16_384,
        checkpoint_every=examples // (20 * batch),
        target=target,
    )
