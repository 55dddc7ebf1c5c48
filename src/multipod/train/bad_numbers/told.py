"""What observers are told of an update: means of its sums, or the bare numbers of a bad one."""

from typing import Any

from multipod.recipe.recipe import Recipe
from multipod.step.state import HostSums
from multipod.train.bad_numbers.bad_updates import JudgedUpdate
from multipod.train.bad_numbers.poisoned import means_of_training
from multipod.train.context import RunContext


def told_values(context: RunContext, recipe: Recipe, judged: JudgedUpdate, update: int) -> dict[str, float]:
    """What is told of update number `update`; a pipe that fills has nothing to tell yet.

    Raises:
      PoisonedError: see `means_of_training`.
    """
    sums = judged.sums
    if judged.bad and int(sums["bad"]):
        return _bare_means(sums)
    if not int(sums["count"]):
        return {}
    return means_of_training(context, recipe, _values(sums), update)


def _values(sums: HostSums) -> dict[str, Any]:
    return {name: value for name, value in sums.items() if name not in ("stop", "poisoned", "bad")}


def _bare_means(sums: HostSums) -> dict[str, float]:
    """Means of an update that objectives may refuse to make anything of."""
    count = float(sums["count"])
    return {name: float(sums[name]) / count for name in ("loss", "gradient_norm")}
