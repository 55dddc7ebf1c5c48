"""The table at the end of a run, what is wrong with it, and what comes next."""

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from multipod.extras import has_extra
from multipod.train.events import Ended, Event
from multipod.train.observers import text
from multipod.train.observers.learning import LearningCheck


class Summary:
    """Prints the table at the end of a run, how to go on with one that was stopped, and else the next steps.

    A run that learned nothing is told so.
    """

    def __init__(self, console: Console, folder: Path) -> None:
        self._console = console
        self._folder = folder
        self._learning = LearningCheck()
        self._ended: Ended | None = None

    def __call__(self, event: Event) -> None:
        """Remembers the end, and how the loss went."""
        self._learning(event)
        if isinstance(event, Ended):
            self._ended = event

    def close(self) -> None:
        """Prints, once the progress bar is gone; later calls do nothing."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        self._console.print(summary_table(ended))
        if ended.resume:
            self._console.print(f"Go on with:\n  {ended.resume}", soft_wrap=True, highlight=False)
            return
        recipe = tomllib.loads((self._folder / "recipe.toml").read_text(encoding="utf-8"))
        for line in [*self._learning.trouble(recipe), "Next:", *next_steps(self._folder, recipe)]:
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def next_steps(folder: Path, recipe: Mapping[str, Any]) -> list[str]:
    """The commands that a complete run is looked at and used with; export, which takes classifiers, to those alone."""
    run = shlex.quote(str(folder))
    reads = [f"  open {shlex.quote(str(folder / 'report.html'))} in a browser"] if has_extra("report") else []
    steps = [*reads, f"  multipod eval {run}"]
    classifies = recipe.get("objective", {}).get("kind", "").endswith(":Classification")
    return [*steps, f"  multipod export {run} -o model.tflite"] if classifies else steps


def summary_table(ended: Ended) -> Table:
    """What a run came to, as a table of two columns; a dash stands where nothing was measured."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in text.summary_rows(ended):
        table.add_row(Text(name), Text(value))
    return table
