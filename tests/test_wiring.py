"""Wrap links of meshes: known from the places of devices on their machine, and never guessed."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from multipod import runtime
from multipod.collectives.build import build
from multipod.layout import compiled
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh, mesh_on, topology_of
from multipod.layout.split import ModelSplit
from multipod.layout.wiring import PODS, closed_dims, link_figures
from multipod.plan.machine import find
from multipod.topology.chips import CHIPS
from multipod.topology.topology import BYTES_PER_S, LATENCY_S

needs_libtpu = pytest.mark.skipif(not compiled.has_libtpu(), reason="needs the extra tpu")


def slice_of(kind, *shape, cores=1):
    """Devices of a slice as [shape..., cores]; the first dim is the last coordinate, as libtpu's y is for rows."""
    grid = np.empty((*shape, cores), object)
    for *place, core in np.ndindex(*grid.shape):
        coords = (*reversed(place), *[0] * (3 - len(shape)))
        grid[(*place, core)] = SimpleNamespace(device_kind=kind, coords=coords, core_on_chip=core, slice_index=0)
    everyone = list(grid.flat)
    client = SimpleNamespace(devices=lambda: everyone)
    for device in grid.flat:
        device.client = client
    return grid


@pytest.mark.parametrize(
    ("kind", "shape", "closed"),
    [
        ("TPU v3", (32, 32), (True, True)),
        ("TPU v3", (32, 128), (True, False)),  # the multipod: arXiv:2011.03641, figure 1
        ("TPU v3", (16, 32), (False, True)),
        ("TPU v2", (16, 16), (True, True)),
        ("TPU v5 lite", (8, 16), (False, True)),
        ("TPU v4", (4, 4, 8), (True, True, True)),
        ("TPU v4", (2, 4, 4), (False, False, False)),
        ("NVIDIA H100", (8, 8), (False, False)),
    ],
)
def test_closed_where_the_machine_is(kind, shape, closed):
    grid = slice_of(kind, *shape)[..., 0]
    assert closed_dims(grid) == closed
    grid[(0,) * grid.ndim] = None
    assert closed_dims(grid) == closed  # the other lines tell


def test_two_cores_of_a_chip_are_neighbours():
    grid = slice_of("TPU v3", 32, 32, cores=2).reshape(32, 64)
    assert closed_dims(grid) == (True, True)
    assert closed_dims(grid[:, :32]) == (True, False)  # 16 of 32 columns of chips


def test_lines_that_snake_back_are_closed():
    """16 chips of an open slice of 2 x 8 as one line there and back: its ends are neighbours."""
    grid = slice_of("TPU v5 lite", 2, 8)[..., 0]
    assert closed_dims(np.concatenate([grid[0], grid[1, ::-1]])) == (True,)
    assert closed_dims(np.concatenate([grid[0], grid[1]])[None]) == (False, False)


def test_devices_without_places_leave_the_mesh_open():
    layout = Layout(mesh=(2, 4))
    assert topology_of(layout, make_mesh(layout)).wrap == (False, False)
    assert closed_dims(np.array(jax.devices()).reshape(2, 4)) == (False, False)


def test_links_are_as_fast_as_those_of_the_machine():
    """Schedules that are cut by what a link carries, `tree-packing`, are cut for the machine that the planner has."""
    layout = Layout(mesh=(2, 4))
    plain = topology_of(layout, make_mesh(layout))
    assert (plain.latency_s, plain.bytes_per_s) == ((LATENCY_S,) * 2, (BYTES_PER_S,) * 2)
    assert link_figures("NVIDIA H100") == (LATENCY_S, BYTES_PER_S)
    for kind, machine in PODS.items():
        planned = find(machine).topology
        assert link_figures(kind) == (float(planned.latency_s[0]), float(planned.bytes_per_s[0]))
    chip = CHIPS["tpu-v3"]
    assert link_figures("TPU v3") == (chip.link_latency_s, chip.link_bytes_per_s) != (LATENCY_S, BYTES_PER_S)


@needs_libtpu
def test_the_mesh_of_an_absent_pod_is_wired_as_the_planner_has_it():
    runtime.absent_tpus()
    devices = compiled.absent_mesh("v3:32x32", {"y": 32, "x": 64}).devices
    layout = Layout(mesh=(32, 64))
    topology = topology_of(layout, mesh_on(layout, devices))
    assert topology.wrap == (True, True)
    assert build("torus-2d", topology).pieces == 2 * 32 * 64  # both ways round
    chip, split = CHIPS["tpu-v3"], Layout(mesh=(32, 32), split=ModelSplit(model=2))
    assert topology.bytes_per_s == (chip.link_bytes_per_s,) * 2
    along = topology_of(split, mesh_on(split, devices))  # replicas of two devices in a row share the links of both
    assert along.bytes_per_s == (chip.link_bytes_per_s, chip.link_bytes_per_s / 2)
    assert topology_of(Layout(mesh=(16, 64)), mesh_on(Layout(mesh=(16, 64)), devices[:16])).wrap[0] is False
