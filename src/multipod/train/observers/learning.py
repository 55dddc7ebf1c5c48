"""Whether a run learned anything, by its first and last losses and by the accuracy of guessing."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from multipod.train.events import Evaluated, Event, Started, Updated
from multipod.train.observers import text

LAST = 10
"""Updates at the end whose mean loss is compared with the first."""


class LearningCheck:
    """Follows the events of a run, and says at its end if it learned nothing."""

    def __init__(self) -> None:
        self._first = self._highest = math.nan
        self._last: deque[float] = deque(maxlen=LAST)
        self._resumed = False
        self._evaluated: Evaluated | None = None

    def __call__(self, event: Event) -> None:
        """Takes an event."""
        match event:
            case Started():
                self._resumed = event.update > 0
            case Updated() if "loss" in event.values:
                loss = event.values["loss"]
                self._first = loss if math.isnan(self._first) else self._first
                self._highest = loss if math.isnan(self._highest) else max(loss, self._highest)
                self._last.append(loss)
            case Evaluated():
                self._evaluated = event
            case _:
                pass

    def trouble(self, recipe: Mapping[str, Any]) -> list[str]:
        """Lines that say what went wrong and what to try; none if the run learned, or is too short to say.

        Args:
          recipe: as `recipe.toml` holds it: for the number of classes and for the rate.
        """
        if len(self._last) < LAST:
            return []
        signs = [sign for sign in (self._guessing(recipe.get("model", {}).get("classes")), self._risen()) if sign]
        if not signs:
            return []
        return [f"NOTHING LEARNED: {' and '.join(signs)}.", f"  {self._cause(peak_rate(recipe))}"]

    def _guessing(self, classes: object) -> str:
        """Says that the accuracy is that of guessing, to three standard deviations; else nothing."""
        evaluated = self._evaluated
        if not isinstance(classes, int) or classes < 2 or evaluated is None or "accuracy" not in evaluated.values:
            return ""
        chance, accuracy = 1 / classes, evaluated.values["accuracy"]
        if accuracy > chance + 3 * math.sqrt(chance * (1 - chance) / max(1, evaluated.count)):
            return ""
        return f"test accuracy {text.percent(accuracy, 2)} is that of guessing among {classes} classes"

    def _risen(self) -> str:
        """Says that the loss is no lower than it began; else nothing. A resumed run did not begin here."""
        last = sum(self._last) / len(self._last)
        if self._resumed or last < self._first:
            return ""
        return f"the loss ended at {text.number(last)}, and its first was {text.number(self._first)}"

    def _cause(self, rate: float | None) -> str:
        """The likely cause, and what to try."""
        known = "" if rate is None else f" (it peaks at {rate:g})"
        lower = "--set optimizer.rate=..." if rate is None else f"--set optimizer.rate={rate / 10:g}"
        if self._highest > 1.2 * self._first:
            return (
                f"The loss rose to {text.number(self._highest)} on the way, so the rate is likely too high{known}. "
                f"Try {lower}."
            )
        return (
            f"Likely causes: a rate that is too high or too low{known}, or labels that do not belong to their "
            f"examples. Try {lower}, and look at the data with `multipod data inspect`."
        )


def peak_rate(recipe: Mapping[str, Any]) -> float | None:
    """The highest learning rate in a recipe's table; None if it does not say."""
    part: object = recipe.get("optimizer", {}).get("rate")
    while isinstance(part, dict):
        part = part.get("peak", part.get("then"))
    return float(part) if isinstance(part, int | float) else None
