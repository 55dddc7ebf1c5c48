"""`multipod simulate`: how long collectives take on a machine, without the machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from multipod.cli import completion
from multipod.cli.json_output import json_option, print_json
from multipod.cli.schedules.machine import BYTES, failure_options, on_option
from multipod.collectives.schedule import COLLECTIVES
from multipod.collectives.text import read
from multipod.errors import ScheduleError, nearest
from multipod.simulate.best import Comparison, compare, no_algorithm
from multipod.simulate.picture import bytes_text, node_name, time_text, write_picture
from multipod.simulate.simulate import simulate as run
from multipod.simulate.trace import write_trace
from multipod.topology.machines import parse

if TYPE_CHECKING:
    from rich.console import Console

    from multipod.collectives.schedule import Schedule
    from multipod.simulate.best import Comparison
    from multipod.simulate.simulate import Simulation
    from multipod.topology.topology import Topology

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("collective", required=False, shell_complete=completion.collectives)
@on_option()
@failure_options
@click.option("--bytes", "nbytes", type=BYTES, default="100M", show_default=True, help="Of the vector on each chip.")
@click.option(
    "--algorithm",
    "algorithms",
    shell_complete=completion.algorithms,
    multiple=True,
    metavar="NAME",
    help="One of `schedule list`, repeatable, or all.",
)
@click.option("--schedule", "file", type=FILE, help="A schedule from a file instead of an algorithm.")
@click.option(
    "--mode", default="pipelined", show_default=True, help="pipelined, or stepped: a barrier after each step."
)
@click.option("--draw", type=FILE, metavar="OUT.svg", help="Draw the link loads of the fastest.")
@click.option("--trace", type=FILE, metavar="OUT.json", help="Write the fastest as a trace for ui.perfetto.dev.")
@json_option
def simulate(
    collective: str | None,
    on: str | None,
    fail: tuple[str, ...],
    fail_link: tuple[str, ...],
    nbytes: int,
    algorithms: tuple[str, ...],
    file: Path | None,
    mode: str,
    draw: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate COLLECTIVE (all-reduce if none is given) on a machine, by every algorithm, fastest first.

    \b
    multipod simulate all-reduce --on tpu-v3-multipod --bytes 100M
    multipod simulate all-gather --on mesh:8x8 --fail 2-3,2-5 --algorithm detour-ring --draw load.svg
    multipod simulate --schedule s.json --trace trace.json
    """

    for out in (draw, trace):
        if out is not None and not out.absolute().parent.is_dir():
            raise click.UsageError(f"{out.parent} is no folder to write {out.name} in. Make it first.")
    topology = None if on is None else parse(on, fail, fail_link)
    if topology is None and (fail or fail_link):
        raise click.UsageError("--fail and --fail-link are about the machine of --on. Name it.")
    console = Console()
    with Console(stderr=True).status("simulating"):
        if file is not None:
            compared = _from_file(file, collective, topology, algorithms, nbytes, mode)
        elif topology is not None:
            compared = _compared(topology, nbytes, collective or "all-reduce", algorithms, mode)
        else:
            raise click.UsageError("there is no machine. Give --on, as --on mesh:8x8, or --schedule FILE.")
        fastest = next(iter(compared.simulations.values()))
    if as_json:
        print_json(_figures(compared, fastest))
    else:
        _print(console, compared, fastest)
    if draw is not None:
        write_picture(fastest, draw)
        click.echo(f"link loads of {fastest.schedule.algorithm} drawn in {draw}", err=as_json)
    if trace is not None:
        write_trace(fastest, trace)
        click.echo(f"trace of {fastest.schedule.algorithm} in {trace}: open it at https://ui.perfetto.dev", err=as_json)


def _from_file(
    file: Path,
    collective: str | None,
    topology: "Topology | None",
    algorithms: tuple[str, ...],
    nbytes: int,
    mode: str,
) -> "Comparison":

    if algorithms:
        raise click.UsageError("--schedule is an algorithm's work already. Leave --algorithm out.")
    schedule: Schedule = read(file)
    if collective not in (None, schedule.collective):
        raise ScheduleError(
            f"{file} is a schedule for {schedule.collective}, not {collective}. Leave {collective} out."
        )
    simulation = run(schedule, topology or schedule.topology, nbytes, mode)  # type: ignore[arg-type]
    return Comparison({schedule.algorithm: simulation})


def _compared(
    topology: "Topology", nbytes: int, collective: str, algorithms: tuple[str, ...], mode: str
) -> "Comparison":
    """All that fit.

    Raises:
      ScheduleError: none does.
    """

    if collective not in COLLECTIVES:
        raise ScheduleError(f"{collective!r} is no collective. {nearest(collective, COLLECTIVES)}")
    chosen = None if not algorithms or "all" in algorithms else algorithms
    compared = compare(topology, nbytes, collective, chosen, mode)  # type: ignore[arg-type]
    if not compared.simulations:
        raise no_algorithm(topology, collective, compared)
    return compared


def _busiest_link(simulation: "Simulation") -> dict[str, Any]:
    """The ends of the busiest link, its bytes, and the share of the time that it is held; {} if all are idle."""
    if simulation.busiest is None:
        return {}
    return {
        "busiest_link": [node_name(simulation.topology, node) for node in simulation.busiest],
        "link_bytes": float(simulation.link_bytes[simulation.busiest]),
        "link_held": float(max(simulation.arc_busy_s) / simulation.seconds),
    }


def _figures(compared: "Comparison", fastest: "Simulation") -> dict[str, Any]:
    """What `--json` prints: the bounds, and each algorithm, the fastest first."""
    limits = fastest.bounds
    algorithms = [
        {"algorithm": name, "seconds": one.seconds, "steps": one.steps, "of_bound": one.percent_of_bound / 100}
        | _busiest_link(one)
        for name, one in compared.simulations.items()
    ]
    return {
        "collective": fastest.schedule.collective,
        "machine": str(fastest.topology),
        "bytes": fastest.nbytes,
        "mode": fastest.mode,
        "bound": {name: getattr(limits, name) for name in ("seconds", "latency_s", "cut_s", "strength_s")},
        "algorithms": algorithms,
        "left_out": compared.refusals,
    }


def _print(console: "Console", compared: "Comparison", fastest: "Simulation") -> None:

    about = (
        f"{fastest.schedule.collective} of {bytes_text(float(fastest.nbytes))} on {fastest.topology}, {fastest.mode}"
    )
    right = {"justify": "right", "no_wrap": True}
    table = Table(
        Column("algorithm", no_wrap=True),
        Column("time", **right),  # type: ignore[arg-type]
        Column("steps", **right),  # type: ignore[arg-type]
        Column("busiest link", no_wrap=True),
        Column("carries", **right),  # type: ignore[arg-type]
        Column("held", **right),  # type: ignore[arg-type]
        Column("of bound", **right),  # type: ignore[arg-type]
        title=about,
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name, simulation in compared.simulations.items():
        link = _busiest_link(simulation)
        table.add_row(
            name,
            time_text(float(simulation.seconds)),
            f"{simulation.steps:,}",
            " → ".join(link["busiest_link"]) if link else "none",
            bytes_text(link["link_bytes"]) if link else "",
            f"{100 * link['link_held']:.0f} %" if link else "",
            f"{simulation.percent_of_bound:.1f} %",
        )
    console.print(table)
    limits = fastest.bounds
    latency, cut, strength, best = (
        time_text(float(seconds)) for seconds in (limits.latency_s, limits.cut_s, limits.strength_s, limits.seconds)
    )
    console.print(
        f"No schedule takes less than {best}: latency {latency}, cut {cut}, strength {strength}.", highlight=False
    )
    for name, reason in compared.refusals.items():
        first = reason.split(". ")[0]
        console.print(f"left out: {first if first.startswith(name) else f'{name}: {first}'}", style="dim", markup=False)
