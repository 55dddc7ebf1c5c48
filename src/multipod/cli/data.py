"""`multipod data`: looks at what a recipe reads, and converts between formats."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from multipod.cli import completion
from multipod.cli.json_output import json_option, print_json
from multipod.cli.options import what_options
from multipod.cli.reading import reading_options
from multipod.data.batches import TrainBatches
from multipod.data.convert import convert as write
from multipod.data.detection.drawing import draw_objects
from multipod.data.detection.files import write_coco
from multipod.data.detection.shapes import SEEDS, DrawnShapes
from multipod.data.files.formats import FORMATS, open_records
from multipod.data.inspect import array_figures, array_rows, contact_sheet
from multipod.data.inspect import inspect as look
from multipod.data.source import DecodesTokens, identity_of, with_cache
from multipod.errors import DataError
from multipod.recipe.override import override
from multipod.simulate.input import HeavyTail, expected_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from multipod.data.inspect import Inspection
    from multipod.data.reading import InputOptions

SHEET = 64
"""Most images on a contact sheet."""
TOKENS = ("token", "source", "target", "label")
"""Arrays of tokens, which are shown as text where the data can spell it."""
SHOWN = 400
"""Characters of a row."""


@click.group()
def data() -> None:
    """Look at the data of a recipe, convert data between formats, predict what slow hosts cost."""


@data.command()
@click.argument("recipe", shell_complete=completion.recipes)
@click.option("--batches", type=click.IntRange(2), default=4, show_default=True, help="How many to read.")
@click.option("--rows", type=click.IntRange(1), default=32, show_default=True, help="Examples in each of them.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Contact sheet of a batch, a PNG.")
@json_option
@reading_options
@what_options
def inspect(
    recipe: str,
    batches: int,
    rows: int,
    out: Path | None,
    as_json: bool,
    changes: list[str],
    reading: "InputOptions",
) -> None:
    """Read some batches of RECIPE and show them: arrays, labels, where the time goes, and what could not be read.

    \b
    multipod data inspect resnet50 --set data.train_files=imagenet/train --out batch.png
    """
    import numpy as np

    from multipod.recipes.find import load

    chosen = override(load(recipe), changes)
    source = with_cache(chosen.data.train(), reading.cache_bytes, reading.cache_folder)
    found = look(TrainBatches(source, rows, chosen.seed, np.arange(rows)), batches, reading)
    if as_json:
        print_json({"data": identity_of(source), "rows": rows, **_figures(found)})
    console = Console(stderr=as_json, quiet=as_json)
    console.print(f"training data  {identity_of(source)}", highlight=False)
    _show(console, found, rows, chosen.data.decode if isinstance(chosen.data, DecodesTokens) else None)
    if out is not None:
        _draw(found, out)
        click.echo(f"contact sheet  {out}", err=as_json)


def _figures(found: "Inspection") -> dict[str, Any]:
    """What `--json` prints: all but the examples themselves."""
    arrays = {
        name: {"shape": array.shape, "dtype": str(array.dtype), **array_figures(name, array)}
        for name, array in sorted(found.batch.items())
    }
    return {
        "arrays": arrays,
        "labels": found.counts,
        "correlation": found.correlation,
        "examples_per_s": found.rate,
        "stages_s": found.stages,
        "skipped": found.skipped,
    }


def _show(console: Console, found: "Inspection", rows: int, decode: "Callable[[np.ndarray], str] | None") -> None:
    """Prints what was found; `decode` makes text of tokens."""

    arrays = Table("array", "shape", "values", "mean ± deviation", title=f"the first batch of {rows}")
    for row in array_rows(found.batch):
        arrays.add_row(*row)
    console.print(arrays)
    for name, array in found.batch.items():
        if array.dtype.kind in "iu" and array.ndim == 2:
            listed = f"{' '.join(map(str, array[0][:24].tolist()))} ..."
            text = decode(array[0]) if decode is not None and name in TOKENS else ""
            console.print(f"{name:14} {text[:SHOWN] or listed}", highlight=False, markup=False)
    if found.counts:
        most = sorted(found.counts.items(), key=lambda item: -item[1])[:6]
        listed = ", ".join(f"{label} ({count})" for label, count in most)
        console.print(f"labels         {len(found.counts)} different; most often {listed}", highlight=False)
    if found.correlation is not None:
        console.print(
            f"correlation    {found.correlation:.3f} of labels within a batch (0: as at random)", highlight=False
        )
    console.print(f"speed          {found.rate:,.0f} examples/s over {found.batches - 1} batches", highlight=False)
    total_s = sum(found.stages.values())
    for name, seconds in found.stages.items():
        console.print(f"  {name:12} {seconds * 1e3:.3f} ms an example, {seconds / total_s:.0%}", highlight=False)
    for one in found.skipped[:10]:
        console.print(f"left out       {one.name}: {one.reason}", style="yellow", highlight=False, soft_wrap=True)
    if len(found.skipped) > 10:
        console.print(f"               and {len(found.skipped) - 10} more", style="yellow")


def _draw(found: "Inspection", out: Path) -> None:

    images = found.batch.get("image")
    if images is None or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise DataError(
            f"{out}: the batch has no images to draw; its arrays are {', '.join(found.batch)}. Leave out --out."
        )
    labels = found.batch.get("label")
    if {"box", "count"} <= set(found.batch):
        images = draw_objects(found.batch, SHEET)
    captions = [str(labels[k]) if labels is not None and labels.ndim == 1 else str(k) for k in range(len(images))]
    contact_sheet(images[:SHEET], captions[:SHEET]).save(out, "PNG")


@data.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", "kind", required=True, metavar="FORMAT", help="tfrecord, array-record, tar, parquet or arrays.")
@click.option("--from", "known", default="", metavar="FORMAT", help="What SOURCE is.  [default: as its files look]")
@click.option("--per-file", type=click.IntRange(1), default=1000, show_default=True, help="Records in a file.")
@click.option("--shuffle", type=int, metavar="SEED", help="Write the records in a random order.")
def convert(source: str, target: Path, kind: str, known: str, per_file: int, shuffle: int | None) -> None:
    """Write the records of SOURCE (a folder, a file, a pattern) into the folder TARGET in another format.

    Interrupted, the same command goes on where it stopped. Records that cannot be read are left out and named.

    \b
    multipod data convert imagenet/train imagenet-records --to array-record
    """

    records = open_records(source, known)
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("converting", total=len(records))
        done = write(records, target, kind, per_file, lambda count: progress.update(task, completed=count), shuffle)
    click.echo(f"{done.records:,} records in {done.shards:,} files in {target}")
    for name, reason in list(done.damaged.items())[:10]:
        click.echo(f"left out {name}: {reason}", err=True)
    if len(done.damaged) > 10:
        click.echo(f"and {len(done.damaged) - 10} more, see {target / 'multipod-convert.json'}", err=True)


@data.command()
@click.option("--hosts", default="16,32,64,128,256,512", show_default=True, help="Numbers of hosts.")
@click.option("--images", type=click.IntRange(1), default=128, show_default=True, help="Read by a host for an update.")
@click.option("--step-ms", type=float, default=16.6, show_default=True, help="An update when its data are there.")
@click.option("--threads", type=click.IntRange(1), default=48, show_default=True, help="Of a host.")
@click.option("--ahead", type=click.IntRange(1), default=2, show_default=True, help="Batches made ahead.")
@click.option("--image-ms", type=float, default=1.4, show_default=True, help="An ordinary image, on one thread.")
@click.option("--large", type=float, default=0.005, show_default=True, help="Share of large pictures.")
@click.option("--most", type=float, default=320.0, show_default=True, help="The largest, in ordinary images.")
@json_option
def stragglers(
    hosts: str,
    images: int,
    step_ms: float,
    threads: int,
    ahead: int,
    image_ms: float,
    large: float,
    most: float,
    as_json: bool,
) -> None:
    """Predict how much of a step is lost to the slowest host's input, for clusters of several sizes.

    The tail of large pictures is an assumption: --large and --most. Images from a decoded cache cost about
    0.15 ms, and large ones 8 times that: --image-ms 0.15 --most 8.
    """

    try:
        counts = [int(part) for part in hosts.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--hosts {hosts!r} is not of the form 16,64,512.") from error
    if min(counts) < 1 or min(step_ms, image_ms) <= 0 or not 0 <= large <= 1 or most < 1:
        raise click.UsageError("hosts are 1 or more, times above 0, --large a share from 0 to 1, --most 1 or more.")
    cost = HeavyTail(image_ms / 1e3, tail=large, most=most)
    predicted = {
        count: expected_loss(
            cost, count, images, device_s=step_ms / 1e3, threads=threads, ahead=ahead, part=8, updates=80, seed=count
        )
        for count in counts
    }
    if as_json:
        figures = [{"hosts": n, "step_s": run.step_s, "lost_share": run.lost_share} for n, run in predicted.items()]
        print_json({"clusters": figures})
        return
    table = Table("hosts", "ms/step", "lost")
    for count, run in predicted.items():
        table.add_row(f"{count:,}", f"{run.step_s * 1e3:.1f}", f"{run.lost_share:.1%}")
    Console().print(table)


@data.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder.")
@click.option("--train", "train_images", type=click.IntRange(1), default=2000, show_default=True, help="Images.")
@click.option("--test", "test_images", type=click.IntRange(1), default=200, show_default=True, help="Images.")
@click.option("--side", type=click.IntRange(16), default=96, show_default=True, help="Pixels of the longer side.")
@click.option("--most", type=click.IntRange(1), default=5, show_default=True, help="Shapes in an image, from 0 on.")
@click.option("--both-ways", is_flag=True, help="Half of the images lie and half stand, instead of squares.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def shapes(out: Path, train_images: int, test_images: int, side: int, most: int, both_ways: bool, seed: int) -> None:
    """Draw circles, triangles and rectangles in COCO's format: PNG images, boxes and polygons.

    The same options draw the same images, which are those of `Shapes` in a recipe.

    \b
    multipod data shapes --out shapes
    multipod data inspect ssd --set data.train_files=shapes/train \\
        --set data.train_annotations=shapes/annotations/instances_train.json --out batch.png
    """
    for part, count in (("train", train_images), ("test", test_images)):
        drawn = DrawnShapes(count, 2 * seed + SEEDS[part], side, most, both_ways=both_ways)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"drawing {part}", total=count)
            file = write_coco(drawn, out, part, lambda done, task=task: progress.update(task, completed=done))  # type: ignore[misc]
        click.echo(f"{count:,} images in {out / part}, what is in them in {file}")


@data.command()
@json_option
def formats(as_json: bool) -> None:
    """List the formats that are read."""
    if as_json:
        print_json({name: {"about": known.about, "suffixes": list(known.suffixes)} for name, known in FORMATS.items()})
        return
    for name, known in FORMATS.items():
        click.echo(f"{name:14} {known.about}{' (' + ', '.join(known.suffixes) + ')' if known.suffixes else ''}")
