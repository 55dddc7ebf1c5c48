"""A log of which examples each update used, written by each process; and what can be read from all of them.

Before an update a process writes the numbers of the examples that it gives to it, after it that it is done. An update
that broke has no second line; one that was done again in a later world has the later world's. Updates that run ahead of
a bad one are begun twice.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from multipod.data.batches import TrainBatches
from multipod.data.global_arrays import owned_rows
from multipod.errors import RunFolderError
from multipod.layout.mesh import batch_sharding
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.events import Updated
from multipod.train.hooks import PhaseHook
from multipod.train.run_folder import RunFolder

FOLDER = "examples"
"""Of a run folder."""


class ExampleLog:
    """The log of one process in one world.

    Args:
      run: the run's folder.
      batches: of this process.
      offset: what to add to an update's number, from 0, to have its batch's.
      generation: of the world.
    """

    def __init__(self, run: Path, batches: TrainBatches, offset: int, generation: int = 0) -> None:
        folder = run / FOLDER
        folder.mkdir(exist_ok=True)
        self._batches, self._offset, self._generation = batches, offset, generation
        self._rows = batches.rows[batches.rows < batches.batch]  # without padding
        path = folder / f"{generation}-{os.uname().nodename}-{os.getpid()}.jsonl"
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def begins(self, update: int) -> None:
        """`update` updates are done, and the next one begins."""
        numbers = self._batches.numbers(update + self._offset)[self._rows]
        self._write({"update": update + 1, "generation": self._generation, "examples": numbers.tolist()})

    def done(self, update: int) -> None:
        """This update is done."""
        self._write({"update": update, "generation": self._generation})

    def close(self) -> None:
        """Ends the log."""
        self._flush()
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        self._waiting += json.dumps(line).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Hands all lines to the kernel: a process that is killed leaves what it said. A full disk gets them later."""
        with suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]


class ExampleLogHooks:
    """What the loop calls, so that the log of examples is written, if there is one."""

    def __init__(self, log: ExampleLog | None) -> None:
        self._log = log

    def follow(self, pulse: PhaseHook) -> PhaseHook:
        """Returns a pulse that passes everything on to `pulse`, and writes down each update that begins."""

        def both(phase: str, update: int) -> None:
            pulse(phase, update)
            if self._log is not None and phase == "updating":
                self._log.begins(update)

        return pulse if self._log is None else both

    def on_update(self, state: State, event: Updated, leaving: bool) -> float:
        """Writes down that an update is done; copies nothing."""
        if self._log is not None:
            self._log.done(event.update)
        return 0.0


@contextmanager
def open_example_log(
    wanted: bool, folder: RunFolder, program: Program, state: State | None, generation: int = 0
) -> Iterator[ExampleLogHooks]:
    """The log of examples of a run that goes on from `state`; hooks that write nothing unless it is `wanted`."""
    if not wanted:
        yield ExampleLogHooks(None)
        return
    recipe, rows = program.recipe, owned_rows(batch_sharding(program.mesh), program.rows)
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows, program.padded)
    offset = 0 if state is None else int(state.position) - int(state.update)
    log = ExampleLog(folder.path, batches, offset, generation)
    try:
        yield ExampleLogHooks(log)
    finally:
        log.close()


def used(run: Path) -> dict[int, list[int]]:
    """The numbers of the examples that went into each update of the run's result, increasing.

    Raises:
      RunFolderError: the run has no such log.
    """
    files = sorted((run / FOLDER).glob("*.jsonl"))
    if not files:
        raise RunFolderError(f"{run} has no log of examples. Train with --log-examples.")
    given: dict[tuple[int, int], list[int]] = {}
    last: dict[int, int] = {}
    for file in files:
        here: dict[tuple[int, int], list[int]] = {}  # of an update that was given twice, what it was given last
        for text in file.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # its process was killed while it wrote
            line = json.loads(text)
            update, generation = line["update"], line["generation"]
            if "examples" in line:
                here[update, generation] = line["examples"]
            else:
                last[update] = max(generation, last.get(update, -1))
        for update_of, examples in here.items():
            given.setdefault(update_of, []).extend(examples)
    return {update: sorted(given[update, last[update]]) for update in sorted(last)}
