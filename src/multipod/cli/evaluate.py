"""`multipod eval`: evaluates a checkpoint of a run on its test data."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from multipod.cli.options import Where, chosen_recipe, where_options


@click.command("eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", type=click.IntRange(0), metavar="UPDATE", help="This checkpoint, not the newest.")
@where_options
def evaluate(run: Path, at: int | None, where: Where) -> None:
    """Evaluate the newest checkpoint in the folder RUN on all test examples, each counted once."""
    from multipod.layout.mesh import make_mesh
    from multipod.step.programs import program_of
    from multipod.train.checkpoint import Checkpoints
    from multipod.train.evaluation import evaluate as evaluate_state
    from multipod.train.run_folder import check_same, open_folder

    folder, facts = open_folder(run)
    recipe = chosen_recipe(facts["recipe"], facts["overrides"], where)
    check_same(folder, recipe)
    program = program_of(recipe, make_mesh(recipe.layout))
    checkpoints = Checkpoints(folder.checkpoints, recipe.keep_checkpoints, read_only=True)
    state = checkpoints.restore(program.shapes, at)
    sums = evaluate_state(program, state, recipe.data.test())
    count = int(sums.pop("count"))
    table = Table(title=f"{run} after {int(state.update)} updates", show_header=False)
    table.add_row("test examples", str(count))
    for name, total in sorted(sums.items()):
        exact = f"  ({int(total)}/{count})" if float(total).is_integer() else ""
        table.add_row(name, f"{total / count:.6g}{exact}")
    Console().print(table)
    checkpoints.close()
