"""Events for people: a live bar on terminals, plain lines elsewhere, and the table at the end."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

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
from multipod.train.observers import text

NAMED = 5
"""Examples left out that are named as it goes; the report names more, the summary counts all."""


@dataclass
class UpdateWindow:
    """The updates since the last line, summed up. Times leave out updates whose own time says nothing."""

    updates: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    timed: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    examples: float = 0.0

    def add(self, event: Updated, timed: bool = True) -> None:
        """Counts one update in; one that is not `timed`, such as the first, only with its values."""
        self.updates += 1
        for name, value in event.values.items():
            if "/" in name:
                continue  # a part of a value, such as the load of one expert: for the report
            self.sums[name] = self.sums.get(name, 0.0) + value
        if timed:
            self.timed += 1
            self.step_s += event.step_s
            self.data_s += event.data_s
            self.examples += event.rate * event.step_s

    def values(self) -> list[str]:
        """Returns a text such as `loss 0.2345` and `accuracy 92.31 %`: means over the updates, the loss first."""
        named = sorted(self.sums.items(), key=lambda item: item[0] != "loss")
        return [text.value_text(name, total / self.updates) for name, total in named]

    def rate(self, unit: str) -> list[str]:
        """Returns a text such as `48,211 images/s`; empty if no update was timed."""
        return [f"{text.rate_text(self.examples / self.step_s)} {unit}/s"] if self.step_s > 0 else []

    def step(self) -> list[str]:
        """Returns a text such as `12.3 ms/step`; empty if no update was timed."""
        return [f"{text.milliseconds(self.step_s / self.timed)}/step"] if self.step_s > 0 else []

    def data(self) -> list[str]:
        """Returns a text such as `data wait 3 %`; empty if no update was timed."""
        return [f"data wait {self.data_s / self.step_s:.0%}".replace("%", " %")] if self.step_s > 0 else []


class _RunProgress:
    """What both observers follow: where the run is, how fast it goes, and the updates since the last line."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.window = UpdateWindow()
        self.updates = self.update = self.start = 0
        self.unit = "examples"
        self.skipped = 0
        self._first: tuple[int, float] | None = None

    def started(self, event: Started) -> None:
        self.updates, self.update, self.start = event.updates, event.update, event.update
        self.unit = event.unit
        self._first = None

    def updated(self, event: Updated) -> None:
        self.update = event.update
        # The first update of a process holds compiling and the filling of the pipeline.
        self.window.add(event, timed=self._first is not None)
        self._first = self._first or (event.update, self.clock())

    def skip(self, event: Skipped) -> str:
        """What to say of an example that was left out; empty when enough was said."""
        self.skipped += 1
        if self.skipped > NAMED:
            return ""
        more = "; those that follow are in metrics.jsonl" if self.skipped == NAMED else ""
        return text.skipped_text(event) + more

    def take(self) -> UpdateWindow:
        window, self.window = self.window, UpdateWindow()
        return window

    def left(self) -> list[str]:
        """Returns a text such as `48 s left`, at the mean pace since the first update, evaluations included."""
        if self._first is None or self.update == self._first[0]:
            return []
        pace_s = (self.clock() - self._first[1]) / (self.update - self._first[0])
        return [f"{text.duration(pace_s * (self.updates - self.update))} left"]


class PlainLines:
    """Writes lines to `stream`: start, compiling, evaluations, the end, and progress at most every `every_s`.

    Values and times on a line of progress are means over the updates since the line of progress before it.
    """

    def __init__(self, stream: IO[str], every_s: float = 5.0, clock: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._every_s = every_s
        self._run = _RunProgress(clock)
        self._shown = clock()

    def __call__(self, event: Event) -> None:
        """Writes a line if this event is worth one."""
        match event:
            case Started():
                self._run.started(event)
                self._shown = self._run.clock()
                self._line(f"{text.started_text(event)}; compiling")
            case Compiled():
                self._line(text.compiled_text(event))
            case Updated():
                self._run.updated(event)
                if self._run.clock() - self._shown >= self._every_s:
                    self._progress(self._run.left())
            case Skipped():
                if line := self._run.skip(event):
                    self._line(line)
            case SaveFailed():
                self._line(text.save_failed_text(event))
            case Regrouped():
                self._line(text.regrouped_text(event))
            case BadUpdate():
                self._line(text.troubled_text(event))
                self._run.update = event.back_to
            case Evaluated():
                self._line(f"{self._place(event.update)}  {text.evaluated_text(event)}")
            case Ended():
                if self._run.window.updates:
                    self._progress([])
                self._line(text.ended_text(event, self._run.updates, self._run.start))

    def close(self) -> None:
        """Does nothing: the stream belongs to the caller, and each line is flushed."""

    def _progress(self, left: list[str]) -> None:
        self._shown = self._run.clock()
        window = self._run.take()
        values = [f"training {value}" for value in window.values()[:1]] + window.values()[1:]
        parts = [self._place(self._run.update), *values, *window.rate(self._run.unit), *window.data(), *left]
        self._line("  ".join(parts))

    def _place(self, update: int) -> str:
        total = str(self._run.updates)
        return f"{update:>{len(total)}}/{total}"

    def _line(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Bar:
    """A live display at the foot of the terminal: a bar and the current values. Evaluations scroll above it.

    Values and times are means over the updates since they were last drawn, about each half second.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic, every_s: float = 0.5):
        self._console = console
        self._every_s = every_s
        self._run = _RunProgress(clock)
        self._shown = -math.inf
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=None, left="")
        self._values = Text(no_wrap=True, overflow="ellipsis")
        # Live alone draws; a Progress that is started would draw as well.
        self._live = Live(Group(self._progress, Padding(self._values, (0, 0, 0, 2))), console=console)

    def __call__(self, event: Event) -> None:
        """Brings the display up to date."""
        match event:
            case Started():
                self._run.started(event)
                self._live.start()
                self._print(text.started_text(event), "bold")
                self._draw("compiling")
            case Compiled():
                self._print(text.compiled_text(event), "dim")
                self._draw("training")
            case Updated():
                self._run.updated(event)
                if self._run.clock() - self._shown >= self._every_s:
                    self._draw("training")
            case Skipped():
                if line := self._run.skip(event):
                    self._print(line, "yellow")
            case SaveFailed():
                self._print(text.save_failed_text(event), "bold red")
            case Regrouped():
                self._print(text.regrouped_text(event), "bold yellow")
            case BadUpdate():
                self._print(text.troubled_text(event), "bold red")
                self._run.update = event.back_to
            case Evaluated():
                self._draw("training")  # a save may follow, which the bar would stand still in
                self._print(f"{event.update:,}  {text.evaluated_text(event)}", "green")
            case Ended():
                self._draw("stopped" if event.interrupted else "done")
                self.close()
                self._print(
                    text.ended_text(event, self._run.updates, self._run.start),
                    "bold yellow" if event.interrupted else "bold",
                )

    def close(self) -> None:
        """Gives the terminal back; later calls do nothing."""
        self._live.stop()

    def _draw(self, what: str) -> None:
        run = self._run
        total = None if what == "compiling" else run.updates  # None: a bar that only shows life
        left = "".join(run.left()) if what == "training" else ""
        self._progress.update(self._task, description=what, completed=run.update, total=total, left=left)
        if run.window.updates:
            self._shown = run.clock()
            window = run.take()
            self._values.plain = "  ".join(
                [*window.values(), *window.rate(self._run.unit), *window.step(), *window.data()]
            )

    def _print(self, line: str, style: str) -> None:
        self._console.print(Text(line, style))


def make_progress(console: Console) -> Bar | PlainLines:
    """A bar on a terminal, lines anywhere else."""
    return Bar(console) if console.is_terminal else PlainLines(console.file)
