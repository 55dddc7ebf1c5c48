"""Dense layers on 8 x 8 scanned digits: a run of seconds, which a pipeline can cut layer by layer."""

from multipod.data.digits import Digits
from multipod.metrics.objective import Classification
from multipod.models.mlp import Mlp
from multipod.optim.rates import Cosine, WarmUp
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe


def mlp_small() -> Recipe:
    """Eight dense layers on scikit-learn's 1,797 handwritten digits; cut it with --layout stage=4."""
    return Recipe(
        name="mlp-small",
        model=Mlp(),
        data=Digits(),
        objective=Classification(),
        optimizer=Sgd(WarmUp(Cosine(0.02), 0.05), momentum=0.9, weight_decay=1e-4),
        batch=128,
        updates=330,
        evaluate_every=110,
        checkpoint_every=110,
    )
