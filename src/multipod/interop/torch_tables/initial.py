"""Initial cores in PyTorch, drawn from its own random numbers; `multipod.nn.tables.tensor_train_init` says why so."""

import math
from collections.abc import Callable, Sequence

import torch

from multipod.errors import RecipeError, nearest
from multipod.nn.tables.tensor_train import TensorTrain
from multipod.nn.tables.tensor_train_init import CUT, SECOND_MOMENT

Draw = Callable[[torch.Tensor], torch.Tensor]
"""Fills a tensor with numbers, and returns it."""

_TAIL = 0.5 * math.erfc(CUT / math.sqrt(2))


def initialize(tt: TensorTrain, cores: Sequence[torch.Tensor], weight_dist: str) -> None:
    """Draws the cores anew, in place.

    Args:
      tt: the shape.
      cores: of these shapes.
      weight_dist: a name in `DISTRIBUTIONS`.

    Raises:
      RecipeError: no such distribution.
    """
    check_distribution(weight_dist)
    scale, draw = DISTRIBUTIONS[weight_dist]
    with torch.no_grad():
        for core in cores:
            core.copy_(draw(torch.empty(core.shape, dtype=torch.float64)) * scale(tt))


def check_distribution(weight_dist: str) -> None:
    """Refuses a name that is not in `DISTRIBUTIONS`."""
    if weight_dist not in DISTRIBUTIONS:
        why = (
            "FBTT's comb of narrow peaks is not there. Take 'sampled-gaussian', whose table is nearly Gaussian"
            if weight_dist == "approx-uniform"
            else nearest(weight_dist, DISTRIBUTIONS)
        )
        raise RecipeError(f"TTEmbeddingBag: weight_dist={weight_dist!r}: no such distribution. {why.rstrip('.')}.")


def _normal(core: torch.Tensor) -> torch.Tensor:
    return core.normal_()


def _uniform(core: torch.Tensor) -> torch.Tensor:
    return core.uniform_()


def _sampled(core: torch.Tensor) -> torch.Tensor:
    """Standard Gaussian numbers given |x| >= CUT, by the inverse of the distribution."""
    side = core.uniform_(-1, 1)
    return side.sign() * -torch.special.ndtri(_TAIL * side.abs().clamp(min=2.0**-24))


def _exact(tt: TensorTrain) -> float:
    """Entries of the table have variance 1 / (3 rows)."""
    count = len(tt.shapes)
    return float((3 * tt.rows * math.prod(tt.ranks) * SECOND_MOMENT**count) ** (-1 / (2 * count)))


def _released(tt: TensorTrain) -> float:
    """FBTT's scale for `approx-normal`: of three cores, whatever their number is."""
    return float((3 * tt.rows) ** (-1 / 6))


def _rooted(tt: TensorTrain) -> float:
    return float(tt.rows**-0.5)


def _glorot(tt: TensorTrain) -> float:
    """FBTT's scale for `uniform`: as if the cores' numbers had the mean zero."""
    count = len(tt.shapes)
    return float((2 / (tt.rows + tt.features) / math.prod(tt.ranks)) ** (1 / (2 * count)))


DISTRIBUTIONS: dict[str, tuple[Callable[[TensorTrain], float], Draw]] = {
    "sampled-gaussian": (_exact, _sampled),
    "approx-normal": (_released, _sampled),
    "normal": (_rooted, _normal),
    "uniform": (_glorot, _uniform),
    "naive-uniform": (_rooted, _uniform),
}
"""What core entries are multiplied by, and what they are before. The first is ours; the others are FBTT's by name."""
