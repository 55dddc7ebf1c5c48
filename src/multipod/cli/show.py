"""`multipod list` and `multipod show`: recipes, and how they lie on a mesh, without training them."""

import inspect
import math
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from multipod import runtime
from multipod.cli.options import what_options, where_options
from multipod.runs.options import RuntimeOptions

if TYPE_CHECKING:
    from multipod.layout.compiled import CompiledFacts
    from multipod.recipe.recipe import Recipe
    from multipod.step.program import Program
    from multipod.step.staged.program import StagedProgram
    from multipod.step.unstaged import UnstagedProgram


@click.command("list")
def list_recipes() -> None:
    """List the recipes, one line each."""
    from multipod.recipes.find import RECIPES, find

    for name in sorted(RECIPES):
        first = (inspect.getdoc(find(name)) or "").splitlines()[0]
        click.echo(f"{name:{max(map(len, RECIPES))}}  {first}")


@click.command()
@click.argument("recipe")
@click.option("--tensors", is_flag=True, help="How each parameter is split.  [default: with --layout]")
@click.option("--compile", "compiles", is_flag=True, help="Compile the update: activations, FLOPs, collectives.")
@click.option(
    "--compile-for",
    metavar="TPU",
    help="Compile it for a TPU that is not here, as v3:128x32 (needs the extra `tpu`).",
)
@click.option("--time-layers", is_flag=True, help="Time each layer on one device; the cut that balances the stages.")
@what_options
@where_options
def show(
    recipe: str,
    tensors: bool,
    compiles: bool,
    compile_for: str | None,
    time_layers: bool,
    changes: list[str],
    where: RuntimeOptions,
) -> None:
    """Show RECIPE: all its fields, the mesh, parameters, bytes on each device. Nothing is trained.

    The mesh may be far larger than this machine: --layout data=32x32,model=4 shows 4,096 devices.
    """
    from multipod.recipe.text import to_text
    from multipod.runs.recipes import configure_recipe

    chosen = configure_recipe(recipe, changes, where)
    click.echo(to_text(chosen))
    console = Console()
    if compile_for:
        runtime.absent_tpus()
        console.print(_compiled_for(chosen, compile_for, where))
        return
    if time_layers:
        console.print(_timed_layers(chosen))
        return
    program = _program(chosen)
    if chosen.layout.stages > 1:
        for table in _staged(program):
            console.print(table)
        _say_what_is_ruled_out(console, chosen)
        if compiles:
            console.print(_compiled(program))
        return
    if tensors or any(change.startswith("layout.") for change in changes):
        console.print(_parts(program))
    console.print(_on_each_device(program))
    _say_what_is_ruled_out(console, chosen)
    if compiles:
        console.print(_compiled(program))


def _program(chosen: "Recipe") -> Any:
    """The program on the devices here, or, where the mesh has more, without devices."""
    import jax

    from multipod.layout.mesh import abstract_mesh, make_mesh
    from multipod.step.program import program_of

    layout = chosen.layout
    if layout.mesh and math.prod(layout.mesh) * layout.replica_devices > jax.device_count():
        return program_of(chosen, abstract_mesh(layout))
    return program_of(chosen, make_mesh(layout))


def _staged(program: "StagedProgram") -> list[Table]:
    """A table of the stages, and one of what each device has."""
    from multipod.layout.mesh import data_devices
    from multipod.step.staged.inspect import pipe_facts, stages_of
    from multipod.step.state import parameter_count

    facts = pipe_facts(program)
    table = Table(title=facts.schedule)
    late = program.recipe.layout.asynchronous
    for name in ("stage", "layers"):
        table.add_column(name, overflow="fold")
    numbers = ("work", "parameters", "weights, bytes", "optimizer, bytes", "micro-batches kept", "activations, bytes")
    for name in (*numbers, *["delay, updates"] * late):
        table.add_column(name, justify="right")
    for one in stages_of(program.placement):
        sizes = [f"{n:,}" for n in (one.parameters, one.weights, one.optimizer, one.live, one.activations)]
        delay = [f"{one.delay:.2f}"] * late
        table.add_row(str(one.stage), _layer_names(one.layers), f"{one.cost:.1%}", *sizes, *delay)
    each = Table(show_header=False, title="on each device")
    each.add_row("mesh", _mesh_text(program))
    rows = program.rows // data_devices(program.mesh)
    count = program.placement.micro_batches
    each.add_row("batch", f"{rows} of {program.rows} rows, in {count} micro-batches of {rows // count}")
    each.add_row("parameters", f"{parameter_count(program.recipe):,}")
    for name, size in facts.held.items():
        each.add_row(f"{name}, bytes", f"{size:,}")
    each.add_row("message to the next stage, bytes", f"{facts.message:,}")
    each.add_row(
        "share of the time at work, model", f"{facts.utilisation:.1%}, with stages balanced to {facts.balance:.1%}"
    )
    if facts.tied:
        each.add_row("in several stages", ", ".join(facts.tied))
    each.add_row(
        "gradient sum", f"{program.recipe.layout.sync.gradient_sum} over {data_devices(program.mesh):,} devices"
    )
    return [table, each]


def _timed_layers(chosen: "Recipe") -> Table:
    """Each layer's time beside its estimated cost, and the cut that the times ask for."""
    from multipod.layout.stages import balanced
    from multipod.step.staged.layer_times import timed_layers
    from multipod.step.staged.pipe import layers_of

    layout = chosen.layout
    parts, micro = (layout.pipeline.parts, layout.pipeline.micro_batches) if layout.pipeline else (1, 1)
    rows = max(chosen.batch // (math.prod(layout.mesh or (1,)) * max(micro, 1)), 1)
    timed, known = timed_layers(chosen, rows), [layer.cost for layer in layers_of(chosen)]
    cut = balanced(timed, parts)
    counts = "x".join(str(len(part)) for part in cut.parts)
    table = Table(title=f"layers, forward and backward, {rows} rows on one device")
    for name in ("layer", "ms", "of all", "of all, estimated"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer, cost in zip(timed, known, strict=True):
        shares = (layer.cost / sum(one.cost for one in timed), cost / sum(known))
        table.add_row(layer.name, f"{1e3 * layer.cost:.2f}", *(f"{share:.1%}" for share in shares))
    if parts > 1:
        table.caption = f"--layout cut={counts} balances {parts} parts to {cut.balance:.1%}"
    return table


def _layer_names(names: tuple[str, ...]) -> str:
    """The first and the last, with how many there are."""
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _mesh_text(program: "Program") -> str:
    """The axes of the mesh, and what its devices are."""
    import jax

    axes = " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items())
    abstract = isinstance(program.mesh, jax.sharding.AbstractMesh)
    kind = "devices, more than are here" if abstract else f"{program.mesh.devices.flat[0].device_kind} devices"
    return f"{axes}: {program.mesh.size:,} {kind}"


def _say_what_is_ruled_out(console: Console, chosen: "Recipe") -> None:
    """A line for each thing of the layout or of the recipe that excludes others."""
    from multipod.layout.compatible import ruled_out
    from multipod.step.checks import layout_use

    excluded: dict[str, list[str]] = {}
    for settings, titles in ruled_out(layout_use(chosen)):
        excluded.setdefault(settings, []).append(titles)
    for settings, lines in excluded.items():
        console.print(f"{settings} does not go with: {', '.join(lines)}", highlight=False, soft_wrap=True, markup=False)


def _parts(program: "UnstagedProgram") -> Table:
    from multipod.step.inspect import parts

    table = Table(title="parameters")
    named = any(dim != "-" for part in parts(program) for dim in part.dims)
    moved = any(part.split != part.update for part in parts(program))
    for name in ("tensor", "shape", *["dims"] * named, "split", *["in the update"] * moved):
        table.add_column(name, overflow="fold")
    table.add_column("bytes on a device", justify="right")
    for part in parts(program):
        name = f"{part.name} ({part.count})" if part.count > 1 else part.name
        dims = [", ".join(part.dims)] * named
        update = [_split(part.shape, part.update)] * moved
        split = _split(part.shape, part.split)
        table.add_row(name, "x".join(map(str, part.shape)), *dims, split, *update, f"{part.device_bytes:,}")
    return table


def _split(shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
    """Such as `32 by model`; empty for a tensor that is whole."""
    return ", ".join(f"{size} by {names}" for size, names in zip(shape, axes, strict=True) if names != "-")


def _on_each_device(program: "UnstagedProgram") -> Table:
    import jax

    from multipod.layout.check import tensors_without_rules, unsplit_tensors
    from multipod.layout.mesh import data_devices, is_split, topology_of
    from multipod.nn.model import ShowsFigures
    from multipod.step.inspect import gradient_sum, totals
    from multipod.step.specs import flat_specs
    from multipod.train.observers.text import broken_text

    chosen, rows = program.recipe, program.rows
    leaves = jax.tree.leaves(program.shapes.params)
    table = Table(show_header=False, title="on each device")
    chips = topology_of(chosen.layout, program.mesh)
    broken = broken_text({"chips": chips.shape, "failed": chosen.layout.failed})
    table.add_row("mesh", f"{_mesh_text(program)}{broken}")
    of = f"{rows} rows: {chosen.batch} examples, the rest padding" if program.padded else f"{rows} examples"
    table.add_row("batch", f"{rows // data_devices(program.mesh)} of {of}")
    table.add_row("parameters", f"{sum(leaf.size for leaf in leaves):,} in {len(leaves)} tensors")
    figures = chosen.model.figures() if isinstance(chosen.model, ShowsFigures) else {}
    for name, figure in figures.items():
        table.add_row(name, figure)
    for name, size in totals(program).items():
        table.add_row(f"{name}, bytes", f"{size:,}")
    total = gradient_sum(program)
    count = f"{total.messages} message{'s' if total.messages > 1 else ''}"
    table.add_row("gradient sum", f"{total.name}, {total.nbytes:,} bytes in {count} over {total.devices:,} devices")
    if chosen.layout.sync.shards_update:
        specs = flat_specs(program.sync.specs)
        unsplit = [leaf for leaf, spec in zip(leaves, specs, strict=True) if not is_split(spec)]
        rest = f"{len(unsplit)} of the tensors, {sum(leaf.size * leaf.dtype.itemsize for leaf in unsplit):,} bytes"
        table.add_row("not split in the update", rest)
    stay = unsplit_tensors(chosen.layout, program.placement.tensors, program.placement.placements)
    if stay:
        table.add_row("whole on each device of a replica", f"{len(stay)} tensors, {sum(stay.values()):,} bytes")
        silent = tensors_without_rules(program.placement.tensors, program.placement.placements)
        if silent:
            table.add_row("of which no rule speaks", ", ".join(silent[:3]) + (" ..." if len(silent) > 3 else ""))
    return table


def _compiled(program: "Program") -> Table:
    """What XLA's CPU compiler knows of the update, or of one on a small mesh with the same tiles and rows a device."""
    import jax

    from multipod.step.inspect import compiled_here, stand_in

    title = "compiled"
    if isinstance(program.mesh, jax.sharding.AbstractMesh):
        program = _program(stand_in(program.recipe, jax.device_count()))
        axes = " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items())
        title += f" on a stand-in with the same tiles: {axes}"
    return _facts_table(title, program, compiled_here(program))


def _compiled_for(chosen: "Recipe", topology_name: str, where: RuntimeOptions) -> Table:
    from multipod.step.inspect import compiled_for

    program, facts = compiled_for(chosen, topology_name, where.cache)
    axes = " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items())
    return _facts_table(f"compiled for {topology_name}: {axes}", program, facts)


def _facts_table(title: str, program: "Program", facts: "CompiledFacts") -> Table:
    from multipod.step.inspect import traffic

    table = Table(show_header=False, title=f"{title}; an update, on each device")
    table.add_row("FLOPs", f"{facts.flops:,.0f}")
    table.add_row("bytes read and written", f"{facts.bytes:,.0f}")
    table.add_row("arguments, bytes", f"{facts.memory.arguments:,}")
    table.add_row("activations and other temporaries, bytes", f"{facts.memory.temporaries:,}")
    table.add_row("peak, bytes", f"{facts.memory.peak:,}")
    for row in traffic(facts, program):
        over = " and ".join(row.axes) or "groups that are no axes"
        table.add_row(f"{row.kind} over {over}", f"{row.times} a step, {row.nbytes:,} bytes")
    if facts.unknown_loops:
        table.add_row("loops of unknown length", f"{facts.unknown_loops}, counted once")
    return table
