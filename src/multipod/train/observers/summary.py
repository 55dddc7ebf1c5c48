"""The table at the end of a run."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from multipod.train.events import Ended, Event
from multipod.train.observers import text


class Summary:
    """Prints the table at the end of a run, and how to go on with one that was stopped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ended: Ended | None = None

    def __call__(self, event: Event) -> None:
        """Remembers the end."""
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


def summary_table(ended: Ended) -> Table:
    """What a run came to, as a table of two columns; a dash stands where nothing was measured."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in text.summary_rows(ended):
        table.add_row(Text(name), Text(value))
    return table
