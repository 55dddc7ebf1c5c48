"""What a layout costs each device, as plain data: tensor by tensor, in sum, and as XLA compiles it."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from multipod.errors import LayoutError
from multipod.layout.compiled import CompiledFacts, absent_devices, absent_mesh, facts_of, facts_of_lowered
from multipod.layout.mesh import batch_spec, data_devices, mesh_on, names_of
from multipod.nn.text.fused_attention import AttentionChoice, counted_choices
from multipod.pytrees import Batch, Params, Statistics
from multipod.recipe.recipe import Recipe
from multipod.step.loss import device_loss
from multipod.step.program import Program, program_of
from multipod.step.specs import WHOLE, data_specs, flat_specs, over_data
from multipod.step.state import device_bytes
from multipod.step.sync.reduction import buckets
from multipod.step.unstaged import UnstagedProgram


@dataclass(frozen=True)
class TensorPart:
    """A parameter on a device, or several that differ in their layer alone.

    Attributes:
      name: its path; a number that differs is `*`.
      count: how many they are.
      shape: of one, whole.
      dims: the names of its dims, `-` for one without.
      kept_shape: in which it is kept: another one where it is flattened and padded (`layout.shares`).
      split: axes that split each dim of that, `-` for none.
      update_shape: its shape during the weight update.
      update: axes that split each dim of that.
      device_bytes: of all of them, as they are kept.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    kept_shape: tuple[int, ...]
    split: tuple[str, ...]
    update_shape: tuple[int, ...]
    update: tuple[str, ...]
    device_bytes: int


def parts(program: UnstagedProgram) -> list[TensorPart]:
    """The parameters of a program, those of equal layers in one line."""
    found: dict[tuple[Any, ...], TensorPart] = {}
    leaves = jax.tree.leaves(program.shapes.params)
    stored, updated = (jax.tree.leaves(shares) for shares in (program.sync.stored_shares, program.sync.shares))
    rows = zip(program.placement.tensors.items(), leaves, stored, updated, strict=True)
    for (name, tensor), leaf, kept, update in rows:
        dims = tuple(dim or "-" for dim in tensor.dims or (None,) * len(tensor.shape))
        alike = (
            re.sub(r"(?<![^/.])\d+(?![^/.])", "*", name),
            tensor.shape,
            dims,
            kept.kept,
            _axes(kept.spec, tensor.shape),
            update.kept,
            _axes(update.spec, tensor.shape),
        )
        before = found.get(alike)
        one = TensorPart(name, 1, *alike[1:], device_bytes(leaf))
        found[alike] = (
            one
            if before is None
            else replace(
                one, name=alike[0], count=before.count + 1, device_bytes=before.device_bytes + one.device_bytes
            )
        )
    return list(found.values())


def totals(program: UnstagedProgram) -> dict[str, int]:
    """Bytes on each device: what is kept, and gradients, which come whole over the data axes before they are summed."""
    shapes = program.shapes
    base = flat_specs(program.placement.base)
    sizes = program.mesh.shape
    leaves = jax.tree.leaves(program.placement.state.params)
    gradients = sum(
        leaf.size * leaf.dtype.itemsize // math.prod(sizes[axis] for axis in names_of(spec))
        for leaf, spec in zip(leaves, base, strict=True)
    )
    return {
        "weights": device_bytes(shapes.params),
        "gradients": gradients,
        "optimizer": device_bytes(shapes.optimizer),
        "statistics": device_bytes(shapes.statistics),
    }


@dataclass(frozen=True)
class Sum:
    """The messages in which gradients are summed over the data axes.

    Attributes:
      name: who adds them (`Sync.gradient_sum`).
      devices: that they are summed over.
      messages: how many.
      nbytes: of all of them together, on one device.
    """

    name: str
    devices: int
    messages: int
    nbytes: int


def gradient_sum(program: UnstagedProgram) -> Sum:
    """How a program sums its gradients, whatever the size of its mesh."""
    layout, sizes = program.recipe.layout, program.mesh.shape
    width = {"": None, "float32": 4, "bfloat16": 2}[layout.sync.sum_dtype]
    base = flat_specs(program.placement.base)
    sent = [
        leaf.size * (width or leaf.dtype.itemsize) // math.prod(sizes[axis] for axis in names_of(spec))
        for leaf, spec in zip(jax.tree.leaves(program.placement.state.params), base, strict=True)
    ]
    return Sum(
        layout.sync.gradient_sum, data_devices(program.mesh), len(buckets(sent, layout.sync.bucket_bytes)), sum(sent)
    )


def attention_choices(program: UnstagedProgram) -> Counter[AttentionChoice]:
    """Who computes the attentions of a forward pass in training, and how many; empty for models without any."""
    if not hasattr(program.recipe.model, "attention"):
        return Counter()
    placement, mesh, state = program.placement, program.mesh, program.placement.state

    def loss(params: Params, statistics: Statistics, key: jax.Array, batch: Batch) -> jax.Array:
        return device_loss(placement, statistics, key, batch)(params)[0]

    specs = data_specs(mesh, placement.base), WHOLE, WHOLE, batch_spec(mesh)
    batch = placement.batches.shapes(placement.batches.examples[-1])
    with counted_choices() as choices:
        jax.eval_shape(over_data(loss, mesh, specs, WHOLE), state.params, state.statistics, state.key, batch)
    return choices


def compiled_here(program: Program) -> CompiledFacts:
    """What XLA knows of the update, compiled for the devices of its mesh.

    Raises:
      LayoutError: its mesh has no devices here.
    """
    if isinstance(program.mesh, AbstractMesh):
        raise LayoutError(
            f"{describe_axes(program)} has {program.mesh.size:,} devices, and there are {jax.device_count()} "
            f"({jax.default_backend()}) to compile for. Set JAX_PLATFORMS=cpu to compile for as many virtual CPU "
            "devices, or name a TPU, as --compile-for v3:32x32."
        )
    return facts_of(program.lowered.compile())


def describe_axes(program: Program) -> str:
    """The axes of a program's mesh and their sizes, as `y=2 x x=4`."""
    return " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items())


def compiled_for(recipe: Recipe, topology_name: str, cache: Path | None = None) -> tuple[Program, CompiledFacts]:
    """The update compiled for a TPU that is not here, as `v3:128x32`; the layout's mesh follows its devices if empty.

    Raises:
      LayoutError: no `libtpu`, no such topology, or a layout that does not fit it.
    """
    layout = recipe.layout
    count = len(absent_devices(topology_name))
    if not layout.mesh:
        layout = replace(layout, mesh=layout.mesh_shape(count))
    rows, columns = (n * side for n, side in zip(layout.mesh, layout.replica_grid, strict=True))
    grid: np.ndarray = absent_mesh(topology_name, {"y": rows, "x": columns}).devices
    program = program_of(replace(recipe, layout=layout), mesh_on(layout, grid))
    return program, facts_of_lowered(program.lowered, topology_name, cache)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes.

    Attributes:
      kind: as `all-reduce`.
      axes: what they run over; empty if their groups are no axes of the mesh.
      times: how often one runs in an update.
      nbytes: of all of them.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    nbytes: int


def traffic(facts: CompiledFacts, program: Program) -> Iterator[Traffic]:
    """The collectives of a compiled update, by kind and axes, the most bytes first."""
    sums: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    sizes = dict(program.mesh.shape)
    for one in facts.collectives:
        key = one.kind, one.axes(sizes) or ()
        before = sums.get(key, Traffic(*key, 0, 0))
        sums[key] = replace(before, times=before.times + one.times, nbytes=before.nbytes + one.nbytes * one.times)
    yield from sorted(sums.values(), key=lambda row: -row.nbytes)


def _axes(spec: Any, shape: tuple[int, ...]) -> tuple[str, ...]:
    names = [(names,) if isinstance(names, str) else names or () for names in (*spec, *[None] * len(shape))]
    return tuple("+".join(names[k]) or "-" for k in range(len(shape)))
