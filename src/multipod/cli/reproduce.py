"""`multipod reproduce`: runs an experiment and writes its page, its figures and its numbers."""

import importlib
import importlib.util
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from multipod import runtime
from multipod.cli.json_output import json_option, print_json
from multipod.errors import RecipeError

if TYPE_CHECKING:
    from multipod.experiments.experiments import Experiment
    from multipod.experiments.outcome import Outcome


@click.command()
@click.argument("name", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    default=Path("docs/results"),
    show_default=True,
    help="Folder for NAME.md, NAME.json and the figures.",
)
@click.option(
    "--count", type=click.IntRange(1), help="How many cases, of experiments that count: availability's faults."
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    metavar="DIR",
    help="Keep each part in DIR as it is done, and go on from there the next time; of the same experiments.",
)
@json_option
def reproduce(name: str | None, out: Path, count: int | None, keep: Path | None, as_json: bool) -> None:
    """Try the claims of a paper here, and write down what came out: NAME.md and NAME.json.

    Without NAME, list the experiments. Exits 1 where a claim does not hold; it is written down all the same.
    """
    table = _table()
    if name is None:
        print_json({"experiments": table.EXPERIMENTS}) if as_json else _list(table.EXPERIMENTS)
        return
    chosen = table.experiment(name)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # not without ending its processes
    out.mkdir(parents=True, exist_ok=True)  # before minutes are spent, not after
    runtime.prepare(cpu_devices=chosen.cpu_devices, cache=runtime.default_cache())
    from multipod.experiments.page import write

    console = Console(stderr=True)
    console.print(f"{name}: {chosen.about}; about {chosen.minutes:g} minutes on two cores.", highlight=False)
    began = time.monotonic()
    outcome = chosen.run(lambda line: console.print(f"[dim]{time.monotonic() - began:6.0f} s[/] {line}"), count, keep)
    files = write(name, outcome, out, time.monotonic() - began)
    if as_json:
        print_json({"experiment": name, "claims": outcome.claims, "files": files})
    else:
        _print_claims(outcome)
        click.echo("wrote " + ", ".join(map(str, files)))
    sys.exit(0 if all(claim.holds for claim in outcome.claims) else 1)


def _print_claims(outcome: "Outcome") -> None:
    claims = Table("claim", "measured", "threshold", "holds")
    for claim in outcome.claims:
        measured, threshold = (
            f"{v:.6g}" if isinstance(v, float) else str(v) for v in (claim.measured, claim.threshold)
        )
        claims.add_row(claim.claim, measured, threshold, "yes" if claim.holds else "no")
    Console().print(claims)


def _table() -> ModuleType:
    """The module with the table of experiments.

    Raises:
      RecipeError: this is an installed package, which comes without them.
    """
    if importlib.util.find_spec("multipod.experiments") is None:
        raise RecipeError(
            "the experiments come with multipod's repository, and this is an installed package. In a checkout say "
            "`pip install --editable .`, then `multipod reproduce` there."
        )
    return importlib.import_module("multipod.experiments.experiments")


def _list(experiments: "Mapping[str, Experiment]") -> None:
    table = Table("name", "minutes", "tries", title="multipod reproduce NAME")
    for name, entry in experiments.items():
        table.add_row(name, f"{entry.minutes:g}", entry.about)
    Console().print(table)
