"""The log of examples of a run that was asked for one: made for a run, written as its loop tells."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multipod.cli.train import Request
    from multipod.runs.example_log import ExampleLog
    from multipod.step.program import Program
    from multipod.step.state import State
    from multipod.train.events import Updated
    from multipod.train.hooks import Pulse
    from multipod.train.run_folder import RunFolder


class Logged:
    """Writes the log of examples, if it was asked for, from what the loop tells."""

    def __init__(self, log: "ExampleLog | None") -> None:
        self._log = log

    def pulse(self, pulse: "Pulse") -> "Pulse":
        """The same pulse; an update that begins is written down."""

        def both(phase: str, update: int) -> None:
            pulse(phase, update)
            if self._log is not None and phase == "updating":
                self._log.begins(update)

        return pulse if self._log is None else both

    def keep(self, state: "State", event: "Updated", leaving: bool) -> float:
        """Writes down that an update is done; copies nothing."""
        if self._log is not None:
            self._log.done(event.update)
        return 0.0


@contextmanager
def example_log(
    request: "Request", folder: "RunFolder", program: "Program", state: "State | None", generation: int = 0
) -> Iterator[Logged]:
    """The log of examples of a run that goes on from `state`; one that writes nothing unless it was asked for."""
    if not request.log_examples:
        yield Logged(None)
        return
    from multipod.data.batches import TrainBatches
    from multipod.data.feed import owned_rows
    from multipod.layout.mesh import batch_sharding
    from multipod.runs.example_log import ExampleLog

    recipe, rows = program.recipe, owned_rows(batch_sharding(program.mesh), program.rows)
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows, program.padded)
    offset = 0 if state is None else int(state.position) - int(state.update)
    log = ExampleLog(folder.path, batches, offset, generation)
    try:
        yield Logged(log)
    finally:
        log.close()
