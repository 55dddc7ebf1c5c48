"""`multipod micro`: runs, shows and measures `.tflite` files with the embedded runtime."""

from pathlib import Path

import click
import numpy as np

from multipod.cli.json_output import json_option, print_json
from multipod.errors import MicroError
from multipod.micro import bundle as firmware
from multipod.micro import model_file
from multipod.micro.drawing import draw
from multipod.micro.interpreter import Interpreter, random_inputs
from multipod.micro.model_file import SubgraphInfo

MODEL = click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.group()
def micro() -> None:
    """Models on microcontrollers: the same C runtime and the same bytes as on the chip."""


@micro.command()
@MODEL
@click.option("--input", "inputs", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="FILE.npy",
              help="One for each input, in order.  [default: random numbers]")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random inputs.")
@click.option("--arena", type=click.IntRange(1), metavar="BYTES", help="Try this size.  [default: just what it needs]")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE.npz", help="Write the outputs, as out0, out1, ..."
)
@json_option
def run(model: Path, inputs: tuple[Path, ...], seed: int, arena: int | None, out: Path | None, as_json: bool) -> None:
    """Run MODEL once and print its outputs."""
    interpreter = _open(model, arena)
    arrays = [np.load(path) for path in inputs] if inputs else random_inputs(interpreter, seed)
    outputs = interpreter.run(*arrays)
    if as_json:
        print_json({"outputs": [{"dtype": str(one.dtype), "shape": one.shape, "values": one} for one in outputs]})
    for k, array in enumerate(() if as_json else outputs):
        click.echo(f"output {k}: {array.dtype}{list(array.shape)}")
        click.echo(np.array2string(array, threshold=64, precision=6))
    if out:
        np.savez(out, **{f"out{k}": array for k, array in enumerate(outputs)})  # type: ignore[arg-type]


@micro.command()
@MODEL
@click.option("--tensors", is_flag=True, help="List the tensors too.")
@json_option
def inspect(model: Path, tensors: bool, as_json: bool) -> None:
    """List the operators of MODEL, with what goes in and out."""
    graphs = model_file.read(model.read_bytes())
    if as_json:
        print_json({"model": model, "subgraphs": graphs})
        return
    if not graphs:
        click.echo(f"{model}: no subgraph can be read.")
    for number, graph in enumerate(graphs):
        click.echo(f"subgraph {number}: {len(graph.operators)} operators, {len(graph.tensors)} tensors")
        for k, op in enumerate(graph.operators):
            click.echo(f"  {k:3} {op.name}  {_ends(graph, op.inputs)} -> {_ends(graph, op.outputs)}")
        if tensors:
            for k, tensor in enumerate(graph.tensors):
                click.echo(f"  {k:3} {tensor}")
        click.echo(f"  inputs {list(graph.inputs)}, outputs {list(graph.outputs)}")


@micro.command()
@MODEL
@json_option
def size(model: Path, as_json: bool) -> None:
    """Say how much memory MODEL needs, exactly, and what for."""
    report = _open(model).report
    if as_json:
        print_json(report)
        return
    rows = [
        (
            "arena",
            report.needed,
            "the least with which it starts and runs on this machine, whose pointers have 8 bytes",
        ),
        ("  planned", report.planned, "activations and scratch memory, which share it; the same on every chip"),
        (
            "  persistent",
            report.persistent,
            "what outlives a run; a 32-bit chip needs about half of it but for variables",
        ),
        ("    variables", report.variables, "the model's state"),
        ("  start-up", report.start_up, "the planner's table, where it is larger than what is planned"),
        ("flash", report.flash, "the model file, used in place"),
    ]
    for name, value, about in rows:
        click.echo(f"{name:14} {value:>12,}  {about}")


@micro.command()
@MODEL
@click.option("--repeats", type=click.IntRange(1), default=50, show_default=True)
@json_option
def profile(model: Path, repeats: int, as_json: bool) -> None:
    """Time each operator of MODEL on this machine."""
    interpreter = _open(model)
    rows = interpreter.profile(*random_inputs(interpreter, 0), repeats=repeats)
    if as_json:
        print_json({"repeats": repeats, "operators": [{"name": name, "seconds": seconds} for name, seconds in rows]})
        return
    total_s = sum(seconds for _, seconds in rows) or 1.0
    for k, (name, seconds) in enumerate(rows):
        click.echo(f"{k:3} {name:32} {seconds * 1e6:10.2f} us {100 * seconds / total_s:5.1f} %")
    click.echo(f"    {'all':32} {total_s * 1e6:10.2f} us, the mean of {repeats}")


@micro.command()
@MODEL
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the plan.")
@json_option
def plan(model: Path, out: Path | None, as_json: bool) -> None:
    """Show where MODEL's activations lie in the arena, and when."""
    interpreter = _open(model)
    graph = model_file.read(model.read_bytes())[0]
    if as_json:
        print_json({"bytes": interpreter.report.planned, "buffers": list(interpreter.plan)})
    for buffer in () if as_json else sorted(interpreter.plan, key=lambda buffer: (buffer.first, buffer.offset)):
        name = "scratch" if buffer.tensor < 0 else graph.tensors[buffer.tensor].name
        last = min(buffer.last, max(len(graph.operators) - 1, 0))
        note = " in place" if buffer.shares else ""
        end = buffer.offset + buffer.size
        click.echo(f"ops {buffer.first:3} to {last:3}  bytes {buffer.offset:>9,} to {end:>9,}  {name}{note}")
    if not as_json:
        click.echo(f"{interpreter.report.planned:,} bytes at most")
    if out:
        names = [op.name for op in graph.operators]
        out.write_text(draw(interpreter.plan, names, [tensor.name for tensor in graph.tensors]), encoding="utf-8")


@micro.command()
@MODEL
@click.option("--target", default="cortex-m4", show_default=True, metavar="CHIP",
              help="cortex-m0, cortex-m3, cortex-m4, cortex-m55 or rv32imac.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR")
@click.option("--input", "inputs", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="FILE.npy",
              help="Built in, one for each input, in order.  [default: random numbers]")  # fmt: skip
def bundle(model: Path, target: str, out: Path, inputs: tuple[Path, ...]) -> None:
    """Write a firmware project that runs MODEL: sources, kernel table, linker script, Makefile, main."""
    data = model.read_bytes()
    _open(model)
    firmware.bundle(data, target, out, [np.load(path) for path in inputs] if inputs else None, model.stem)
    click.echo(f"{out}: {len(firmware.kernels_of(data))} kernels for {target}. Build it with: make -C {out}")
    click.echo(f"It needs {firmware.TARGETS[target].prefix}gcc; Debian: {firmware.TARGETS[target].packages}")


def _open(model: Path, arena: int | None = None) -> Interpreter:
    try:
        return Interpreter(model.read_bytes(), arena)
    except MicroError as error:
        raise MicroError(f"{model}: {error}") from None


def _ends(graph: SubgraphInfo, numbers: tuple[int, ...]) -> str:
    tensors = graph.tensors
    texts = []
    for number in numbers:
        if number < 0:
            texts.append("-")
        elif number >= len(tensors):
            texts.append(f"{number}?")
        else:
            texts.append(f"{number}:{tensors[number].dtype}{list(tensors[number].shape)}")
    return ", ".join(texts)
