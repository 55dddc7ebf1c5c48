"""`multipod list` and `multipod show`: recipes, without training them."""

import inspect

import click
from rich.console import Console
from rich.table import Table

from multipod.cli.options import Where, chosen_recipe, what_options, where_options


@click.command("list")
def list_recipes() -> None:
    """List the recipes, one line each."""
    from multipod.recipes.find import RECIPES, find

    for name in sorted(RECIPES):
        first = (inspect.getdoc(find(name)) or "").splitlines()[0]
        click.echo(f"{name:12} {first}")


@click.command()
@click.argument("recipe")
@what_options
@where_options
def show(recipe: str, changes: list[str], where: Where) -> None:
    """Show RECIPE: all its fields, the mesh, parameters, bytes on each device. Nothing is trained."""
    import jax

    from multipod.layout.mesh import data_sizes, is_split, make_mesh, topology_of
    from multipod.recipe.text import to_text
    from multipod.step.program import Program
    from multipod.train.facts import state_bytes
    from multipod.train.observers.text import broken_text

    chosen = chosen_recipe(recipe, changes, where)
    program = Program(chosen, make_mesh(chosen.layout))
    rows = program.rows
    click.echo(to_text(chosen))
    params = jax.tree.leaves(program.shapes.params)
    specs = jax.tree.leaves(program.path.specs, is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec))
    sizes = data_sizes(program.mesh)
    chips = topology_of(chosen.layout, program.mesh)
    table = Table(show_header=False, title="on each device")
    broken = broken_text({"chips": chips.shape, "failed": chosen.layout.failed})
    table.add_row("mesh", f"{sizes[0]} x {sizes[1]} {program.mesh.devices.flat[0].device_kind} devices{broken}")
    whole = f"{rows} rows: {chosen.batch} examples, the rest padding" if program.padded else f"{rows} examples"
    table.add_row("batch", f"{rows // program.mesh.size} of {whole}")
    table.add_row("parameters", f"{sum(leaf.size for leaf in params):,} in {len(params)} tensors")
    for name, size in state_bytes(program).items():
        table.add_row(f"{name}, bytes", f"{size:,}")
    if chosen.layout.shard_update:
        unsplit = [leaf for leaf, spec in zip(params, specs, strict=True) if not is_split(spec)]
        rest = f"{len(unsplit)} of the tensors, {sum(leaf.size * leaf.dtype.itemsize for leaf in unsplit):,} bytes"
        table.add_row("not split in the update", rest)
    Console().print(table)
