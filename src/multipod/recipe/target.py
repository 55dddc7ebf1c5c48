"""What a run is to reach, on any value of its evaluations, as one line of a recipe: `accuracy >= 0.759`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from multipod.errors import RecipeError

_CONDITION = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """A value of an evaluation that is to be at least (`at_least`) or at most `bound`."""

    name: str
    at_least: bool
    bound: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether it holds of these values.

        Raises:
          RecipeError: they have none of this name.
        """
        if self.name not in values:
            raise RecipeError(
                f"target: an evaluation of this recipe has no {self.name!r}. It has: {', '.join(sorted(values))}. Name "
                "one of these; a run may go on with another target: --resume RUN --set 'target=NAME >= NUMBER'."
            )
        value = values[self.name]
        return value >= self.bound if self.at_least else value <= self.bound


def read_target(text: str) -> tuple[Condition, ...]:
    """The conditions of a target, all of which must hold; none of an empty one.

    Raises:
      RecipeError: it is no such line.
    """
    return tuple(_read_condition(part, text) for part in re.split(r"\band\b", text)) if text else ()


def is_reached(text: str, values: Mapping[str, float]) -> bool:
    """Whether an evaluation with these values ends a run of this target; never if there is none.

    Raises:
      RecipeError: the target names what is not among the values.
    """
    conditions = read_target(text)
    holds = [condition.holds(values) for condition in conditions]  # each looks for its name
    return bool(holds) and all(holds)


def _read_condition(part: str, text: str) -> Condition:
    found = _CONDITION.fullmatch(part)
    try:
        if found is None:
            raise ValueError("no condition")
        bound = float(found[3])
        if bound != bound:
            raise ValueError("not a number")
    except ValueError as error:
        raise RecipeError(
            f"target={text!r}: {part.strip()!r} is no condition. Write NAME >= NUMBER or NAME <= NUMBER, several "
            "joined by `and`, as 'accuracy >= 0.759' or 'perplexity <= 20'."
        ) from error
    return Condition(found[1], found[2] == ">=", bound)
