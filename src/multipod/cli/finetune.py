"""`multipod finetune`: trains a pre-trained run's model on a text-to-text task."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multipod.cli.options import Where, what_options, where_options
from multipod.cli.reading import reading_options
from multipod.cli.train import Request, peers_may_be_lost, run

if TYPE_CHECKING:
    from multipod.data.reading import Reading
    from multipod.step.program import Program
    from multipod.step.state import State


@click.command()
@click.argument("pretrained", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--task", required=True, type=click.Path(path_type=Path), metavar="FILE",
              help='JSON lines, each {"input": "...", "target": "..."}.')  # fmt: skip
@click.option("--train", "parts", default="all", show_default=True, metavar="PARTS",
              help="What is updated: all, experts, sparse, non-experts, non-sparse, dense, attention, non-attention, "
              "router, or parts of paths as encoder/0/; several with commas.")  # fmt: skip
@click.option("--rate", default=1e-3, show_default=True, help="The learning rate, constant.")
@click.option("--batch", default=32, show_default=True, help="Examples of an update.")
@click.option("--updates", default=200, show_default=True, help="How many.")
@click.option("--dropout", default=0.1, show_default=True, help="Share dropped, but inside experts.")
@click.option("--expert-dropout", default=0.2, show_default=True, help="Share dropped inside experts.")
@click.option("--capacity", default=2.0, show_default=True, help="Capacity factor in evaluation.")
@click.option("--no-sentinels", is_flag=True, help="Do not mark what is to be told by a sentinel.")
@click.option("--reset-optimizer", is_flag=True, help="Begin with a fresh optimizer state. (It helped nowhere.)")
@click.option("--at", type=click.IntRange(0), metavar="UPDATE", help="From this checkpoint, not the newest.")
@click.option("--out", type=click.Path(path_type=Path), help="The folder of the new run.  [default: runs/NAME-NNN]")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@reading_options
@what_options
@where_options
def finetune(
    pretrained: Path,
    task: Path,
    parts: str,
    no_sentinels: bool,
    reset_optimizer: bool,
    at: int | None,
    out: Path | None,
    quiet: bool,
    reading: "Reading",
    changes: list[str],
    where: Where,
    **numbers: Any,
) -> int:
    """Fine-tune the model of RUN, a folder that `multipod train` made, on a task.

    Every fifth line of the task is kept for testing. The new run has a folder of its own, and goes on and is evaluated
    like any other: `multipod train --resume`, `multipod eval`.
    """
    from multipod.recipes.finetune import FineTuning
    from multipod.train.run_folder import open_folder

    _, facts = open_folder(pretrained)
    asked = FineTuning(
        facts["recipe"],
        str(task.absolute()),
        tuple(facts["overrides"]),
        tuple(part.strip() for part in parts.split(",") if part.strip()),
        sentinels=not no_sentinels,
        **numbers,
    )

    def begin(program: "Program") -> "State":
        return pretrained_state(program, pretrained, at, reset_optimizer)

    request = Request(asked.name(), changes, out, None, None, 0, quiet, reading, begin=begin)
    with peers_may_be_lost(where):
        return run(request, where)


def pretrained_state(program: "Program", folder: Path, at: int | None, reset_optimizer: bool) -> "State":
    """The state before the first update: the run's parameters, and its optimizer's state unless it is reset.

    Raises:
      CheckpointError: there is none, or it is of another model.
    """
    from multipod.train.checkpoint import Checkpoints
    from multipod.train.run_folder import open_folder

    opened, _ = open_folder(folder)
    checkpoints = Checkpoints(opened.checkpoints, 1, read_only=True)
    local = program.recipe.layout.local_state  # of the chips of that run, which may be others
    before = checkpoints.restore(program.shapes, at, weights_only=reset_optimizer and local)
    checkpoints.close()
    fresh = program.init()
    return fresh._replace(params=before.params, optimizer=fresh.optimizer if reset_optimizer else before.optimizer)
