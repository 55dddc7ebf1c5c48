"""`multipod verify`: whether a recipe learns in other layouts what it learns on one device."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from multipod import runs, runtime
from multipod.cli import completion
from multipod.cli.json_output import json_option, print_json
from multipod.cli.options import settle, what_options


@click.command()
@click.argument("recipe", shell_complete=completion.recipes)
@click.option("--layouts", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="How many to draw.")
@click.option("--updates", type=click.IntRange(1), default=5, show_default=True, metavar="N", help="Updates of each.")
@click.option(
    "--devices", type=click.IntRange(1, 2048), default=8, show_default=True, metavar="N",
    help="Virtual CPU devices: the most that a layout takes.",
)  # fmt: skip
@click.option("--draw", type=click.IntRange(0), default=0, show_default=True, metavar="SEED", help="Draws others.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="All of it as JSON.")
@click.option("--cache", metavar="DIR", help="Compiled programs; `off` for none.  [default: ~/.cache/multipod/xla]")
@json_option
@what_options
@click.pass_context
def verify(
    context: click.Context,
    recipe: str,
    layouts: int,
    updates: int,
    devices: int,
    draw: int,
    out: Path | None,
    cache: str | None,
    as_json: bool,
    changes: list[str],
) -> None:
    """Train RECIPE for some updates in layouts drawn at random, and hold each update against one device in float64.

    With --layout it is that one. Exits 1 if a layout learns something else, and says which, in which update, and what.
    """
    where = settle(None, (), devices, runtime.Timeouts().limit_s, cache)
    from multipod.cli.printing.verify import result_text, verdict_text
    from multipod.verify.verify import verify as verified

    chosen = runs.configure_recipe(recipe, changes, where)
    asked = [chosen.layout] if any(change.startswith("layout.") for change in changes) else layouts
    verdict = verified(
        chosen,
        layouts=asked,
        updates=updates,
        devices=devices,
        seed=draw,
        report=lambda result: click.echo(result_text(result), err=as_json),
    )
    if as_json:
        print_json(asdict(verdict) | {"holds": verdict.holds})
    else:
        click.echo(verdict_text(verdict))
    if out:
        out.write_text(json.dumps(asdict(verdict), indent=1) + "\n", encoding="utf-8")
    context.exit(0 if verdict.holds else 1)
