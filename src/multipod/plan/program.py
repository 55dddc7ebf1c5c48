"""From a `Recipe` to a `Workload`: the operators of the real step function, traced and not compiled."""

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from multipod.errors import PlanError
from multipod.layout.compiled import CompiledFacts, absent_mesh, facts_of_lowered
from multipod.layout.layout import DATA_AXES, Layout
from multipod.plan import jaxpr
from multipod.plan.machine import Machine
from multipod.plan.search import mesh_of
from multipod.plan.splits import Splits
from multipod.plan.work import Work
from multipod.plan.workload import Build, Evaluation, Split, Workload
from multipod.recipe.recipe import Recipe
from multipod.step.program import Program

SMALL = 0.5
"""Sums of fewer bytes than this share of the gradients are no gradients: statistics and values."""


def workload_of(recipe: Recipe, splits: Splits | None = None) -> Workload:
    """What a step of `recipe` asks for. Traces the step once for each number of examples that is asked about.

    The step is traced on a mesh of one device with the share of the batch that a device would have, so its operators
    are the real ones: model, objective, optimizer. With `splits`, XLA is asked what splitting the model makes of them,
    and what memory the step needs; without, there are none, and memory is a guess from the operators.

    Raises:
      PlanError: the recipe's step cannot be traced.
    """
    program = _program(recipe, 1)
    params = jax.tree.leaves(program.shapes.params)
    parameters = sum(leaf.size for leaf in params)
    traced = _traced(recipe, 1, 1)
    small = [s for s in traced.sent if 0 < s.nbytes < SMALL * 4 * parameters and s.pattern != "neighbour"]
    example = recipe.data.train().read(np.arange(1))
    return Workload(
        name=recipe.name,
        parameters=parameters,
        build=_build(recipe, splits),
        splits=splits.able if splits else (),
        optimizer=getattr(recipe.optimizer, "name", "adam").replace("lars_scaled", "lars"),
        wire_bytes=max((leaf.dtype.itemsize for leaf in params), default=4),
        norm_group_messages=sum(s.count for s in small),
        norm_bytes=sum(s.nbytes * s.count for s in small) / max(1, sum(s.count for s in small)),
        state_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.shapes.statistics)),
        batch_bytes=sum(array.nbytes for array in example.values()),
        evaluation=Evaluation(len(recipe.data.test())),
        source=f"the step of the recipe {recipe.name}, traced",
    )


def _build(recipe: Recipe, splits: Splits | None) -> Build:
    def build(examples: float, split: Split, lanes: int) -> Work:
        ops = _traced(recipe, max(1, math.ceil(examples)), lanes).inside
        if splits is not None:
            return splits.work(ops, examples, split)
        if split.devices > 1:
            raise PlanError(f"recipe {recipe.name}: a split of {split} has not been compiled. Plan with --splits.")
        return Work(ops, (), sum(op.nbytes for op in ops) / 6)

    return build


@lru_cache(maxsize=256)
def _traced(recipe: Recipe, rows: int, lanes: int) -> jaxpr.Traced:
    program = _program(recipe, rows)
    try:
        return jaxpr.trace(jax.make_jaxpr(program.update)(program.shapes, *_arguments(program)), lanes)
    except (TypeError, ValueError) as error:
        raise PlanError(f"recipe {recipe.name}: its step cannot be traced: {str(error).splitlines()[0]}") from error


def _program(recipe: Recipe, rows: int) -> Program:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), DATA_AXES, axis_types=(AxisType.Auto,) * 2)
    return Program(replace(recipe, batch=rows, layout=Layout((1, 1))), mesh)


def _arguments(program: Program) -> tuple[Any, Any]:
    example = program.recipe.data.train().read(np.arange(1))
    rows = program.recipe.batch
    batch = {name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype) for name, array in example.items()}
    return batch, jax.ShapeDtypeStruct((1,), jnp.int32)


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
    rows, columns = mesh_of(machine)
    name = libtpu_name(machine)
    mesh = absent_mesh(name, dict(zip(DATA_AXES, (rows, columns), strict=True)))
    layout = replace(recipe.layout, mesh=(rows, columns), failed=())
    return facts_of_lowered(Program(replace(recipe, layout=layout), mesh).lowered, name, cache)
