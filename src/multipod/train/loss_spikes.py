"""Looks at the numbers of updates, and decides what is done about bad ones. Nothing here knows of devices.

All processes reckon with the same sums, so that all decide alike.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from multipod.recipe.bad_updates import BadUpdatePolicy

LEAST = 16
"""Good updates before anything can be a spike."""


@dataclass
class Watch:
    """What was usual lately, and how many updates were bad."""

    policy: BadUpdatePolicy
    _losses: deque[float] = field(default_factory=deque)
    _norms: deque[float] = field(default_factory=deque)
    _bad: deque[int] = field(default_factory=deque)
    _seen: int = 0  # updates, good or bad, those that were rolled back as well

    def limits(self) -> tuple[float, float]:
        """The highest loss and gradient norm of a good update, at this point; infinite where anything finite is."""
        return self._limit(self._losses), self._limit(self._norms)

    def saw(self, loss: float, norm: float) -> None:
        """A good update."""
        self._seen += 1
        for values, value in ((self._losses, loss), (self._norms, norm)):
            values.append(value)
            if len(values) > self.policy.window:
                values.popleft()

    def is_too_much(self) -> bool:
        """Counts a bad update; whether there were too many lately."""
        self._seen += 1
        self._bad.append(self._seen)
        while self._bad[0] <= self._seen - self.policy.window:
            self._bad.popleft()
        return len(self._bad) > self.policy.most

    def _limit(self, values: deque[float]) -> float:
        usual = statistics.median(values) if self.policy.spike and len(values) >= LEAST else 0.0
        return self.policy.spike * usual if usual > 0 else math.inf


def kind_of(loss: float, norm: float, limits: tuple[float, float]) -> str:
    """What is wrong with an update of this loss and gradient norm."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "not finite"
    return "loss spike" if loss > limits[0] else "gradient spike"
