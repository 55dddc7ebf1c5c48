"""Campaigns of faults against a run of real processes: the outer half of `multipod chaos`.

A run is started in processes of its own and, whenever it ends before its last update, started again from its newest
checkpoint, as often as there are faults and a few times more; the launcher may let it survive most of them.
`multipod.chaos.inject` makes the faults happen inside the processes, and `multipod.chaos.effects` says what came of it.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from multipod.chaos.effects import updates_done
from multipod.chaos.inject import Fault
from multipod.elastic.launcher.processes import LineSink
from multipod.elastic.launcher.supervise import INTERRUPTED, RunOutcome
from multipod.errors import ChaosError

SPARE_STARTS = 3
"""Restarts beyond one a fault before a campaign is given up."""


@dataclass(frozen=True)
class Attempt:
    """One start of the run: how it ended, and after how many updates."""

    outcome: RunOutcome
    updates: int


@dataclass(frozen=True)
class Campaign:
    """A run with faults, and what it left in `folder`: `run`, `fired-RANK.jsonl`, `seen-RANK.jsonl`."""

    folder: Path
    attempts: tuple[Attempt, ...]

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"


Launch = Callable[[Sequence[str], LineSink], RunOutcome]
"""Runs the processes of a command, given its arguments, to their end; their lines go to the relay."""


def carry_out(faults: Sequence[Fault], folder: Path, train: Sequence[str], launch: Launch, link: str = "") -> Campaign:
    """Runs `multipod` with the arguments `train` to its end, through all faults.

    Args:
      faults: what happens.
      folder: is made; holds the run and the records.
      train: such as `train digits --mesh 2x2`, without --out.
      launch: runs the processes.
      link: the network link of each process, if it has one of its own.

    Raises:
      ChaosError: the run was interrupted, or came no further in spite of all restarts.
    """
    folder.mkdir(parents=True)
    run, attempts, idle = folder / "run", list[Attempt](), False
    record = {"link": link, "faults": msgspec.to_builtins(list(faults))}
    inject = ["--inject", str(folder), "--quiet"]
    while True:
        (folder / "faults.json").write_text(json.dumps({**record, "attempt": len(attempts)}))
        saved = [path for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
        if len(saved) == 1 and idle:
            saved = []  # it cannot go on from its only checkpoint: a fault has damaged it
        if not saved and run.exists():
            shutil.rmtree(run)  # it died before its first good checkpoint: nothing to go on from
        command = ["train", "--resume", str(run), *_options_to_repeat(train)] if saved else [*train, "--out", str(run)]
        lines: list[str] = []
        before, outcome = len(updates_done(folder)), launch([*command, *inject], lines.append)
        seen = updates_done(folder)
        idle = len(seen) == before
        attempts.append(Attempt(outcome, max((update for _, update in seen), default=0)))
        if outcome.exit_code == 0:
            return Campaign(folder, tuple(attempts))
        if outcome.exit_code == INTERRUPTED:
            raise ChaosError(f"{folder}: the campaign was interrupted. Its run can go on: see {run}.")
        if len(attempts) > len(faults) + SPARE_STARTS:
            raise ChaosError(
                f"{folder}: the run did not reach its end in {len(attempts)} starts; the last: {outcome.reason}.\n"
                + "\n".join(lines[-8:])
                + "\nMake checkpoint_every smaller than the distance of the faults, or the plan milder."
            )


def _options_to_repeat(train: Sequence[str]) -> list[str]:
    """Picks the arguments of a command that a resumed run needs again: where it runs, not what it is."""
    kept, words = [], list(train[1:])
    for at, word in enumerate(words):
        if word in ("--mesh", "--cpu-devices", "--timeout", "--cache") and at + 1 < len(words):
            kept += [word, words[at + 1]]
    return kept
