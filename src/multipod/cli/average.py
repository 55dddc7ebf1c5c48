"""`multipod average`: the mean of a run's last checkpoints, as a run folder."""

from pathlib import Path

import click

from multipod import runs
from multipod.cli.options import where_options
from multipod.runs.options import RuntimeOptions


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--last", type=click.IntRange(1), default=5, show_default=True, metavar="N", help="The N newest.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The folder to write.")
@where_options
def average(run: Path, last: int, out: Path, where: RuntimeOptions) -> None:
    """Average the weights of the newest checkpoints in the folder RUN into a folder that `eval` and `export` take."""
    made = runs.average(run, last=last, out=out, options=where)
    updates = ", ".join(map(str, made.updates))
    click.echo(f"{made.folder}: the mean of the checkpoints after {updates} updates. multipod eval {made.folder}")
