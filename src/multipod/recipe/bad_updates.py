"""What a run does about an update whose numbers are bad: one field of a recipe."""

from dataclasses import dataclass
from typing import Literal

from multipod.errors import RecipeError

Action = Literal["ignore", "skip", "roll-back", "stop"]


@dataclass(frozen=True)
class BadUpdateRules:
    """What counts as a bad update, and what is done about it.

    An update is bad when its loss or its gradient is not finite, or far above what was usual. It then changes nothing:
    the devices keep the weights, statistics and optimizer state they had. It is first done once more in place; if it is
    good then, a passing fault made it bad (a flipped bit), and the run goes on with the good result.

    Attributes:
      action: `stop` says whose fault it is, saves the state before the bad update, unless its weights are at fault, and
        ends the run. `skip` leaves the update's batch out, counts it, and goes on. `roll-back` goes back to the newest
        checkpoint and on from there with the batches that follow (as of arXiv:2204.02311, section 5.1). `ignore` looks
        for nothing.
      spike: a loss or a gradient norm above this many times the median of the `window` good updates before is bad;
        0: only what is not finite is. Below 16 good updates nothing is a spike.
      window: updates that say what is usual, and among which `most` are counted.
      most: more bad updates than this within a window end the run.
      replay: do a bad update once more, and, if it is bad again, on other devices, to tell a bad chip from a bad batch.
    """

    action: Action = "stop"
    spike: float = 0.0
    window: int = 64
    most: int = 8
    replay: bool = True

    def __post_init__(self) -> None:
        wrong = []
        if self.spike != 0 and not self.spike > 1:
            wrong.append(f"spike={self.spike:g} (0, or above 1: that many times the median)")
        if self.window < 16:
            wrong.append(f"window={self.window} (at least 16)")
        if self.most < 0:
            wrong.append(f"most={self.most} (at least 0)")
        if wrong:
            raise RecipeError(
                f"bad_updates: {', '.join(wrong)}. Change it in the recipe or with --set bad_updates.spike=5."
            )

    @property
    def watches(self) -> bool:
        """Whether updates are looked at."""
        return self.action != "ignore"

    @property
    def needs_gradients(self) -> bool:
        """Whether this takes the gradient of the whole model: to undo an update, or to know a spike."""
        return self.action in ("skip", "roll-back") or (self.watches and self.spike > 0)
