"""`multipod export`: the model of a run as a `.tflite` file, in float32 or quantised, judged on the test data."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from multipod import runs
from multipod.cli.json_output import json_option, print_json
from multipod.cli.options import where_options
from multipod.runs.options import RuntimeOptions

if TYPE_CHECKING:
    from multipod.runs.exporting import ExportedRun


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE", help="[default: RUN/model.tflite, or RUN/LIBRARY]"
)
@click.option("--int8", "activations", flag_value="int8", help="Quantise weights and activations to int8.")
@click.option("--int16", "activations", flag_value="int16", help="Activations in int16, weights in int8.")
@click.option("--int4-weights", is_flag=True, help="Weights in int4, activations in int8.")
@click.option(
    "--calibrate",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Training examples that ranges come from.",
)
@click.option("--ranges", type=click.Choice(["minmax", "percentile", "mse"]), default="minmax", show_default=True)
@click.option("--float-io", is_flag=True, help="Inputs and outputs stay float32.")
@click.option(
    "--finetune",
    type=click.IntRange(0),
    metavar="STEPS",
    help="Steps of quantisation-aware fine-tuning.  [default: 300 where the accuracy drops by over 1 %]",
)
@click.option(
    "--examples", type=click.IntRange(0), default=0, metavar="N",
    help="Also write the first N test examples as FILE.0.npy, ..., stored as the file wants them.",
)  # fmt: skip
@click.option("--at", type=click.IntRange(0), metavar="UPDATE", help="This checkpoint, not the newest.")
@click.option(
    "--to", "library", metavar="LIBRARY",
    help="Safetensors in place of .tflite, as torchvision, timm, transformers or dlrm (DLRM's authors) load them: FILE "
    "ends in .safetensors, or is a folder.",
)  # fmt: skip
@json_option
@where_options
def export(
    run: Path, out: Path | None, activations: str | None, int4_weights: bool, calibrate: int, ranges: str,
    float_io: bool, finetune: int | None, examples: int, at: int | None, library: str | None, as_json: bool,
    where: RuntimeOptions,
) -> None:  # fmt: skip
    """Write the model in the folder RUN as a .tflite file, and say what that costs in accuracy.

    With --to its weights are written for another library, number for number.
    """
    if library is not None:
        if activations is not None or int4_weights or float_io or finetune is not None or examples:
            raise click.UsageError("--to writes float32 weights: leave out what makes a .tflite file of them.")
        written = runs.export_weights(run, out or run / library, library=library, at=at, options=where)
        if as_json:
            print_json({"files": {str(path): path.stat().st_size for path in written}})
        for path in () if as_json else written:
            click.echo(f"{path}: {path.stat().st_size:,} bytes")
        return
    quantisation = None
    if activations is not None or int4_weights:
        quantisation = runs.Quantisation(
            activations=activations or "int8", weights="int4" if int4_weights else "int8", ranges=ranges,  # type: ignore[arg-type]
            io="float32" if float_io else "quantised",
        )  # fmt: skip
    request = runs.ExportRequest(quantisation, calibrate, finetune)
    exported = runs.export(run, request, at=at, options=where, note=lambda line: click.echo(line, err=True))
    path = out or run / "model.tflite"
    exported.write(path, examples)
    print_json(figures(path, exported)) if as_json else print_report(path, exported)


def figures(path: Path, result: "ExportedRun") -> dict[str, Any]:
    """What `--json` prints: the file, the error of each operator in dB, and the values on the test data."""
    return {
        "file": path,
        "bytes": len(result.exported.model),
        "operators": len(result.exported.graph.ops),
        "layers": [{"kind": one.kind, "name": one.name, "sqnr_db": one.sqnr_db} for one in result.exported.layers],
        "outputs": [{"name": one.name, "sqnr_db": one.sqnr_db} for one in result.exported.outputs],
        "before": result.before,
        "after": result.after,
        "same_predictions": result.same_predictions,
        "examples": len(result.exact),
    }


def print_report(path: Path, result: "ExportedRun") -> None:
    """Prints the error of each operator, and the values on the test data before and after."""
    console, exported = Console(), result.exported
    before, after = result.before, result.after
    if exported.layers:
        layers = Table("operator", "output", "SQNR, dB", title="error of each operator on the calibration set")
        for layer in exported.layers:
            layers.add_row(layer.kind, layer.name, f"{layer.sqnr_db:.1f}")
        for output in exported.outputs:
            layers.add_row("output of the file", output.name, f"{output.sqnr_db:.1f}")
        console.print(layers)
    for output in exported.outputs:
        if output.is_poor:
            console.print(
                f"Warning: {output.name} is only {output.sqnr_db:.1f} dB above its error. The first operator with few "
                "dB in the table is where it is lost; try --int16."
            )
    title = f"{path}: {len(exported.model):,} bytes, {len(exported.graph.ops)} operators"
    table = Table("", "float32, JAX", "this file", title=title)
    for name in sorted(before):
        table.add_row(name, f"{before[name]:.6g}", f"{after[name]:.6g}")
    table.add_row("same prediction", "", f"{result.same_predictions} of {len(result.exact)}")
    console.print(table)
