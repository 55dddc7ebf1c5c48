"""What is due after which update of a run: a pure function of its number, but for saves that failed."""

from dataclasses import dataclass

from multipod.recipe.recipe import Recipe
from multipod.train.checkpoints.saving import RetryingSaver


@dataclass(frozen=True)
class DueDates:
    """After which updates a run evaluates and saves, and where nothing may run ahead of its state.

    Attributes:
      stop_after: the run stops after this update; 0: at its end.
    """

    recipe: Recipe
    saving: RetryingSaver
    stop_after: int = 0

    def evaluates(self, update: int) -> bool:
        """Whether an evaluation is due after this update."""
        return self._is_due(self.recipe.evaluate_every, update)

    def saves(self, update: int) -> bool:
        """Whether a checkpoint is due, or one that failed is to be tried again."""
        return self._is_due(self.recipe.checkpoint_every, update) or self.is_owed(update)

    def is_owed(self, update: int) -> bool:
        """Whether a checkpoint that failed is to be tried again after this update."""
        return update < self.recipe.updates and self.saving.is_owed(update)

    def stops(self, update: int) -> bool:
        """Whether this update is to carry the wish to stop."""
        return 0 < self.stop_after <= update < self.recipe.updates

    def is_pause(self, update: int) -> bool:
        """Whether the state after this update is needed, so that the next may not begin before it is known."""
        return update >= self.recipe.updates or self.stops(update) or self.evaluates(update) or self._is_due(
            self.recipe.checkpoint_every, update
        )  # fmt: skip

    def call(self, update: int, most: int) -> int:
        """How many updates may follow `update` in one call: `most`, or one where a pause lies among those."""
        return 1 if any(self.is_pause(update + k) for k in range(1, most)) else most

    def _is_due(self, every: int, update: int) -> bool:
        return every > 0 and update % every == 0 and update < self.recipe.updates
