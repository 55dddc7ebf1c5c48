"""Micro-batches: the rows and random keys of a batch, as a pipeline takes them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from multipod.layout.mesh import data_axes, data_devices
from multipod.pytrees import Batch, Specs
from multipod.step.state import State, update_key

STAGE_AXIS = "stage"
"""The axis of the mesh whose devices hold the stages."""


def cut_rows(batch: Batch, mesh: Mesh | AbstractMesh, count: int) -> Batch:
    """[count, rows of a micro-batch over all data devices, ...]: each device's rows in `count` parts."""
    axes = data_axes(mesh)

    def local(batch: Batch) -> Batch:
        return jax.tree.map(lambda rows: rows.reshape(count, -1, *rows.shape[1:]), batch)

    return over_stages(local, mesh, (PartitionSpec(axes),), PartitionSpec(None, axes))(batch)


def micro_keys(state: State, mesh: Mesh | AbstractMesh, count: int) -> jax.Array:
    """Key data of the update for each micro-batch on each data device, [count, devices * 2]."""
    return jnp.tile(jax.random.key_data(update_key(state)), (count, data_devices(mesh)))


def over_stages(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: tuple[Specs, ...], out_specs: Specs
) -> Callable[..., Any]:
    """`function` in `jax.shard_map`, manual over the stages and the data axes, automatic over all others."""
    names = {*data_axes(mesh), STAGE_AXIS}
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)
