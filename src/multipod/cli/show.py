"""`multipod list` and `multipod show`: recipes, and how they lie on a mesh, without training them."""

import inspect

import click
from rich.console import Console
from rich.table import Table

from multipod import runs, runtime
from multipod.cli import completion
from multipod.cli.json_output import json_option, print_json
from multipod.cli.options import what_options, where_options
from multipod.runs.options import RuntimeOptions


@click.command("list")
@json_option
def list_recipes(as_json: bool) -> None:
    """List the recipes, one line each, and the presets that `--set preset=NAME` takes."""
    from multipod.optim.presets import PRESETS, preset_lines
    from multipod.recipes.find import RECIPES, find

    summaries = {name: (inspect.getdoc(find(name)) or "").splitlines()[0] for name in sorted(RECIPES)}
    if as_json:
        batches = {name: [run.batch for run in preset.runs] for name, preset in PRESETS.items()}
        print_json({"recipes": summaries, "presets": batches})
        return
    for name, summary in summaries.items():
        click.echo(f"{name:{max(map(len, summaries))}}  {summary}")
    click.echo("\npresets: an optimizer, its rate and a length that go with the batch, as --set preset=NAME\n")
    for line in preset_lines():
        click.echo(line)


@click.command()
@click.argument("recipe", shell_complete=completion.recipes)
@click.option("--tensors", is_flag=True, help="How each parameter is split.  [default: with --layout]")
@click.option("--compile", "compiles", is_flag=True, help="Compile the update: activations, FLOPs, collectives.")
@click.option(
    "--compile-for",
    metavar="TPU",
    help="Compile it for a TPU that is not here, as v3:128x32 (needs the extra `tpu`).",
)
@click.option("--time-layers", is_flag=True, help="Time each layer on one device; the cut that balances the stages.")
@json_option
@what_options
@where_options
def show(
    recipe: str,
    tensors: bool,
    compiles: bool,
    compile_for: str | None,
    time_layers: bool,
    as_json: bool,
    changes: list[str],
    where: RuntimeOptions,
) -> None:
    """Show RECIPE: all its fields, the mesh, parameters, bytes on each device. Nothing is trained.

    The mesh may be far larger than this machine: --layout data=32x32,model=4 shows 4,096 devices. What is compiled is
    always for that very mesh: of this machine, of up to 2,048 virtual CPU devices, or of a TPU.
    """
    from multipod.cli.printing.recipe import (
        compiled_for_table,
        layer_times_table,
        program_tables,
        recipe_text,
    )
    from multipod.cli.printing.recipe_figures import (
        compiled_for_figures,
        layer_times_figures,
        program_figures,
        recipe_figures,
    )
    from multipod.layout.compiled import provide_cpu_devices

    chosen = runs.configure_recipe(recipe, changes, where)
    if compiles:
        provide_cpu_devices(chosen.layout)
    if compile_for:
        runtime.absent_tpus()
    if as_json:
        if compile_for:
            figures = compiled_for_figures(chosen, compile_for, where)
        elif time_layers:
            figures = layer_times_figures(chosen)
        else:
            figures = program_figures(chosen, compiles=compiles)
        print_json(recipe_figures(chosen) | figures)
        return
    if compile_for:
        shown: list[Table | str] = [compiled_for_table(chosen, compile_for, where)]
    elif time_layers:
        shown = [layer_times_table(chosen)]
    else:
        tensors = tensors or any(change.startswith("layout.") for change in changes)
        shown = program_tables(chosen, tensors=tensors, compiles=compiles)
    # All is worked out before anything is printed: what cannot be is refused without half a page above it.
    click.echo(recipe_text(chosen))
    console = Console()
    for part in shown:
        console.print(part, highlight=False, soft_wrap=True, markup=False) if isinstance(part, str) else console.print(
            part
        )
