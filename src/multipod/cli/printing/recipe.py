"""How a recipe lies on a mesh, as tables: what each device has, what each stage, what the compiler knows."""

import math
from typing import Any

import jax
from rich.table import Table

from multipod.layout.check import tensors_without_rules, unsplit_tensors
from multipod.layout.compatible import ruled_out
from multipod.layout.compiled import CompiledFacts
from multipod.layout.mesh import abstract_mesh, data_devices, make_mesh, topology_of
from multipod.layout.stages import Cut, Layer, balanced
from multipod.nn.model import ShowsFigures
from multipod.recipe.recipe import Recipe
from multipod.recipe.scaling import preset_remarks
from multipod.recipe.text import to_text
from multipod.runs.options import RuntimeOptions
from multipod.step.checks import layout_use
from multipod.step.inspect import (
    attention_choices,
    compiled_for,
    compiled_here,
    describe_axes,
    gradient_sum,
    parts,
    totals,
    traffic,
)
from multipod.step.program import Program, program_of
from multipod.step.staged.inspect import pipe_facts, stages_of
from multipod.step.staged.layer_times import timed_layers
from multipod.step.staged.pipe import layers_of
from multipod.step.staged.program import StagedProgram
from multipod.step.state import parameter_count
from multipod.step.unstaged import UnstagedProgram
from multipod.train.observers.text import broken_text, unshared_text


def recipe_text(chosen: Recipe) -> str:
    """The recipe's text, and what a reader should know of its preset."""
    return "\n".join([to_text(chosen), *preset_remarks(chosen)])


def make_program(chosen: Recipe) -> Any:
    """The program on the devices here, or, where the mesh has more, without devices."""

    layout = chosen.layout
    if layout.mesh and math.prod(layout.mesh) * layout.replica_devices > jax.device_count():
        return program_of(chosen, abstract_mesh(layout))
    return program_of(chosen, make_mesh(layout))


def stage_tables(program: StagedProgram) -> list[Table]:
    """A table of the stages, and one of what each device has."""

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
        table.add_row(str(one.stage), shorten_names(one.layers), f"{one.cost:.1%}", *sizes, *delay)
    each = Table(show_header=False, title="on each device")
    each.add_row("mesh", describe_mesh(program))
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


def timed_cut(chosen: Recipe) -> tuple[int, list[Layer], list[float], Cut]:
    """Returns rows on a device, its layers timed with them, the layers' estimated costs, and the cut by the times."""
    layout = chosen.layout
    parts, micro = (layout.pipeline.parts, layout.pipeline.micro_batches) if layout.pipeline else (1, 1)
    rows = max(chosen.batch // (math.prod(layout.mesh or (1,)) * max(micro, 1)), 1)
    timed, known = timed_layers(chosen, rows), [layer.cost for layer in layers_of(chosen)]
    return rows, timed, known, balanced(timed, parts)


def layer_times_table(chosen: Recipe) -> Table:
    """Each layer's time beside its estimated cost, and the cut that the times ask for."""
    rows, timed, known, cut = timed_cut(chosen)
    counts = "x".join(str(len(part)) for part in cut.parts)
    table = Table(title=f"layers, forward and backward, {rows} rows on one device")
    for name in ("layer", "ms", "of all", "of all, estimated"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer, cost in zip(timed, known, strict=True):
        shares = (layer.cost / sum(one.cost for one in timed), cost / sum(known))
        table.add_row(layer.name, f"{1e3 * layer.cost:.2f}", *(f"{share:.1%}" for share in shares))
    if len(cut.parts) > 1:
        table.caption = f"--layout cut={counts} balances {len(cut.parts)} parts to {cut.balance:.1%}"
    return table


def shorten_names(names: tuple[str, ...]) -> str:
    """The first and the last, with how many there are."""
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]} ({len(names)})"


def describe_mesh(program: Program) -> str:
    """The axes of the mesh, and what its devices are."""

    abstract = isinstance(program.mesh, jax.sharding.AbstractMesh)
    kind = "devices, more than are here" if abstract else f"{program.mesh.devices.flat[0].device_kind} devices"
    return f"{describe_axes(program)}: {program.mesh.size:,} {kind}"


def program_tables(chosen: Recipe, *, tensors: bool, compiles: bool) -> list[Table | str]:
    """What `show` prints of a recipe on its mesh: tables, and lines of what does not go together.

    tensors: also how each parameter is split; compiles: also what XLA knows of the update.
    """
    program = make_program(chosen)
    if chosen.layout.stages > 1:
        tables = stage_tables(program)
    else:
        tables = [*([parameters_table(program)] if tensors else []), device_table(program)]
    return [*tables, *ruled_out_lines(chosen), *([compiled_table(program)] if compiles else [])]


def ruled_out_lines(chosen: Recipe) -> list[str]:
    """A line for each thing of the layout or of the recipe that excludes others."""

    excluded: dict[str, list[str]] = {}
    for settings, titles in ruled_out(layout_use(chosen)):
        excluded.setdefault(settings, []).append(titles)
    return [f"{settings} does not go with: {', '.join(lines)}" for settings, lines in excluded.items()]


def parameters_table(program: UnstagedProgram) -> Table:
    """How each parameter is split, and its bytes on a device."""

    table = Table(title="parameters")
    named = any(dim != "-" for part in parts(program) for dim in part.dims)
    moved = any(part.split != part.update for part in parts(program))
    for name in ("tensor", "shape", *["dims"] * named, "split", *["in the update"] * moved):
        table.add_column(name, overflow="fold")
    table.add_column("bytes on a device", justify="right")
    for part in parts(program):
        name = f"{part.name} ({part.count})" if part.count > 1 else part.name
        dims = [", ".join(part.dims)] * named
        update = [describe_split(part.update_shape, part.update, flat=part.update_shape != part.shape)] * moved
        split = describe_split(part.kept_shape, part.split, flat=part.kept_shape != part.shape)
        table.add_row(name, "x".join(map(str, part.shape)), *dims, split, *update, f"{part.device_bytes:,}")
    return table


def describe_split(shape: tuple[int, ...], axes: tuple[str, ...], flat: bool = False) -> str:
    """Such as `32 by model`, or `flat: 36,864 by y+x`; empty for a tensor that is whole."""
    split = ", ".join(f"{size:,} by {names}" for size, names in zip(shape, axes, strict=True) if names != "-")
    return f"flat: {split}" if flat else split


def device_table(program: UnstagedProgram) -> Table:
    """What a run has on each device: its rows, parameters and bytes, and how gradients are summed."""

    chosen, rows = program.recipe, program.rows
    leaves = jax.tree.leaves(program.placement.state.params)
    table = Table(show_header=False, title="on each device")
    chips = topology_of(chosen.layout, program.mesh)
    broken = broken_text({"chips": chips.shape, "failed": chosen.layout.failed})
    table.add_row("mesh", f"{describe_mesh(program)}{broken}")
    of = f"{rows} rows: {chosen.batch} examples, the rest padding" if program.padded else f"{rows} examples"
    table.add_row("batch", f"{rows // data_devices(program.mesh)} of {of}")
    table.add_row("parameters", f"{sum(leaf.size for leaf in leaves):,} in {len(leaves)} tensors")
    figures = chosen.model.figures() if isinstance(chosen.model, ShowsFigures) else {}
    for name, figure in figures.items():
        table.add_row(name, figure)
    for name, size in totals(program).items():
        table.add_row(f"{name}, bytes", f"{size:,}")
    add_attention(table, program)
    total = gradient_sum(program)
    messages = f"{total.messages} message{'s' if total.messages > 1 else ''}"
    table.add_row("gradient sum", f"{total.name}, {total.nbytes:,} bytes in {messages} over {total.devices:,} devices")
    if chosen.layout.sync.shards_update:
        table.add_row("not split in the update", unshared_text(program.unshared) or "nothing")
    stay = unsplit_tensors(chosen.layout, program.placement.tensors, program.placement.placements)
    if stay:
        table.add_row("whole on each device of a replica", f"{len(stay)} tensors, {sum(stay.values()):,} bytes")
        silent = tensors_without_rules(program.placement.tensors, program.placement.placements)
        if silent:
            table.add_row("of which no rule speaks", ", ".join(silent[:3]) + (" ..." if len(silent) > 3 else ""))
    return table


def compiled_table(program: Program) -> Table:
    """What XLA knows of the update, compiled for the devices of its mesh."""

    facts = compiled_here(program)
    return facts_table(f"compiled for {facts.devices:,} {jax.default_backend()} devices", program, facts)


def compiled_for_table(chosen: Recipe, topology_name: str, where: RuntimeOptions) -> Table:
    """What XLA knows of the update, compiled for a TPU that is not here."""

    program, facts = compiled_for(chosen, topology_name, where.cache)
    table = facts_table(f"compiled for {topology_name}: {describe_axes(program)}", program, facts)
    if isinstance(program, UnstagedProgram):
        add_attention(table, program)
    return table


def add_attention(table: Table, program: UnstagedProgram) -> None:
    """Adds a row for each way in which attentions are computed, and why it is the plain one."""
    for choice, count in attention_choices(program).items():
        table.add_row("attention", f"{count} x {choice}")


def facts_table(title: str, program: Program, facts: CompiledFacts) -> Table:
    """The costs, the memory and the messages of a compiled update, on each device."""

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
