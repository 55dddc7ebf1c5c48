"""Programs lowered for GPUs and TPUs that are not here, on meshes of abstract devices; nothing is compiled."""

import re

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from multipod.layout.axes import DATA_AXES

DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu"),
}


def absent_mesh(layout, platform: str) -> AbstractMesh:
    """The mesh of `layout` over devices of a platform that are not here."""
    names = (*DATA_AXES, *layout.replica_sizes)
    sizes = (*layout.mesh, *layout.replica_sizes.values())
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), abstract_device=DEVICES[platform])


def lowered_text(function, platform: str, *shapes) -> str:
    """The program of a function of shapes with shardings, for a platform."""
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text: str) -> set[str]:
    """The targets of all custom calls of a lowered program."""
    return set(re.findall(r"custom_call\s*@([\w$.]+)", text)) | set(re.findall(r'call_target_name = "([^"]+)"', text))
