"""What a run folder tells about its run: the facts and the history, read and checked."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from multipod.errors import RunFolderError
from multipod.train.events import (
    BadUpdate,
    Compiled,
    Ended,
    Evaluated,
    Event,
    Regrouped,
    SaveFailed,
    Skipped,
    Started,
    Updated,
)
from multipod.train.goodput import GoodputAccount
from multipod.train.observers.jsonl import decode, read
from multipod.train.run_folder import FORMAT


@dataclass(frozen=True)
class RunDevice:
    """One device of the mesh."""

    id: int
    process: int
    kind: str = ""


@dataclass(frozen=True)
class RunFacts:
    """What `run.json` holds. Only `format` and `recipe` must be there: a page with gaps beats no page."""

    format: str
    recipe: str
    overrides: list[str] = field(default_factory=list)
    command: str = ""
    started: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    chips: list[int] = field(default_factory=list)
    failed: list[list[int]] = field(default_factory=list)
    devices: list[list[RunDevice]] = field(default_factory=list)
    processes: int = 1
    platform: str = ""
    host: str = ""
    cores: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    parameters: int | None = None
    bytes_per_device: dict[str, int] = field(default_factory=dict)
    gradient_sum: str = ""
    shard_update: bool = False
    data: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunHistory:
    """The events of a run, over all its interruptions: each update once, as it was done last."""

    starts: list[Started]
    compiled: list[Compiled]
    updates: list[Updated]
    evaluations: list[Evaluated]
    ended: Ended | None
    skipped: list[Skipped] = field(default_factory=list)
    troubled: list[BadUpdate] = field(default_factory=list)
    not_saved: list[SaveFailed] = field(default_factory=list)
    regrouped: list[Regrouped] = field(default_factory=list)
    account: GoodputAccount = field(default_factory=GoodputAccount)

    @property
    def update(self) -> int:
        """Updates done, as far as the events tell."""
        done = [e.update for e in self.starts] + [e.update for e in self.updates]
        return max(done, default=0)

    @property
    def total(self) -> int:
        """Updates of the whole run."""
        return self.starts[-1].updates if self.starts else self.update

    @property
    def state(self) -> str:
        """`complete`, `stopped` (it was asked to), or `open` (it runs still, or was killed)."""
        if self.ended is None:
            return "open"
        return "stopped" if self.ended.interrupted else "complete"

    @property
    def resumed(self) -> list[int]:
        """The updates after which the run went on from a checkpoint."""
        again = (start.update for start in self.starts if not start.facts.get("generation"))
        return sorted({update for update in again if update > 0})

    @property
    def timed(self) -> list[Updated]:
        """The updates whose time says something: not the first of a process, unless there is no other."""
        first = {start.update + 1 for start in self.starts}
        return [e for e in self.updates if e.update not in first] or self.updates

    @property
    def data_share(self) -> float:
        """Waiting for data over the time of all updates; NaN without any."""
        total_s = sum(event.step_s for event in self.updates)
        return sum(event.data_s for event in self.updates) / total_s if total_s > 0 else math.nan


def read_recipe(folder: Path) -> str:
    """The recipe as text.

    Raises:
      RunFolderError: folder or file are missing, or it is not text.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: there is no such run folder. Name a folder that a run has written.")
    return _read_text(folder / "recipe.toml")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunFolderError(
            f"{path}: cannot be read ({what}). Every run folder has this file: name the folder of a run "
            "that has started, or copy the file from where the run was made."
        ) from error


def read_facts(folder: Path) -> RunFacts:
    """The facts of `run.json`.

    Raises:
      RunFolderError: the file is missing, broken or of another format.
    """
    path = folder / "run.json"
    content = _read_text(path)
    try:
        facts = msgspec.json.decode(content, type=RunFacts)
    except msgspec.DecodeError as error:
        raise RunFolderError(
            f"{path}: not the facts of a run ({error}). Copy the file again from where the run was made."
        ) from error
    if facts.format != FORMAT:
        raise RunFolderError(
            f"{path}: its format is {facts.format!r}, and this version reads {FORMAT!r}. "
            "Write the report with the version of multipod that made the run."
        )
    return facts


def read_history(folder: Path) -> RunHistory:
    """The events of `metrics.jsonl`.

    Raises:
      RunFolderError: the file is missing, or a line other than a last one cut short is not an event.
    """
    path = folder / "metrics.jsonl"
    events: list[Event] = []
    account = GoodputAccount()
    for place, record in enumerate(read(path), start=1):
        try:
            event = decode(record)
        except ValueError as error:
            raise RunFolderError(
                f"{path}, line {place}: not an event of this version ({error}). Remove the line, or write "
                "the report with the version of multipod that made the run."
            ) from error
        if isinstance(event, Started):  # what was done after its checkpoint is done again; what ended goes on
            events = [e for e in events if getattr(e, "update", 0) <= event.update and not isinstance(e, Ended)]
        if isinstance(event, BadUpdate):  # rolled back: the same
            back_to = event.back_to
            events = [e for e in events if isinstance(e, BadUpdate) or getattr(e, "update", 0) <= back_to]
        if event is not None:
            events.append(event)
            account(event)
    return RunHistory(
        starts=[e for e in events if isinstance(e, Started)],
        compiled=[e for e in events if isinstance(e, Compiled)],
        updates=[e for e in events if isinstance(e, Updated)],
        evaluations=[e for e in events if isinstance(e, Evaluated)],
        # An end before the last start was none: the run went on.
        ended=events[-1] if events and isinstance(events[-1], Ended) else None,
        troubled=[e for e in events if isinstance(e, BadUpdate)],
        not_saved=[e for e in events if isinstance(e, SaveFailed)],
        regrouped=[e for e in events if isinstance(e, Regrouped)],
        account=account,
        skipped=list({e.name: e for e in events if isinstance(e, Skipped)}.values()),
    )
