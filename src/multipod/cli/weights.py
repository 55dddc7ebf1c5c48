"""`multipod import` and `multipod hub`: weights of other libraries, and runs as models of the Hugging Face hub."""

from pathlib import Path

import click

from multipod import runs
from multipod.cli import completion
from multipod.cli.options import start_options, what_options, where_options
from multipod.cli.train import absolute_recipe
from multipod.runs.options import RuntimeOptions


@click.command("import")
@click.argument("recipe", shell_complete=completion.recipes)
@click.argument("weights")
@click.option("--out", type=click.Path(path_type=Path), help="The folder of the new run.  [default: runs/RECIPE-NNN]")
@start_options
@what_options
@where_options
def import_weights(
    recipe: str,
    weights: str,
    out: Path | None,
    fresh: tuple[str, ...],
    without: tuple[str, ...],
    library: str,
    changes: list[str],
    where: RuntimeOptions,
) -> None:
    """Make a run of RECIPE's model with another library's WEIGHTS, as its checkpoint after 0 updates.

    WEIGHTS is a .safetensors, .pt or .pth file, a folder with one (or with an index and its parts), an Orbax checkpoint
    of any program, or hf:ORG/NAME.
    `multipod eval`, `export` and `finetune` take the run; `train --resume` trains it.
    """
    start = runs.ForeignStart(weights, fresh, without, library)
    path = runs.import_run(absolute_recipe(recipe), start, out=out, changes=changes, options=where)
    click.echo(f"{path}: {recipe} with the weights of {weights}. multipod eval {path}")


@click.group()
def hub() -> None:
    """Runs as models of the Hugging Face hub: weights, recipe, and a card with the run's own numbers."""


@hub.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--at", type=click.IntRange(0), metavar="UPDATE", help="This checkpoint, not the newest.")
@where_options
def save(run: Path, folder: Path, at: int | None, where: RuntimeOptions) -> None:
    """Write the model in the folder RUN into the new folder FOLDER. Nothing is uploaded."""
    made = runs.hub_save(run, folder, at=at, options=where)
    click.echo(f"{made}: {', '.join(sorted(file.name for file in made.iterdir()))}")


@hub.command()
@click.argument("source")
@click.argument("run", type=click.Path(path_type=Path))
@where_options
def load(source: str, run: Path, where: RuntimeOptions) -> None:
    """Make the run folder RUN of SOURCE: a folder that `hub save` wrote, or hf:ORG/NAME."""
    click.echo(f"{runs.hub_load(source, run, options=where)}: multipod eval {run}")


@hub.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("name", metavar="ORG/NAME")
@click.option("--public", is_flag=True, help="Everybody may read it.  [default: a private one]")
def push(folder: Path, name: str, public: bool) -> None:
    """Upload FOLDER, which `hub save` wrote, with the token of `hf auth login`."""
    click.echo(runs.hub_push(folder, name, private=not public))
