"""From a `Recipe` to a `Workload`: the operators of the real step function, traced and not compiled."""

import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from multipod.errors import LayoutError, PlanError, RecipeError
from multipod.layout.axes import DATA_AXES
from multipod.layout.compiled import CompiledFacts, absent_mesh, facts_of_lowered
from multipod.layout.layout import Layout
from multipod.layout.mesh import abstract_mesh
from multipod.layout.split import UNSPLIT, ModelSplit, PipelineSplit
from multipod.optim.optimizer import Builds, clip_of, flattens
from multipod.optim.optimizers import OPTIMIZERS
from multipod.plan.machine import Machine
from multipod.plan.placing import on_machine
from multipod.plan.traced import jaxpr
from multipod.plan.traced.fields import (
    DTYPES,
    bare,
    count_evaluated,
    dtype_fields,
    example_to_plan,
    norm_examples_of,
    norm_fields,
    norm_moving_of,
    norm_tile_of,
)
from multipod.plan.traced.remembered import in_memory, remembered
from multipod.plan.traced.splits import Splits, held_parameters
from multipod.plan.work import Message, Pattern, Work
from multipod.plan.workload import Build, Dtype, Evaluation, Part, Slots, Workload
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.step.guard import guard_of
from multipod.step.placement import MeshPlacement
from multipod.step.program import Program, program_of
from multipod.step.staged.pipe import layers_of
from multipod.step.staged.placement import StagePlacement
from multipod.step.sync.reduction import SUM_SCOPE

SMALL = 0.5
"""Sums of fewer bytes than this share of the gradients are no gradients: statistics and values."""


def workload_of(recipe: Recipe, splits: Splits | None = None) -> Workload:
    """What a step of `recipe` asks for. Traces the step once for each number of examples that is asked about.

    The step is traced on a mesh of one device with the share of the batch that a device would have, so its operators
    are the real ones: model, objective, optimizer. Experts are split over a mesh without devices, so what they send
    is in the trace; stages are the parts of the very pipeline. With `splits`, XLA is asked what other splits of the
    model make of the operators, and what memory the step needs; without, there are none, and memory is a guess.

    Raises:
      PlanError: the recipe's step cannot be traced.
    """
    fields = dtype_fields(recipe)

    @lru_cache
    def other(dtype: Dtype) -> Workload:
        return _workload(override(recipe, [f"{name}={dtype}" for name in fields]), splits)

    own = _workload(recipe, splits)
    return replace(own, dtypes=DTYPES, other=other) if fields else own


def _workload(whole: Recipe, splits: Splits | None) -> Workload:
    recipe, tile = bare(whole), norm_tile_of(whole)
    known = remembered(_Facts, recipe, ("facts",), partial(_facts, recipe))
    splits = splits and replace(splits, recipe=whole, experts=known.experts)
    return Workload(
        name=recipe.name,
        parameters=known.parameters,
        build=_build(recipe, splits),
        splits=(*(splits.able if splits else ()), *(ModelSplit(expert=n) for n in known.experts)),
        unasked=() if splits else ("splits of layers and of images, which --splits compiles",),
        expert_parameters=known.expert_parameters,
        held_by=lru_cache(partial(held_parameters, recipe)),
        tensors=known.tensors,
        flattens=flattens(recipe.optimizer),
        cut=partial(_parts, recipe, splits) if known.layers > 1 else None,
        layers=known.layers,
        optimizer=_update_of(recipe.optimizer),
        slots=known.slots,
        wire_bytes=2 if recipe.layout.sync.sum_dtype == "bfloat16" else known.wire_bytes,
        norm_group_messages=known.norm_messages,
        norm_bytes=known.norm_bytes,
        norm_examples=norm_examples_of(whole),
        norm_moving=norm_moving_of(whole),
        norm_replicas=math.prod(tile) if tile else 0,
        value_messages=known.value_messages,
        value_bytes=known.value_bytes,
        state_bytes=known.state_bytes,
        batch_bytes=known.batch_bytes,
        evaluation=Evaluation(known.test_examples),
        dtype=_dtype(recipe),
        source=f"the step of the recipe {recipe.name}, traced",
    )


def _update_of(optimizer: Builds) -> str:
    """Returns the optimizer's name in `multipod.plan.workload.UPDATE_BYTES`; Adam's for those that are like it."""
    name = next((name for name, kind in OPTIMIZERS.items() if kind is type(optimizer)), "adam")
    return {"adafactor": "adam", "lars_scaled": "lars"}.get(name, name)


@dataclass(frozen=True)
class _Facts:
    """What is known of a recipe before its step is traced at any size that somebody asks about; see `Workload`."""

    parameters: float
    slots: float
    wire_bytes: int
    norm_messages: float
    norm_bytes: float
    value_messages: float
    value_bytes: float
    state_bytes: float
    batch_bytes: float
    test_examples: int
    experts: tuple[int, ...]
    expert_parameters: float
    tensors: tuple[tuple[tuple[int, ...], int], ...]
    layers: int


def _facts(recipe: Recipe) -> _Facts:
    program = _program(recipe, 1)
    params = jax.tree.leaves(program.shapes.params)
    parameters = sum(leaf.size for leaf in params)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.shapes.optimizer))
    small = [s for s in _smallest(recipe).sent if 0 < s.nbytes < SMALL * 4 * parameters and s.pattern != "neighbour"]
    example = example_to_plan(recipe)
    experts = expert_splits(recipe)
    statistics = jax.tree.leaves(program.shapes.statistics)
    state_bytes = float(sum(leaf.size * leaf.dtype.itemsize for leaf in statistics))
    # Each layer of batch norm keeps two moments, and sends both in one message, forward and back again.
    sums = len(statistics) if norm_fields(recipe) else 0
    return _Facts(
        parameters=parameters,
        slots=state / max(1, 4 * parameters),
        wire_bytes=max((one.dtype.itemsize for one in params), default=4),
        norm_messages=sums,
        norm_bytes=2 * state_bytes / sums if sums else 0.0,
        value_messages=sum(s.count for s in small),
        value_bytes=sum(s.nbytes * s.count for s in small) / max(1, sum(s.count for s in small)),
        state_bytes=state_bytes,
        batch_bytes=sum(array.nbytes for array in example.values()),
        test_examples=count_evaluated(recipe),
        experts=tuple(split.expert for split in experts),
        expert_parameters=_expert_parameters(recipe, experts[0]) if experts else 0,
        tensors=tuple(Counter(leaf.shape for leaf in params).items()),
        layers=_layers(recipe),
    )


def _smallest(recipe: Recipe) -> jaxpr.Traced:
    """The step with as few rows as it can have: layers of experts ask for whole groups of them.

    Raises:
      PlanError: not even the recipe's batch can be traced.
    """
    rows = [2**k for k in range(11) if 2**k < recipe.batch]
    for few in rows:
        with suppress(PlanError):
            return _traced(recipe, few, 1)
    return _traced(recipe, recipe.batch, 1)


def _dtype(recipe: Recipe) -> Dtype:
    """The type of the innermost model; "float32" where none says."""
    fields = dtype_fields(recipe)
    value: Any = recipe
    for name in fields[-1].split(".") if fields else ():
        value = getattr(value, name)
    return value if fields else "float32"


def _build(recipe: Recipe, splits: Splits | None) -> Build:
    def build(examples: float, split: ModelSplit, lanes: int) -> Work:
        experts = _expert_work(recipe, examples, split.expert, lanes)
        if split.expert > 1 and split.devices == split.expert:
            return experts
        if splits is not None:
            divided = splits.work(experts.ops, examples, split, lanes)
            return replace(divided, messages=experts.messages + divided.messages)
        if split.devices > 1:
            raise PlanError(f"recipe {recipe.name}: a split of {split} has not been compiled. Plan with --splits.")
        return experts

    return build


KEPT = 6
"""Bytes that all operators move over those kept for the backward pass, where nobody asked XLA: a guess."""


def expert_splits(recipe: Recipe) -> tuple[ModelSplit, ...]:
    """The splits over 2, 4, 8 and more devices, up to 512, that the model's experts or tables allow."""
    return tuple(split for n in EXPERTS if _can(recipe, split := ModelSplit(expert=n)))


EXPERTS = tuple(2**k for k in range(1, 10))


def _can(recipe: Recipe, split: ModelSplit) -> bool:
    try:
        _ = _program(recipe, 1, split.expert).shapes
    except LayoutError:
        return False
    return True


def _expert_parameters(recipe: Recipe, split: ModelSplit) -> int:
    """The parameters that lie split over the axis."""
    program = _program(recipe, 1, split.expert)
    placement = MeshPlacement(program.recipe, program.mesh)
    return sum(
        math.prod(tensor.shape)
        for path, tensor in placement.tensors.items()
        if any("expert" in axes for axes in placement.placements[path].axes)
    )


def _expert_work(recipe: Recipe, examples: float, n: int, lanes: int) -> Work:
    """A device's operators and messages, of a replica whose `n` devices split the examples, and the experts or tables.

    Its sums of gradients are the gradient sum's, so they are no messages here.
    """
    traced = _traced(recipe, max(1, math.ceil(examples / n)), lanes, n)
    sent = [one for one in traced.sent if one.axes == ("expert",) and SUM_SCOPE not in one.scopes]
    messages = [Message("experts", cast(Pattern, one.pattern), one.nbytes, n, one.count) for one in sent]
    return Work(traced.inside, tuple(messages), sum(op.nbytes for op in traced.inside) / KEPT)


@in_memory(maxsize=256)
def _traced(recipe: Recipe, rows: int, lanes: int, experts: int = 1) -> jaxpr.Traced:
    """The step with so many rows on each device."""

    def make() -> jaxpr.Traced:
        program = _program(recipe, rows, experts)
        try:
            return jaxpr.trace(jax.make_jaxpr(program.update)(program.shapes, *_arguments(program)), lanes)
        except (TypeError, ValueError) as error:
            raise PlanError(f"recipe {recipe.name}: its step cannot be traced: {str(error).splitlines()[0]}") from error

    return remembered(jaxpr.Traced, recipe, ("step", rows, lanes, experts), make)


def _program(recipe: Recipe, rows: int, experts: int = 1) -> Program:
    layout = Layout((1, 1), split=ModelSplit(expert=experts, rules=recipe.layout.split.rules))
    if experts > 1:
        return program_of(replace(recipe, batch=rows * experts, accumulate=1, layout=layout), abstract_mesh(layout))
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), DATA_AXES, axis_types=(AxisType.Auto,) * 2)
    return program_of(replace(recipe, batch=rows, accumulate=math.gcd(rows, recipe.accumulate), layout=layout), mesh)


def _arguments(program: Program) -> tuple[Any, Any]:
    example = example_to_plan(program.recipe)
    rows = program.recipe.batch
    batch = {name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype) for name, array in example.items()}
    return batch, guard_of(program.recipe, program.mesh, False).control_shapes()


def _layers(recipe: Recipe) -> int:
    """How many parts the model can be cut into; 1 if it cannot be cut."""
    try:
        return len(layers_of(recipe)) if not clip_of(recipe.optimizer) else 1
    except RecipeError:
        return 1


@in_memory(maxsize=64)
def _parts(
    recipe: Recipe, splits: Splits | None, examples: float, parts: int, lanes: int, model: int
) -> tuple[Part, ...]:
    """The parts of the recipe's pipeline, each traced as `multipod.step.staged` runs it.

    Raises:
      PlanError: parts that are split themselves, of which only XLA can tell, which was not asked.
    """
    if model > 1 and splits is None:
        raise PlanError(f"recipe {recipe.name}: stages that model splits have not been compiled. Plan with --splits.")
    asked = ("parts", round(examples), parts, lanes)
    make = partial(_traced_parts, recipe, round(examples), parts, lanes)
    whole = remembered(tuple[Part, ...], recipe, asked, make)
    if model == 1 or splits is None:
        return whole
    return splits.parts(_held_by(recipe, whole, round(examples), model), examples, model, lanes)


def _held_by(recipe: Recipe, whole: tuple[Part, ...], examples: int, model: int) -> tuple[Part, ...]:
    """The parts, with those of their weights that one of `model` devices holds.

    Raises:
      LayoutError: dims that do not divide.
    """
    layout = Layout(
        (1, 1),
        split=ModelSplit(model=model, rules=recipe.layout.split.rules),
        pipeline=PipelineSplit(len(whole), micro_batches=1),
    )
    mesh = abstract_mesh(layout)
    placement = StagePlacement(replace(recipe, batch=examples, accumulate=1, layout=layout), mesh)
    found = []
    for part, weights in zip(whole, placement.pipe.setup.weights, strict=True):
        held = {
            name: jax.ShapeDtypeStruct(NamedSharding(mesh, placement.specs[name]).shard_shape(leaf.shape), leaf.dtype)
            for name, leaf in weights.items()
        }
        tied = tuple((name, float(held[name].size)) for name, _ in part.tied)
        found.append(replace(part, weights=_slots(held), tied=tied))
    return tuple(found)


def _traced_parts(recipe: Recipe, examples: int, parts: int, lanes: int) -> tuple[Part, ...]:
    layout = Layout((1, 1), pipeline=PipelineSplit(parts, micro_batches=1))
    small = replace(recipe, batch=examples, accumulate=1, layout=layout)
    pipe = StagePlacement(small, abstract_mesh(layout)).pipe
    found: list[Part] = []
    x: Any = ()
    tied = [{name for one, name in group if one == n} for n in range(parts) for group in [sum(pipe.setup.tied, ())]]
    for n, (part, weights, passes) in enumerate(
        zip(pipe.setup.parts, pipe.setup.weights, pipe.setup.passes, strict=True)
    ):
        forward, whole = _passes(part.function, weights, x, pipe.setup.aux, lanes)
        sent = 0.0 if n == parts - 1 else _bytes(passes.y)
        shared = tuple((name, float(weights[name].size)) for name in sorted(tied[n]))
        found.append(Part(forward, whole, _slots(weights), _slots(passes.saved, of_bytes=True), sent, shared))
        x = passes.y
    return tuple(found)


def _passes(function: Any, weights: Any, x: Any, aux: Any, lanes: int) -> tuple[Work, Work]:
    """The work of a part's forward pass, and of both."""

    def both(weights: Any, x: Any, aux: Any) -> Any:
        y, pull, extra = jax.vjp(lambda w, a: function(w, a, aux), weights, x, has_aux=True)
        return pull(jax.tree.map(jnp.ones_like, y)), extra

    traces = (jaxpr.trace(jax.make_jaxpr(run)(weights, x, aux), lanes) for run in (function, both))
    forward, whole = (Work((*trace.inside, *trace.outside)) for trace in traces)
    return forward, whole


def _slots(tree: Any, of_bytes: bool = False) -> Slots:
    """The arrays of a tree by their shape and type, with elements or bytes."""
    leaves = jax.tree.leaves(tree)
    counted = Counter((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    sizes = {(leaf.shape, str(leaf.dtype)): leaf.size * (leaf.dtype.itemsize if of_bytes else 1) for leaf in leaves}
    return tuple((f"{dtype}{shape}", n, float(sizes[shape, dtype])) for (shape, dtype), n in counted.items())


def _bytes(tree: Any) -> float:
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))


LIBTPU = {"tpu-v2": "v2", "tpu-v3": "v3", "tpu-v4": "v4", "tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e"}
"""How libtpu calls the chips of the catalogue."""


def libtpu_name(machine: Machine) -> str:
    """The topology of `machine` as libtpu knows it: `v3:128x32` is the multipod, whose columns come first there.

    Raises:
      PlanError: the machine is no TPU, or is broken: compilers know whole ones only.
    """
    chip = machine.topology.chip
    if chip is None or chip.name not in LIBTPU:
        raise PlanError(f"{machine}: only TPUs can be compiled for where they are not. Leave --compile out.")
    if machine.topology.failed_chips or machine.topology.failed_links:
        raise PlanError(f"{machine}: XLA compiles for whole machines only. Leave --compile or --fail out.")
    return f"{LIBTPU[chip.name]}:{'x'.join(map(str, reversed(machine.topology.shape)))}"


def compiled_step(recipe: Recipe, machine: Machine, cache: Path | None = None) -> CompiledFacts:
    """What XLA knows of the real step of `recipe` on all devices of a TPU that is not here.

    The recipe's batch must divide over them. Up to a minute; from `cache` at once. `runtime.absent_tpus` comes first.

    Raises:
      PlanError: no TPU, or a broken one.
      LayoutError: no `libtpu`, a batch that does not divide, or a program that does not fit the devices.
    """
    layout = on_machine(replace(recipe.layout, split=UNSPLIT, pipeline=None, failed=()), machine)
    name = libtpu_name(machine)
    mesh = absent_mesh(name, dict(zip(DATA_AXES, layout.mesh, strict=True)))
    return facts_of_lowered(program_of(replace(recipe, layout=layout), mesh).lowered, name, cache)
