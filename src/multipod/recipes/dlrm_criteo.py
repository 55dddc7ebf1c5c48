"""DLRM on Criteo's logs as `multipod clicks prepare` leaves them, the large tables as tensor trains.

multipod clicks prepare train.txt --rows kaggle --out clicks/kaggle
multipod train dlrm-kaggle                                             # or --set data.folder=ELSEWHERE
multipod train dlrm-kaggle --set model.tt_rows=0 --set model.tables.place=auto --layout expert=8    # dense, split

Where the records are, the tables have the rows that they say: fewer than the published ones of `--ids frequent`.
"""

from multipod.data.clicks.multi_hot import MultiHotClicks
from multipod.data.clicks.records import Clicks
from multipod.data.source import Data
from multipod.metrics.binary import BinaryClassification
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_published import MLPERF_V2_HOTS, kaggle, mlperf, mlperf_v2
from multipod.models.dlrm_tables import TablePlacement
from multipod.optim.adagrad import Adagrad
from multipod.optim.rates import Constant
from multipod.recipe.recipe import Recipe


def dlrm_kaggle() -> Recipe:
    """DLRM on Criteo's Kaggle logs: one epoch; tables of 142,572 rows or more as tensor trains of rank 32."""
    data = Clicks("clicks/kaggle", sets_tables=True)
    return _recipe("dlrm-kaggle", kaggle(tt_rows=142_572, tt_rank=32), data, 39_291_958, batch=2048, rate=0.02)


def dlrm_mlperf() -> Recipe:
    """MLPerf's DLRM on Criteo's Terabyte logs, 187.8 M rows: 13 tables as tensor trains; ends at AUC 0.8025."""
    model, data = mlperf(tt_rows=10_000, tt_rank=32), Clicks("clicks/mlperf", sets_tables=True)
    return _recipe("dlrm-mlperf", model, data, TERABYTE_EXAMPLES, batch=65_536, rate=0.005, target="auc >= 0.8025")


def dlrm_v2() -> Recipe:
    """MLPerf's DLRM-DCNv2: 214 ids an example, a cross network, 204.2 M rows, large tables split; ends at 0.80275."""
    model = mlperf_v2(tables=TablePlacement("auto"))
    data = MultiHotClicks(Clicks("clicks/mlperf-v2", sets_tables=True), MLPERF_V2_HOTS)
    return _recipe("dlrm-v2", model, data, TERABYTE_EXAMPLES, batch=65_536, rate=0.005, target="auc >= 0.80275")


TERABYTE_EXAMPLES = 4_195_197_692
"""Of Criteo's Terabyte logs, the days but the last."""


def _recipe(name: str, model: Dlrm, data: Data, examples: int, batch: int, rate: float, target: str = "") -> Recipe:
    """One epoch under Adagrad without warm-up or decay, as MLPerf's rules have it for DLRM-DCNv2; 20 evaluations."""
    updates = examples // batch
    return Recipe(
        name=name,
        model=model,
        data=data,
        objective=BinaryClassification(),
        optimizer=Adagrad(Constant(rate)),
        batch=batch,
        updates=updates,
        evaluate_every=examples // (20 * batch),
        evaluation_batch=16_384,
        checkpoint_every=examples // (20 * batch),
        target=target,
    )
