"""Fields that hold one of several types, and the names by which `--set` chooses among them.

A field is known by its annotation, so that every field annotated so takes these names: `--set optimizer=lars` works as
`Recipe.optimizer` is annotated `Builds`. A new field of this kind is one line in `CHOICES`.
"""

from typing import Any

from multipod.metrics.objective import Objective
from multipod.metrics.objectives import OBJECTIVES
from multipod.models.dlrm_interactions import INTERACTIONS, Interaction
from multipod.optim.optimizer import Builds
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.rates import RATES, Decay, Rate, WarmUp
from multipod.recipe.draft import TypeChoice

CHOICES: dict[Any, TypeChoice] = {
    Builds: TypeChoice(OPTIMIZERS),
    Objective: TypeChoice(OBJECTIVES),
    Rate: TypeChoice(RATES, WarmUp, "then"),
    Decay: TypeChoice(RATES),
    Interaction: TypeChoice(INTERACTIONS),
}
"""What a field takes, by its annotation."""
