"""`multipod topology`: machines drawn, listed, and measured."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from multipod.cli.json_output import json_option, print_json
from multipod.cli.schedules.machine import BYTES, failure_options, machine_options
from multipod.collectives.strength import strength as measure
from multipod.topology.chips import CHIPS
from multipod.topology.drawing import draw
from multipod.topology.machines import MACHINES, parse
from multipod.topology.measures import bisection_bytes_per_s, diameter

if TYPE_CHECKING:
    from multipod.topology.chips import Chip
    from multipod.topology.topology import Number, Topology


@click.group()
def topology() -> None:
    """Machines of chips and links, whole or broken. Needs no devices."""


@topology.command()
@click.argument("machine")
@failure_options
@json_option
def show(machine: str, fail: tuple[str, ...], fail_link: tuple[str, ...], as_json: bool) -> None:
    """Draw MACHINE, as mesh:8x8 or tpu-v3-pod, with what has failed, and give its figures."""

    shown = parse(machine, fail, fail_link)
    if as_json:
        print_json(_machine_figures(shown))
        return
    size = shutil.get_terminal_size(fallback=(100, 48))
    click.echo(f"{shown}\n")
    click.echo(draw(shown, width=max(size.columns, 40), height=max(size.lines, 24)))
    click.echo()
    rows = _figures(shown)
    known = MACHINES.get(machine.strip().partition(":")[0])
    if known:
        rows += [("catalogue", known.about), ("source", known.source)]
    for name, value in rows:
        click.echo(_row(name, value, size.columns))


@topology.command("list")
@json_option
def list_machines(as_json: bool) -> None:
    """List the machines and chips that are known by name."""
    if as_json:
        machines = {
            name: {"about": one.about, "source": one.source, "shape": one.shape} for name, one in MACHINES.items()
        }
        print_json({"machines": machines, "chips": CHIPS})
        return
    click.echo("Machines. A size may follow: mesh:8x8, torus:16x32, switch:4x8, dgx-h100:4, tpu-v5e-pod:8x16.\n")
    for name, machine in MACHINES.items():
        click.echo(f"{name:16} {machine.about}")
    click.echo("\nChips: peak, memory, links in one direction.\n")
    for name, chip in CHIPS.items():
        click.echo(f"{name:16} {_chip_line(chip)}")


@topology.command()
@machine_options
@click.option("--bytes", "nbytes", type=BYTES, default="100M", show_default=True, help="To sum, on each chip.")
@json_option
def strength(topology: "Topology", nbytes: int, as_json: bool) -> None:
    """The least time in which this machine can sum, whatever the algorithm, and the partition that proves it."""

    found = measure(topology)
    if as_json:
        print_json({"sigma_links": found.value, "bytes_per_s": found.bytes_per_s, "bytes": nbytes,
                    "seconds": found.seconds(nbytes), "parts": found.partition})  # fmt: skip
        return
    parts, size = found.partition, len(topology.chips)
    click.echo(f"{topology}\n")
    click.echo(f"sigma       {found.value} links, {_rate(float(found.bytes_per_s))}")
    click.echo(f"bound       {_time(float(found.seconds(nbytes)))} to sum {nbytes:,} bytes, latency left out")
    click.echo(f"proof       the {len(parts)} parts below: the links between them, over {len(parts)} - 1, are sigma")
    single = sum(len(part) == 1 for part in parts)
    if single == size:
        click.echo("parts       every chip alone")
        return
    several = sorted((part for part in parts if len(part) > 1), key=lambda part: (-len(part), part))
    for part in several[:6]:
        click.echo(f"part        {len(part)} chips: {_abridged(topology, part)}")
    if len(several) > 6:
        click.echo(f"parts       {len(several) - 6} more of several chips")
    if single:
        click.echo(f"parts       {single} chips alone")


def _row(name: str, value: str, width: int) -> str:
    """`name` and what follows it in lines of `width`; addresses are not broken."""
    return textwrap.fill(
        value,
        width,
        initial_indent=f"{name:11} ",
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _machine_figures(shown: "Topology") -> dict[str, Any]:
    """What `topology show --json` prints; bytes and seconds."""
    whole = len(shown.parts) == 1
    return {
        "name": str(shown),
        "shape": shown.shape,
        "chips": len(shown.chips),
        "failed_chips": sorted(shown.failed_chips),
        "links": len(shown.links),
        "failed_links": sorted(shown.failed_links),
        "latency_s": shown.latency_s,
        "bytes_per_s": shown.bytes_per_s,
        "parts": [len(part) for part in shown.parts],
        "diameter": diameter(shown) if whole else None,
        "bisection_bytes_per_s": bisection_bytes_per_s(shown) if whole else None,
        "chip": shown.chip,
    }


def _figures(shown: "Topology") -> list[tuple[str, str]]:

    links = len(shown.links)
    ports = [str(dim) for dim, (yes, n) in enumerate(zip(shown.switched, shown.shape, strict=True)) if yes and n > 1]
    failed = f", {len(shown.failed_chips)} failed" if shown.failed_chips else ""
    rows = [("chips", f"{len(shown.chips):,}{failed}")]
    cut = f", {len(shown.failed_links)} failed" if shown.failed_links else ""
    wires = f"{links:,}{cut}" if links or not ports else "no wires"
    rows.append(("links", wires + (f"; switches in dimension {', '.join(ports)}" if ports else "")))
    rows.append(("latency", _each(shown, [_time(float(t)) for t in shown.latency_s])))
    rows.append(("bandwidth", _each(shown, [_rate(float(b)) for b in shown.bytes_per_s]) + ", one way"))
    if len(shown.parts) > 1:
        sizes = ", ".join(str(len(part)) for part in shown.parts[:6]) + (", ..." if len(shown.parts) > 6 else "")
        rows.append(("in parts", f"{len(shown.parts)} that cannot reach each other, of {sizes} chips"))
    else:
        rows.append(("diameter", f"{diameter(shown)} hops"))
        rows.append(("bisection", _rate(float(bisection_bytes_per_s(shown))) + ", one way, the narrowest straight cut"))
    if shown.chip is not None:
        rows += [("chip", f"{shown.chip.name}: {_chip_line(shown.chip)}"), ("source", shown.chip.source)]
    return rows


def _each(shown: "Topology", texts: Sequence[str]) -> str:
    """One text if all dimensions with links have the same, else one for each."""
    used = [dim for dim, n in enumerate(shown.shape) if n > 1]
    if len({texts[dim] for dim in used}) <= 1:
        return texts[used[0] if used else 0]
    return ", ".join(f"{texts[dim]} (dimension {dim})" for dim in used)


def _chip_line(chip: "Chip") -> str:
    peak = ", ".join(f"{speed / 1e12:.4g} {name}" for name, speed in chip.flop_per_s.items())
    links = f"{chip.links} link{'s' * (chip.links != 1)} of {_rate(chip.link_bytes_per_s)}"
    gib = chip.memory_bytes / 2**30
    size = f"{gib:.0f} GiB" if gib.is_integer() else f"{chip.memory_bytes / 1e9:g} GB"
    memory = f"{size} at {_rate(chip.memory_bytes_per_s)}"
    return f"{peak} Tflop/s; {memory}; {links}"


def _abridged(shown: "Topology", part: Sequence[int]) -> str:
    """The block of places if `part` is one, else its first chips."""
    places = [shown.coordinates(chip) for chip in part]
    low, high = [tuple(f(c) for c in zip(*places, strict=True)) for f in (min, max)]
    if len({*places}) == _volume(low, high):
        return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(low, high, strict=True))
    first = " ".join(",".join(map(str, place)) for place in places[:8])
    return first + (" ..." if len(places) > 8 else "")


def _volume(low: Sequence[int], high: Sequence[int]) -> int:
    volume = 1
    for a, b in zip(low, high, strict=True):
        volume *= b - a + 1
    return volume


def _rate(bytes_per_s: "Number") -> str:
    return _scaled(float(bytes_per_s), "B/s", [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")])


def _time(seconds: "Number") -> str:
    return _scaled(float(seconds), "s", [(1, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")])


def _scaled(value: float, unit: str, prefixes: Sequence[tuple[float, str]]) -> str:
    for scale, prefix in prefixes:
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:g} {unit}"
