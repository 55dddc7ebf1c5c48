"""`multipod report`: writes a run's page again."""

from pathlib import Path

import click

from multipod.extras import packages_of, require


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def report(run: Path) -> None:
    """Write report.html of the run in the folder RUN from its recipe, facts and metrics."""
    require("report.html", *packages_of("report"))
    from multipod.train.observers.report import write
    from multipod.train.run_folder import open_folder

    open_folder(run)
    click.echo(write(run))
