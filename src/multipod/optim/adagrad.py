"""Adagrad, for each weight or for each row of a table."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from multipod.optim.numbers import positive
from multipod.optim.optimizer import SparseOptimizer
from multipod.optim.sparse import EPS, scale_by_rowwise_adagrad


@dataclass(frozen=True)
class Adagrad(SparseOptimizer):
    """w <- w - rate * g / sqrt(sum of g^2 + eps), through Optax.

    Source: Duchi, Hazan and Singer, 2011, JMLR 12. The sum begins at 0, as in MLPerf's DLRM; Optax's own default is
    0.1.

    Attributes:
      eps: under the root.
    """

    flattens: ClassVar[bool] = True

    _: KW_ONLY
    eps: float = EPS

    def _wrong(self) -> list[str]:
        return super()._wrong() + positive(eps=self.eps)

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns Optax's Adagrad behind the weight decay."""
        return optax.chain(self.add_decay(), optax.adagrad(rate, initial_accumulator_value=0.0, eps=self.eps))


@dataclass(frozen=True)
class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum of squares for each row of a table (`scale_by_rowwise_adagrad`)."""

    flattens: ClassVar[bool] = False

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns row-wise Adagrad behind the weight decay."""
        return optax.chain(self.add_decay(), scale_by_rowwise_adagrad(self.eps), optax.scale_by_learning_rate(rate))
