"""`multipod pipeline`: schedules of pipelines, proven, timed and drawn."""

import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multipod.cli.json_output import json_option, print_json
from multipod.errors import ScheduleError
from multipod.pipelines.build import PIPELINES, build
from multipod.pipelines.check import check
from multipod.pipelines.drawing import draw, write_picture
from multipod.pipelines.timing import Costs, time_schedule

if TYPE_CHECKING:
    from multipod.pipelines.check import PipelineProof
    from multipod.pipelines.timing import Timed

POSITIVE = click.IntRange(1, 4096)


@click.group()
def pipeline() -> None:
    """Pipelines of stages: which treats which micro-batch when. Needs no devices.

    \b
    multipod pipeline list
    multipod pipeline show pipemare --stages 8 --micro-batches 16
    multipod pipeline show 1f1b --stages 4 --micro-batches 8 --out 1f1b.svg
    """


@pipeline.command("list")
@json_option
def list_pipelines(as_json: bool) -> None:
    """List the schedules and their options."""
    if as_json:
        print_json({name: {"summary": one.summary, "options": list(one.options)} for name, one in PIPELINES.items()})
        return
    for name, known in PIPELINES.items():
        options = f"  options: {', '.join(known.options)}" if known.options else ""
        click.echo(f"{name:12} {known.summary}{options}")


@pipeline.command()
@click.argument("name")
@click.option("--stages", type=POSITIVE, default=4, show_default=True, help="Devices.")
@click.option("--micro-batches", type=POSITIVE, default=8, show_default=True, help="In the minibatch of an update.")
@click.option("--updates", type=POSITIVE, help="To show.  [default: 1; asynchronous ones enough to fill the pipe]")
@click.option("--chunks", type=POSITIVE, help="Parts of the model on each device (interleaved).")
@click.option("--forward", type=POSITIVE, default=1, show_default=True, help="Time of a forward pass.")
@click.option("--backward", type=POSITIVE, default=2, show_default=True, help="Time of a backward pass.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw it there, as SVG.")
@json_option
def show(
    name: str,
    stages: int,
    micro_batches: int,
    updates: int | None,
    chunks: int | None,
    forward: int,
    backward: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Prove NAME, draw it, and give delays, activations, weights and idle time."""

    options = {} if chunks is None else {"chunks": chunks}
    fill = 1 if build(name, stages, micro_batches, **options).synchronous else 3 + 2 * -(-2 * stages // micro_batches)
    if stages * micro_batches * (updates or fill) > 1_000_000:
        raise ScheduleError(
            f"pipeline {name}: {stages} stages, {micro_batches} micro-batches and {updates or fill} updates are over "
            "a million passes. Take fewer of one."
        )
    proof = check(build(name, stages, micro_batches, updates or fill, **options))
    clock = time_schedule(proof.schedule, Costs(forward, backward))
    if out is not None and not out.absolute().parent.is_dir():
        raise click.UsageError(f"{out.parent} is no folder to write {out.name} in. Make it first.")
    width = shutil.get_terminal_size(fallback=(120, 48)).columns
    if as_json:
        print_json(_json_figures(proof, clock))
    else:
        click.echo(f"{proof.schedule}\n\n{draw(clock, max(width, 40))}\n")
        for line in _figures(proof, clock):
            click.echo(line)
    if out is not None:
        write_picture(clock, out)
        click.echo(f"written to {out}", err=as_json)


def _json_figures(proof: "PipelineProof", clock: "Timed") -> dict[str, Any]:
    """What `--json` prints: each stage, and the totals; delays in updates, `busy` and `in_use` as shares."""
    made = proof.schedule
    stages = [
        {
            "stage": p + 1,
            "activations": proof.peak_live[p],
            "busy": clock.busy[p] / clock.total,
            "forward_delay": proof.mean_delay(p),
            "backward_delays": proof.backward_delays(p),
            "old_weights": proof.stashed[p],
        }
        for p in range(made.stages)
    ]
    return {
        "schedule": str(made),
        "synchronous": made.synchronous,
        "settled": proof.settled,
        "updates": made.updates,
        "stages": stages,
        "in_use": clock.utilisation,
        "in_use_steadily": clock.steady_utilisation if made.updates > 2 else None,
    }


def _figures(proof: "PipelineProof", clock: "Timed") -> list[str]:
    """The table of stages, and the totals."""
    made = proof.schedule
    columns: list[tuple[str, Callable[[int], Any]]] = [
        ("stage", lambda p: p + 1),
        ("activations", lambda p: proof.peak_live[p]),
        ("busy", lambda p: f"{float(clock.busy[p] / clock.total):.1%}"),
    ]
    if not made.synchronous:
        delay = "forward delay" if proof.settled else "forward delay (filling)"
        columns += [
            (delay, lambda p: proof.mean_delay(p)),
            ("backward delay", lambda p: _mean(proof.backward_delays(p))),
            ("old weights", lambda p: proof.stashed[p]),
        ]
    rows = [[head for head, _ in columns], *([str(of(p)) for _, of in columns] for p in range(made.stages))]
    if len(rows) > 26:
        rows = [*rows[:13], ["..."] * len(columns), *rows[-12:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{wide}}" for cell, wide in zip(row, widths, strict=True)) for row in rows]
    lines += [
        "",
        f"activations  {sum(proof.peak_live)} micro-batches kept over all stages, {max(proof.peak_live)} at the most",
        f"in use       {float(clock.utilisation):.1%} of the time of {made.updates} updates, fill and drain included",
    ]
    if made.updates > 2:
        lines.append(f"steady       {float(clock.steady_utilisation):.1%} in a long run")
    return lines


def _mean(values: tuple[int, ...]) -> str:

    return str(Fraction(sum(values), len(values)))
