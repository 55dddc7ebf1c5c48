"""`multipod eval`: evaluates a checkpoint of a run on its test data."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multipod.cli.options import Where, chosen_recipe, where_options

if TYPE_CHECKING:
    from multipod.recipe.recipe import Recipe


@click.command("eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", type=click.IntRange(0), metavar="UPDATE", help="This checkpoint, not the newest.")
@click.option("--tell", type=click.IntRange(0), default=0, metavar="N",
              help="Text-to-text runs: also tell N answers token by token, and count the right ones.")  # fmt: skip
@where_options
def evaluate(run: Path, at: int | None, tell: int, where: Where) -> None:
    """Evaluate the newest checkpoint in the folder RUN on all test examples, each counted once."""
    from multipod.layout.mesh import make_mesh
    from multipod.metrics.objective import finished
    from multipod.step.program import program_of
    from multipod.train.checkpoint import Checkpoints
    from multipod.train.evaluation import evaluate as evaluate_state
    from multipod.train.run_folder import check_same, open_folder

    folder, facts = open_folder(run)
    recipe = chosen_recipe(facts["recipe"], facts["overrides"], where)
    check_same(folder, recipe, learning=False)
    program = program_of(recipe, make_mesh(recipe.layout))
    checkpoints = Checkpoints(folder.checkpoints, recipe.keep_checkpoints, read_only=True)
    # States that are of single chips are of no use here, and the chips may be others.
    state = checkpoints.restore(program.shapes, at, weights_only=recipe.layout.local_state)
    sums = evaluate_state(program, state, recipe.data.test())
    values, count = finished(recipe.objective, sums), int(sums["count"])
    table = Table(title=f"{run} after {int(state.update)} updates", show_header=False)
    table.add_row("test examples", str(count))
    for name, value in sorted(values.items()):
        total = sums.get(name, 0.5)
        exact = f"  ({int(total)}/{count})" if float(total).is_integer() and value == total / count else ""
        table.add_row(name, f"{value:.6g}{exact}")
    Console().print(table)
    if tell:
        Console().print(_answers(recipe, program.full_params(state), tell))
    checkpoints.close()


def _answers(recipe: "Recipe", params: Any, count: int) -> Table:
    """What the model answers to the first `count` test examples, each token behind those it told before.

    Raises:
      RecipeError: a model or data that have no text to tell.
    """
    import jax
    import numpy as np

    from multipod.data.span_corruption import START
    from multipod.data.stdlib_text import END
    from multipod.errors import RecipeError

    if not hasattr(recipe.model, "tell") or not hasattr(recipe.data, "spelled"):
        raise RecipeError(
            f"--tell: {type(recipe.model).__name__} on {type(recipe.data).__name__} has no text to tell. Leave it out, "
            "or give a run of an StMoe on text."
        )
    model: Any = recipe.model
    source = recipe.data.test()
    batch = source.read(np.arange(min(count, len(source))))
    label = batch["label"]
    asked = {"source": batch["source"]}
    tell = jax.jit(lambda params: model.tell(params, asked, start=START, end=END, length=label.shape[1]))
    told = np.asarray(tell(params))
    right = (told == label).all(-1)
    table = Table(title=f"told by itself: {int(right.sum())} of {len(label)} right")
    for name in ("input", "answer", "wanted"):
        table.add_column(name, overflow="fold")
    for row in range(len(label)):
        texts = (recipe.data.spelled(tokens[row]) for tokens in (batch["source"], told, label))
        table.add_row(*map(escape, texts), style="" if right[row] else "dim")
    return table
