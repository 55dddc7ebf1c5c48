"""`multipod eval`: evaluates a checkpoint of a run on its test data."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multipod import runs
from multipod.cli.json_output import json_option, print_json
from multipod.cli.options import where_options
from multipod.layout.text import layout_changes
from multipod.runs.options import RuntimeOptions

if TYPE_CHECKING:
    from multipod.runs.evaluation import Answer, EvaluationResult


@click.command("eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", type=click.IntRange(0), metavar="UPDATE", help="This checkpoint, not the newest.")
@click.option("--tell", type=click.IntRange(0), default=0, metavar="N",
              help="Text-to-text runs: also tell N answers token by token, and count the right ones.")  # fmt: skip
@click.option(
    "--layout",
    default="",
    metavar="LAYOUT",
    help="Lay the run otherwise than it was trained, as for `train`; model=1,stage=1 is a whole model on a device.",
)
@json_option
@where_options
def evaluate(run: Path, at: int | None, tell: int, layout: str, as_json: bool, where: RuntimeOptions) -> None:
    """Evaluate the newest checkpoint in the folder RUN on all test examples, each counted once."""
    opened = runs.open(run, at=at, changes=layout_changes(layout), options=where)
    evaluation = runs.evaluate(opened)
    answers = runs.tell_answers(opened, tell) if tell else []
    if as_json:
        told = [{"input": one.source, "answer": one.told, "wanted": one.wanted} for one in answers]
        judged = {"run": str(run), "update": evaluation.update, "examples": evaluation.count}
        print_json(judged | {"values": evaluation.values} | ({"answers": told} if tell else {}))
        return
    Console().print(values_table(run, evaluation))
    if tell:
        Console().print(answers_table(answers))


def values_table(run: Path, evaluation: "EvaluationResult") -> Table:
    """The values of an evaluation; beside those that count examples, how many of how many."""
    count = evaluation.count
    table = Table(title=f"{run} after {evaluation.update} updates", show_header=False)
    table.add_row("test examples", str(count))
    for name, value in sorted(evaluation.values.items()):
        total = evaluation.sums.get(name, 0.5)
        exact = f"  ({int(total)}/{count})" if float(total).is_integer() and value == total / count else ""
        table.add_row(name, f"{value:.6g}{exact}")
    return table


def answers_table(answers: "Sequence[Answer]") -> Table:
    """What the model told, beside what was wanted."""
    table = Table(title=f"told by itself: {sum(answer.right for answer in answers)} of {len(answers)} right")
    for name in ("input", "answer", "wanted"):
        table.add_column(name, overflow="fold")
    for answer in answers:
        texts = (answer.source, answer.told, answer.wanted)
        table.add_row(*map(escape, texts), style="" if answer.right else "dim")
    return table
