"""Values as a table of text, of update, kind, name and value: for spreadsheets, gnuplot and a pivot in pandas."""

from pathlib import Path

from multipod.train.events import BadUpdate, Evaluated, Event, Started, Updated
from multipod.train.observers.jsonl import replace_file

HEADER = "update,kind,name,value\n"


class CsvTable:
    """Appends a row for each value of each update (`train`) and evaluation (`test`) to `path`.

    A run that goes back to a checkpoint, in this process or in a later one, loses the rows of later updates.

    Raises:
      OSError: the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            path.write_text(HEADER)
        self._file = path.open("a")

    def __call__(self, event: Event) -> None:
        """Writes the values of one event; those of evaluations reach the disk at once."""
        match event:
            case Started():
                self._keep_until(event.update)
            case BadUpdate() if event.back_to < event.update:
                self._keep_until(event.back_to)
            case Updated():
                self._write(event.update, "train", {**event.values, "rate": event.rate})
            case Evaluated():
                self._write(event.update, "test", event.values)
                self._file.flush()
            case _:
                pass

    def close(self) -> None:
        """Writes what is left and closes the file; later calls do nothing."""
        self._file.close()

    def _write(self, update: int, kind: str, values: dict[str, float]) -> None:
        self._file.writelines(f"{update},{kind},{name},{value:.9g}\n" for name, value in values.items())

    def _keep_until(self, update: int) -> None:
        self._file.close()
        rows = self._path.read_text().splitlines(keepends=True)[1:]
        kept = [row for row in rows if row.endswith("\n") and int(row.partition(",")[0]) <= update]
        replace_file(self._path, "".join([HEADER, *kept]).encode())
        self._file = self._path.open("a")
