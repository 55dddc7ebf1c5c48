"""`multipod clicks`: Criteo's text to click records, and generated text to try it on."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from multipod.data.clicks.prepare import Settings, default_rows
from multipod.data.clicks.prepare import prepare as run
from multipod.data.clicks.published import take as take_files
from multipod.data.clicks.synthetic import Synthetic, criteo_lines
from multipod.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.group()
def clicks() -> None:
    """Prepare click logs in Criteo's format (Kaggle, Terabyte), or generate some."""


@clicks.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder of the records.")
@click.option(
    "--rows",
    default="1000000",
    show_default=True,
    help="Rows of every table, or 26 numbers between commas; or kaggle, terabyte, mlperf, mlperf-v2.",
)
@click.option("--ids", type=click.Choice(["hash", "modulo", "frequent"]), default="hash", show_default=True)
@click.option("--threshold", default=8, show_default=True, help="Of --ids frequent: values seen so often get a row.")
@click.option("--days", default=7, show_default=True, help="Parts that a single file is cut into; the last is to test.")
@click.option("--bad-share", default=0.001, show_default=True, help="The largest share of malformed lines.")
@click.option("--part-lines", default=1_000_000, show_default=True, help="Lines in a part.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def prepare(
    files: tuple[str, ...],
    out: Path,
    rows: str,
    ids: str,
    threshold: int,
    days: int,
    bad_share: float,
    part_lines: int,
    quiet: bool,
) -> None:
    """Turn FILES (text, or .gz) into records that training maps into memory.

    Several files are days; of the last, half is to test and half to validate. Stopped at any time, by Ctrl-C, a crash
    or a full disk, the same command goes on where it was.
    """

    settings = Settings(files, _sizes_of(rows), ids, threshold, days, bad_share, part_lines)  # type: ignore[arg-type]
    try:
        with _bar(quiet) as report:
            found = run(settings, out, report)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from the last part in {out}", err=True)
        raise
    if not quiet:
        click.echo(
            f"{out}: {found['examples']:,} examples of {found['lines']:,} lines, {found['malformed']:,} malformed"
        )


@clicks.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder of the records.")
@click.option("--rows", default="", help="As of prepare.  [default: what day_fea_count.npz says, or the largest ids]")
@click.option("--days", default=7, show_default=True, type=click.IntRange(2), help="That a single .npz is cut into.")
def take(files: tuple[Path, ...], out: Path, rows: str, days: int) -> None:
    """Turn FILES that DLRM's or MLPerf's own programs made into records: .npz, one a day, or the three .bin."""

    parts = take_files(files, out, _sizes_of(rows) if rows else (), days)
    click.echo(f"{out}: {sum(parts.values()):,} examples of {len(parts)} files")


@clicks.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file; - is standard output.")
@click.option("--examples", default=100_000, show_default=True, type=click.IntRange(1))
@click.option("--truth", type=click.Choice(["unstructured", "structured"]), default="unstructured", show_default=True)
@click.option("--zipf", default=1.05, show_default=True, help="Exponent of the ids' frequencies.")
@click.option("--seed", default=0, show_default=True)
def generate(out: Path, examples: int, truth: str, zipf: float, seed: int) -> None:
    """Write click logs of a known truth in Criteo's text format."""

    spec = Synthetic(truth=truth, zipf=zipf, seed=seed)  # type: ignore[arg-type]
    if str(out) == "-":
        for block in criteo_lines(spec, examples):
            sys.stdout.buffer.write(block)
        return
    with out.open("wb") as file:
        for block in criteo_lines(spec, examples):
            file.write(block)
    click.echo(f"{out}: {examples:,} lines")


def _sizes_of(rows: str) -> tuple[int, ...]:
    try:
        return _sizes(rows)
    except ValueError as error:
        raise DataError(f"--rows {rows!r}: {error}. Give one number, 26 between commas, or a set's name.") from error


def _sizes(rows: str) -> tuple[int, ...]:

    if rows in ("kaggle", "terabyte", "mlperf", "mlperf-v2"):
        from multipod.models import dlrm_published as published

        return {
            "kaggle": published.KAGGLE_ROWS,
            "terabyte": published.TERABYTE_10M_ROWS,
            "mlperf": published.MLPERF_ROWS,
            "mlperf-v2": published.MLPERF_V2_ROWS,
        }[rows]
    return default_rows([int(part) for part in rows.split(",")])


@contextmanager
def _bar(quiet: bool) -> "Iterator[Callable[[str, int, int], None]]":
    """A bar on terminals, nothing elsewhere."""

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report
