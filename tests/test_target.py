"""What is chosen by platform is chosen for the devices of the program, whatever machine traces it."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from multipod.execute.adasum.shares import BatchedBlocks, LoopedBlocks, choose_arithmetic
from multipod.execute.sums import SUMS, build_scheduled_sum
from multipod.execute.target import target_platform
from multipod.topology.topology import Topology

AXES = ("y", "x")
DEVICES = {
    "tpu": AbstractDevice(device_kind="TPU v3", num_cores=1, platform="tpu"),
    "cpu": AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu"),
    "none": None,
}


def traced(function, device: str, elements: int = 64) -> str:
    """The program of `function` of one vector a device, on 2 x 4 devices that are not here."""
    mesh = AbstractMesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2, abstract_device=DEVICES[device])
    spec = PartitionSpec(AXES)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((8 * elements,), jnp.float32)))


@pytest.mark.jax_version
@pytest.mark.parametrize("device", DEVICES)
def test_the_platform_is_that_of_the_mesh_around(device):
    seen = []
    traced(lambda vector: seen.append((target_platform(), type(choose_arithmetic()))) or vector, device)
    expected = ("tpu", BatchedBlocks) if device == "tpu" else ("cpu", LoopedBlocks)
    assert seen == [expected]
    assert target_platform() == jax.default_backend()


@pytest.mark.parametrize(("device", "sums", "exchanges"), [("tpu", 0, 1), ("cpu", 1, 0), ("none", 1, 0)])
def test_the_ordered_sum_is_direct_where_devices_do_not_add_in_order(device, sums, exchanges):
    program = traced(SUMS["ordered"](AXES).all_reduce, device)
    assert (program.count("= psum"), program.count("= all_to_all")) == (sums, exchanges)


def test_messages_are_cut_for_cpu_devices_alone():
    total = build_scheduled_sum("torus-2d", Topology((2, 4)), AXES)
    programs = [traced(total.all_reduce, device, 1 << 18) for device in ("tpu", "cpu")]
    few, many = (sum(map(int, re.findall(r"length=(\d+)", program))) for program in programs)
    assert few == 8  # a scatter and a gather of 1 + 3 steps
    assert many > few
