"""What is done about an update that stayed bad, as the recipe says."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.bad_numbers.bad_updates import keeps_weights, refuse_bad_update, roll_back
from multipod.train.checkpoints.saving import RetryingSaver
from multipod.train.context import RunContext
from multipod.train.events import BadUpdate, Event


@dataclass(frozen=True)
class BadUpdateActions:
    """Goes back, stops or goes on.

    Attributes:
      notify: tells the observers.
    """

    program: Program
    context: RunContext
    saving: RetryingSaver
    notify: Callable[[Event], None]

    def __call__(self, bad: BadUpdate, state: State, update: int) -> State:
        """Does what is to be done after update number `update`; returns the state to go on from.

        Raises:
          PoisonedError: the recipe says stop, or there were too many. The state before the update is saved.
        """
        context, start_s = self.context, self.context.clock()
        if bad.action == "roll-back":
            self.saving.settle(update)
            state = roll_back(self.program, context.checkpoints, state, update)
        elif bad.action == "stop" and keeps_weights(bad):
            context.hooks.on_phase("saving", update)
            self.saving.save_last(state, update)
        seconds = bad.seconds + context.clock() - start_s
        self.notify(replace(bad, back_to=int(state.update), seconds=seconds))
        if bad.action == "stop":
            refuse_bad_update(bad, update, context.info.folder, context.checkpoints)
        return state
