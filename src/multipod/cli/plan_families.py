"""`multipod plan calibrate --from`: measured runs in a TOML file, and predictions of larger ones."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import tomli_w
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from multipod.cli.json_output import print_json
from multipod.errors import PlanError
from multipod.plan.families.forecast import Interval, as_data, forecasts, intervals
from multipod.plan.families.rows import asked_rows, public_rows, read_rows
from multipod.train.observers.jsonl import replace_file
from multipod.train.observers.text import duration

if TYPE_CHECKING:
    from rich.console import Console

    from multipod.plan.families.conditional import Predicted

COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[float], str]]] = {
    "samples/s": (("throughput_per_s",), lambda value: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"),
    "step": (("step_s",), lambda value: f"{1e3 * value:,.3g} ms" if value < 1 else duration(value)),
    "epochs": (("epochs",), lambda value: f"{value:.3g}"),
    "init": (("init_s",), duration),
    "run": (("run_s", "run_s_of_samples"), duration),
}
"""By heading: names of the predictions, and how a value is written. JSON and TOML have more."""


def predict_from(console: "Console", file: Path, sizes: Sequence[str], save: Path | None, as_json: bool) -> None:
    """Predicts the questions of `file` and `sizes`; prints them, and writes them to `save`.

    Raises:
      PlanError: what is wrong in the file, or with the question.
    """
    rows = read_rows(file)
    rows += asked_rows(rows, [size for text in sizes for size in _sizes(text)])
    found = forecasts(rows)
    data = {"row": [as_data(one) for one in found]}
    if save is not None:
        _write(save, tomli_w.dumps(data))
    if as_json:
        print_json(data)
        return
    for family in dict.fromkeys(one.row.family for one in found):
        _show(console, [one for one in found if one.row.family == family])
    largest = max(row.accelerators for row in public_rows())
    said = [
        "below each value its 90 % interval, as wide as errors of held-out families of MLPerf v0.7 and v1.0 ask for"
    ]
    if any(one.row.accelerators > largest for one in found):
        said.append(f"none of them has more than {largest:,} accelerators, so nobody has checked larger ones")
    console.print(f"[dim]{'; '.join(said)}.[/]", highlight=False)
    if save is not None:
        click.echo(f"predictions in {save}")


def _write(file: Path, text: str) -> None:
    """Writes the file as a whole, or leaves it as it was.

    Raises:
      PlanError: it cannot be written.
    """
    try:
        replace_file(file, text.encode())
    except OSError as error:
        raise PlanError(
            f"{file}: {error.strerror}. The predictions are not saved: give --save another place."
        ) from error


def _show(console: "Console", found: Sequence["Predicted"]) -> None:
    first = found[0]
    values = [intervals(one) for one in found]
    columns = {
        head: column for head, column in COLUMNS.items() if any(name in row for name in column[0] for row in values)
    }
    of = f"{first.row.benchmark or 'one job'} on {first.row.accelerator or 'accelerators'}"
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=escape(f"{first.row.family}: {of}, from {_measured(first.known)}")
    )
    for head in ("accelerators", "batch", *columns):
        table.add_column(head, justify="right")
    for one, row in zip(found, values, strict=True):
        cells = [_cell(row, *column) for column in columns.values()]
        table.add_row(f"{one.row.accelerators:,}", f"{one.row.batch:,.0f}", *cells)
    console.print(table)


def _measured(rows: int) -> str:
    return f"{rows} measured row{'s' if rows > 1 else ''}"


def _cell(row: dict[str, Interval], names: tuple[str, ...], text: Callable[[float], str]) -> str:
    interval = next((row[name] for name in names if name in row), None)
    if interval is None:
        return ""
    return f"{text(interval.value)}\n[dim]{text(interval.low)} to {text(interval.high)}[/]"


def _sizes(text: str) -> list[tuple[int, float | None]]:
    """(64, None) and (256, 8192.0) for `64,256:8192`."""
    found: list[tuple[int, float | None]] = []
    for part in text.split(","):
        size = re.fullmatch(r"\s*([1-9]\d{0,6})(?::([1-9]\d{0,9}))?\s*", part)
        if not size:
            raise click.UsageError(
                f"--predict {text!r}: {part.strip()!r} is no size. Write accelerators, or "
                "accelerators:batch, as 64,256:8192."
            )
        found.append((int(size[1]), float(size[2]) if size[2] else None))
    return found
