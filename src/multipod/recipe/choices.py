"""Fields that hold one of several types, and the names by which `--set` chooses among them.

A field is known by its annotation, so that every field annotated so takes these names: `--set optimizer=lars` works as
`Recipe.optimizer` is annotated `Builds`. A new field of this kind is one line in `CHOICES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multipod.optim.optimizer import Builds
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.rates import RATES, Decay, Rate, WarmUp


@dataclass(frozen=True)
class Choice:
    """The types that a field may hold.

    Attributes:
      types: dataclasses by their names.
      wrapper: a dataclass that may be put around any of them; a field that only it has puts it there.
      inside: the wrapper's field that holds what it is put around.
    """

    types: Mapping[str, type] = field(default_factory=dict)
    wrapper: type | None = None
    inside: str = ""


CHOICES: dict[Any, Choice] = {
    Builds: Choice(OPTIMIZERS),
    Rate: Choice(RATES, WarmUp, "then"),
    Decay: Choice(RATES),
}
"""What a field takes, by its annotation."""
