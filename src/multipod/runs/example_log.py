"""A log of which examples each update used, written by each process; and what can be read from all of them.

Before an update a process writes the numbers of the examples that it gives to it, after it that it is done. An update
that broke has no second line; one that was done again in a later world has the later world's.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from multipod.data.batches import TrainBatches
from multipod.errors import RunFolderError

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
        for text in file.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # its process was killed while it wrote
            line = json.loads(text)
            update, generation = line["update"], line["generation"]
            if "examples" in line:
                given.setdefault((update, generation), []).extend(line["examples"])
            else:
                last[update] = max(generation, last.get(update, -1))
    return {update: sorted(given[update, last[update]]) for update in sorted(last)}
