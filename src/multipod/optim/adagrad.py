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

    Source: Duchi, Hazan and Singer, 2011, JMLR 12. The sum begins at 0 and eps is 1e-8, as in MLPerf's DLRM-DCNv2;
    Optax's own sum begins at 0.1. PyTorch's adds eps to the root.

    Attributes:
      eps: under the root.
    """

    flattens: ClassVar[bool] = True
    initial_sum: ClassVar[float] = 0.0

    _: KW_ONLY
    eps: float = EPS

    def _wrong(self) -> list[str]:
        return super()._wrong() + positive(eps=self.eps)

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns Optax's Adagrad behind the weight decay."""
        return optax.chain(
            self.add_decay(), optax.adagrad(rate, initial_accumulator_value=self.initial_sum, eps=self.eps)
        )


@dataclass(frozen=True)
class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum of squares for each row of a table (`scale_by_rowwise_adagrad`)."""

    flattens: ClassVar[bool] = False

    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns row-wise Adagrad behind the weight decay."""
        return optax.chain(self.add_decay(), scale_by_rowwise_adagrad(self.eps), optax.scale_by_learning_rate(rate))
