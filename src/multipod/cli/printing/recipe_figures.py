"""What `multipod show --json` prints: the values that the tables of `multipod show` are made of."""

from typing import Any

from multipod.cli.printing.recipe import make_program, timed_cut
from multipod.layout.compatible import ruled_out
from multipod.layout.compiled import CompiledFacts
from multipod.layout.mesh import data_devices
from multipod.nn.model import ShowsFigures
from multipod.recipe.recipe import Recipe
from multipod.recipe.scaling import preset_remarks
from multipod.recipe.text import flat_fields, to_text
from multipod.runs.options import RuntimeOptions
from multipod.step.checks import layout_use
from multipod.step.inspect import attention_choices, compiled_for, compiled_here, gradient_sum, parts, totals, traffic
from multipod.step.program import Program
from multipod.step.staged.inspect import pipe_facts, stages_of
from multipod.step.staged.program import StagedProgram
from multipod.step.state import parameter_count
from multipod.step.unstaged import UnstagedProgram

Figures = dict[str, Any]
"""Values by name; bytes and counts are whole numbers, times seconds."""


def recipe_figures(chosen: Recipe) -> Figures:
    """Returns the recipe's fields by the names that `--set` takes, and what to know of its preset."""
    return {"recipe": flat_fields(to_text(chosen)), "remarks": list(preset_remarks(chosen))}


def program_figures(chosen: Recipe, *, compiles: bool) -> Figures:
    """Returns how a recipe lies on its mesh: its stages or its tensors, and what is on each device."""
    program = make_program(chosen)
    figures = _mesh(program) | (_staged(program) if isinstance(program, StagedProgram) else _unstaged(program))
    figures["excluded"] = [{"by": by, "what": what} for by, what in ruled_out(layout_use(chosen))]
    return figures | ({"compiled": _compiled(program, compiled_here(program))} if compiles else {})


def compiled_for_figures(chosen: Recipe, topology_name: str, where: RuntimeOptions) -> Figures:
    """Returns what XLA knows of the update, compiled for a TPU that is not here."""
    program, facts = compiled_for(chosen, topology_name, where.cache)
    attention = _attention(program) if isinstance(program, UnstagedProgram) else []
    return _mesh(program) | {
        "compiled_for": topology_name,
        "compiled": _compiled(program, facts),
        "attention": attention,
    }


def layer_times_figures(chosen: Recipe) -> Figures:
    """Returns each layer's seconds, forward and backward, its estimated cost, and the cut that the times ask for."""
    rows, timed, known, cut = timed_cut(chosen)
    layers = [
        {"layer": layer.name, "seconds": layer.cost, "estimated": cost}
        for layer, cost in zip(timed, known, strict=True)
    ]
    return {"rows": rows, "layers": layers, "cut": [len(part) for part in cut.parts], "balance": cut.balance}


def _mesh(program: Program) -> Figures:
    return {"mesh": dict(program.mesh.shape), "devices": program.mesh.size}


def _unstaged(program: UnstagedProgram) -> Figures:
    chosen = program.recipe
    model = chosen.model.figures() if isinstance(chosen.model, ShowsFigures) else {}
    return {
        "rows": program.rows,
        "rows_on_a_device": program.rows // data_devices(program.mesh),
        "parameters": parameter_count(chosen),
        "tensors": parts(program),
        "bytes_on_a_device": totals(program),
        "not_split_in_the_update": dict(program.unshared),
        "gradient_sum": gradient_sum(program),
        "attention": _attention(program),
        "model": model,
    }


def _attention(program: UnstagedProgram) -> list[Figures]:
    return [{"count": count, "choice": str(choice)} for choice, count in attention_choices(program).items()]


def _staged(program: StagedProgram) -> Figures:
    return {
        "rows": program.rows,
        "rows_on_a_device": program.rows // data_devices(program.mesh),
        "micro_batches": program.placement.micro_batches,
        "parameters": parameter_count(program.recipe),
        "stages": list(stages_of(program.placement)),
        "pipeline": pipe_facts(program),
        "gradient_sum": program.recipe.layout.sync.gradient_sum,
    }


def _compiled(program: Program, facts: CompiledFacts) -> Figures:
    return {
        "devices": facts.devices,
        "flops": facts.flops,
        "bytes": facts.bytes,
        "memory": facts.memory,
        "peak_bytes": facts.memory.peak,
        "messages": list(traffic(facts, program)),
        "unknown_loops": facts.unknown_loops,
    }
