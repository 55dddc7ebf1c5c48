"""`multipod schedule`: builds a schedule, proves it, writes it; and proves one from anywhere."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from multipod import runtime
from multipod.cli import completion
from multipod.cli.json_output import json_option, print_json
from multipod.cli.schedules.machine import BYTES, machine_options
from multipod.collectives import msccl as xml
from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import COLLECTIVES, Collective
from multipod.collectives.text import read
from multipod.collectives.text import write as write_json
from multipod.collectives.verify import verify
from multipod.errors import MultipodError, ScheduleError, nearest
from multipod.simulate.best import sizes
from multipod.simulate.picture import bytes_text, time_text
from multipod.simulate.simulate import simulate

if TYPE_CHECKING:
    from multipod.collectives.schedule import Schedule
    from multipod.collectives.verify import Proof
    from multipod.topology.topology import Topology

FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def schedule() -> None:
    """Build, prove and write schedules: what a collective does on a machine, step by step.

    \b
    multipod schedule list
    multipod schedule all-reduce --on mesh:8x8 --fail 2-3,2-5 --algorithm tree-packing --out s.json
    multipod schedule all-reduce --on mesh:16x16 --algorithm multi-ring --option tiers=4x4x16
    multipod schedule check s.json
    multipod schedule check s.json --executed
    """


@schedule.command("list")
@json_option
def list_algorithms(as_json: bool) -> None:
    """List the algorithms, the collectives that each can do, and its options."""
    if as_json:
        print_json({name: {"summary": one.summary, "collectives": list(one.collectives), "options": list(one.options)}
                    for name, one in ALGORITHMS.items()})  # fmt: skip
        return
    for name, builder in ALGORITHMS.items():
        options = f"  options: {', '.join(builder.options)}" if builder.options else ""
        click.echo(f"{name:20} {builder.summary}\n{'':20} {', '.join(builder.collectives)}{options}")


@schedule.command()
@click.argument("file", type=FILE)
@click.option("--executed", is_flag=True, help="Also count what it sends as a program of JAX devices, by links.")
@click.option("--bytes", "nbytes", type=BYTES, default="100M", show_default=True, help="Of the vector, for --executed.")
@json_option
def check(file: Path, executed: bool, nbytes: int, as_json: bool) -> None:
    """Prove that the schedule in FILE does what it says; exit with 2 and the reason if it does not."""

    with _working(f"reading {file}"):
        made = read(file)
    proof = _prove(made)
    figures: dict[str, Any] = {"proof": proof, "notes": list(made.notes)}
    if executed:
        runtime.absent_tpus()
        from multipod.cli.printing.executed import count_executed, print_executed  # JAX

        with _working("lowering"):
            counted = count_executed(made, nbytes)
        figures["executed"] = counted.data()
    if as_json:
        print_json(figures)
        return
    _print_proof(made, proof)
    if executed:
        print_executed(counted)


def _builds(collective: Collective) -> Callable[..., None]:
    @machine_options
    @click.option(
        "--algorithm",
        required=True,
        shell_complete=completion.algorithms,
        metavar="NAME",
        help="One of `multipod schedule list`; or list.",
    )
    @click.option(
        "--bytes", "nbytes", type=BYTES, default="100M", show_default=True, help="The vector that it is built for."
    )
    @click.option(
        "--option", "options", multiple=True, metavar="NAME=VALUE", help="For the algorithm: tiers=4x4x16. Repeatable."
    )
    @click.option("--out", type=FILE, metavar="FILE", help="Write it as JSON.")
    @click.option("--msccl", type=FILE, metavar="FILE", help="Write it as XML for MSCCL.")
    @json_option
    def command(
        topology: "Topology",
        algorithm: str,
        nbytes: int,
        options: tuple[str, ...],
        out: Path | None,
        msccl: Path | None,
        as_json: bool,
    ) -> None:
        if algorithm == "list":
            click.get_current_context().invoke(list_algorithms, as_json=as_json)
            return
        for file in (out, msccl):
            if file is not None and not file.absolute().parent.is_dir():
                raise click.UsageError(f"{file.parent} is no folder to write {file.name} in. Make it first.")
        parsed = sizes(algorithm, nbytes) | _parsed(algorithm, options)
        with _working(f"building {algorithm}"), _blaming(algorithm, options):
            built = build(algorithm, topology, collective, **parsed)
        proof = _prove(built)
        with _working("simulating"):
            promise = _promise(built, nbytes)
        if as_json:
            print_json({"proof": proof, "notes": list(built.notes), **promise})
        else:
            _print_proof(built, proof)
            click.echo(_promise_text(promise))
        for file, write in ((out, write_json), (msccl, xml.write)):
            if file is not None:
                _write(write, built, file, err=as_json)

    command.__doc__ = f"Build, prove and write a schedule for {collective}."
    return command


for _collective in COLLECTIVES:
    schedule.command(_collective)(_builds(_collective))


def _prove(made: "Schedule") -> "Proof":
    with _working(f"proving {made.algorithm}"):
        return verify(made)


def _print_proof(made: "Schedule", proof: "Proof") -> None:
    click.echo(str(proof))
    for note in made.notes:
        click.echo(f"note: {note}")


def _promise(made: "Schedule", nbytes: int) -> dict[str, Any]:
    """The seconds and the share of the bound that `multipod simulate` gives for this schedule; or why it gives none."""
    try:
        simulation = simulate(made, made.topology, nbytes)
    except MultipodError as error:
        return {"bytes": nbytes, "not_simulated": str(error)}
    return {"bytes": nbytes, "seconds": float(simulation.seconds), "of_bound": simulation.percent_of_bound / 100}


def _promise_text(promise: dict[str, Any]) -> str:
    if "not_simulated" in promise:
        return f"not simulated: {promise['not_simulated']}"
    took, size = time_text(promise["seconds"]), bytes_text(float(promise["bytes"]))
    return f"simulated: {took} for {size}, {100 * promise['of_bound']:.1f} % of the bound"


def _write(write: Callable[["Schedule", Path], None], made: "Schedule", file: Path, err: bool) -> None:

    try:
        with _working(f"writing {file}"):
            write(made, file)
    except OSError as error:
        raise ScheduleError(f"{file} cannot be written: {error.strerror}. Choose another file.") from error
    size = f" ({file.stat().st_size / 1e6:,.2f} MB)" if file.is_file() else ""
    click.echo(f"written to {file}{size}", err=err)


@contextmanager
def _blaming(algorithm: str, options: tuple[str, ...]) -> Iterator[None]:
    """Lays what goes wrong in a builder on the options, if there are any: their values may be of any kind and size.

    Raises:
      ScheduleError: in place of the errors that such values cause.
    """

    try:
        yield
    except MultipodError:
        raise
    except (TypeError, ValueError, ArithmeticError, MemoryError) as error:
        if not options:
            raise
        given = " ".join(f"--option {option}" for option in options)
        raise ScheduleError(f"{algorithm} cannot be built with {given}: {error}. Give other values.") from error


def _working(what: str) -> AbstractContextManager[object]:
    """Says on a terminal what is being done, for as long as it takes: large schedules take many seconds."""
    if not sys.stderr.isatty():
        return nullcontext()

    return Console(stderr=True).status(escape(what))


def _parsed(algorithm: str, options: tuple[str, ...]) -> dict[str, Any]:
    """The options as the algorithm's function takes them.

    Raises:
      ScheduleError: no such algorithm or option, or no `name=value`.
    """

    if algorithm not in ALGORITHMS:
        raise ScheduleError(f"There is no algorithm {algorithm!r}. {nearest(algorithm, ALGORITHMS)}")
    parameters = inspect.signature(ALGORITHMS[algorithm].function).parameters
    parsed = {}
    for option in options:
        name, equals, text = (part.strip() for part in option.partition("="))
        if not equals or not name:
            raise ScheduleError(f"--option {option!r} has no value. Write name=value, as tiers=4x4x16.")
        if name not in ALGORITHMS[algorithm].options:
            known = ", ".join(ALGORITHMS[algorithm].options) or "none"
            raise ScheduleError(f"{algorithm} has no option {name!r}. It has: {known}.")
        value = _value(text)
        many = "Sequence" in str(parameters[name].annotation)
        parsed[name] = (value,) if many and not isinstance(value, tuple) else value
    return parsed


def _value(text: str) -> Any:
    """4x4x16 and 0,1 are tuples, 3/4 is a fraction, true and false are those; then ints, floats, words."""
    if "," in text:
        return tuple(_value(part.strip()) for part in text.split(","))
    if re.fullmatch(r"\d{1,9}(x\d{1,9})+", text):
        return tuple(int(part) for part in text.split("x"))
    if re.fullmatch(r"\d{1,18}/[1-9]\d{0,17}", text):
        return Fraction(text)
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
