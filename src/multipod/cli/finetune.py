"""`multipod finetune`: trains a pre-trained run's model on a text-to-text task."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multipod import runs
from multipod.cli.options import what_options, where_options
from multipod.cli.reading import reading_options
from multipod.cli.train import ConsoleObservers, exit_code_of
from multipod.runs.options import RuntimeOptions

if TYPE_CHECKING:
    from multipod.data.reading import InputOptions


@click.command()
@click.argument("pretrained", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--task", "tasks", required=True, multiple=True, metavar="FILE",
              help='JSON lines, each {"input": "...", "target": "..."}; or hub:NAME:SPLIT, or a folder. '
              "Several, each with the option before it, are mixed by their sizes.")  # fmt: skip
@click.option("--limit", default=0, show_default=True,
              help="Of several tasks, one counts as so many examples at most; 0: as it is.")  # fmt: skip
@click.option("--temperature", default=1.0, show_default=True,
              help="Of several tasks; the larger, the more alike are their shares.")  # fmt: skip
@click.option("--metrics", default="exact_match,token_f1", show_default=True, metavar="NAMES",
              help="What the model's answers are judged by in evaluation, with commas: answer_accuracy, exact_match, "
              "token_f1, rouge_1, rouge_2, rouge_l, matthews, macro_f1; '' for none.")  # fmt: skip
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
    tasks: tuple[str, ...],
    parts: str,
    metrics: str,
    no_sentinels: bool,
    reset_optimizer: bool,
    at: int | None,
    out: Path | None,
    quiet: bool,
    reading: "InputOptions",
    changes: list[str],
    where: RuntimeOptions,
    **numbers: Any,
) -> int:
    """Fine-tune the model of RUN, a folder that `multipod train` made, on a task.

    Every fifth line of a task is kept for testing. The new run has a folder of its own, and goes on and is evaluated
    like any other: `multipod train --resume`, `multipod eval`.
    """
    files = tuple(task if task.startswith("hub:") else str(Path(task).absolute()) for task in tasks)
    asked = runs.FineTuning(files, _words(parts), sentinels=not no_sentinels, metrics=_words(metrics), **numbers)
    request = runs.TrainRequest(
        changes=changes, out=out, at=at, reading=reading, observers=ConsoleObservers(quiet, where)
    )
    return exit_code_of(runs.finetune(pretrained, asked, request, reset_optimizer=reset_optimizer, options=where))


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
