"""Finds spikes of the loss and of the gradient norm among the numbers of updates. Nothing here knows of devices.

All processes see the same sums, so all decide the same.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from multipod.recipe.bad_updates import BadUpdateRules

LEAST = 16
"""Good updates before anything can be a spike."""


@dataclass
class SpikeDetector:
    """Knows the numbers of recent good updates, and how many were bad."""

    rules: BadUpdateRules
    _losses: deque[float] = field(default_factory=deque)
    _norms: deque[float] = field(default_factory=deque)
    _bad: deque[int] = field(default_factory=deque)
    _seen: int = 0  # updates, good or bad, those that were rolled back as well

    def limits(self) -> tuple[float, float]:
        """The highest loss and gradient norm of a good update, at this point; infinite where anything finite is."""
        return self._limit(self._losses), self._limit(self._norms)

    def add(self, loss: float, norm: float) -> None:
        """Remembers a good update."""
        self._seen += 1
        for values, value in ((self._losses, loss), (self._norms, norm)):
            values.append(value)
            if len(values) > self.rules.window:
                values.popleft()

    def count_bad(self) -> bool:
        """Counts a bad update; returns whether there were too many lately."""
        self._seen += 1
        self._bad.append(self._seen)
        while self._bad[0] <= self._seen - self.rules.window:
            self._bad.popleft()
        return len(self._bad) > self.rules.most

    def _limit(self, values: deque[float]) -> float:
        usual = statistics.median(values) if self.rules.spike and len(values) >= LEAST else 0.0
        return self.rules.spike * usual if usual > 0 else math.inf


def kind_of(loss: float, norm: float, limits: tuple[float, float]) -> str:
    """What is wrong with an update of this loss and gradient norm."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "not finite"
    return "loss spike" if loss > limits[0] else "gradient spike"
