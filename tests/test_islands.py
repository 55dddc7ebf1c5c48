"""Meshes over slices and hosts: replicas and rows stay on fast links, and what cannot be is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from multipod.errors import LayoutError
from multipod.layout.islands import device_grid, islands_of
from multipod.layout.layout import Layout
from multipod.layout.mesh import by_replica
from multipod.layout.split import ModelSplit, PipelineSplit


def slices(count=2, side=4):
    """TPU slices of side x side chips, which number their chips alike."""
    return [
        SimpleNamespace(
            platform="tpu", device_kind="TPU v5 lite", coords=(x, y, 0), core_on_chip=0, slice_index=one,
            process_index=one * 4 + y // 2 * 2 + x // 2, id=(one * side + y) * side + x,
        )
        for one in range(count) for y in range(side) for x in range(side)
    ]  # fmt: skip


def hosts(count=2, gpus=8):
    """GPUs of hosts, in the order of their processes."""
    return [
        SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", slice_index=0, process_index=n // gpus, id=n)
        for n in range(count * gpus)
    ]


def island(device) -> int:
    return device.slice_index if device.platform == "tpu" else device.process_index


def replicas_of(layout: Layout, shape, devices) -> np.ndarray:
    """[replicas, devices]: the island of each."""
    grid = device_grid(layout, shape, devices)
    assert len({device.id for device in grid.flat}) == grid.size
    return np.vectorize(island)(by_replica(grid, layout.replica_grid))


def model(size: int, **more) -> Layout:
    return Layout(split=ModelSplit(model=size), **more)


@pytest.mark.parametrize("devices", [slices(), hosts(4), hosts(4)[::-1], slices()[::-1]])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(), (4, 8)),
        (Layout(), (2, 16)),
        (Layout(), (8, 4)),
        (model(4), (2, 4)),
        (model(4), (4, 2)),
        (model(4, replica_shape=(1, 4)), (8, 1)),
        (model(8), (4, 1)),
        (model(8), (1, 4)),
    ],
)
def test_replicas_lie_on_one_island(devices, layout, shape):
    places = replicas_of(layout, shape, devices)
    assert (places == places[:, :1]).all()
    each = len(places) // len({island(device) for device in devices})
    assert (np.unique_counts(places[:, 0]).counts == each).all()


@pytest.mark.parametrize(("shape", "devices"), [((4, 8), slices()), ((2, 8), hosts()), ((4, 4), hosts())])
def test_rows_lie_on_one_island(shape, devices):
    places = np.vectorize(island)(device_grid(Layout(), shape, devices))
    assert (places == places[:, :1]).all()


def test_columns_cross_where_rows_do_not_divide():
    places = np.vectorize(island)(device_grid(Layout(), (3, 8), slices(2, 4)[:12] + slices(2, 4)[16:28]))
    np.testing.assert_array_equal(places, np.repeat([[0, 0, 0, 0, 1, 1, 1, 1]], 3, 0))


def test_neighbours_on_a_slice_stay_neighbours():
    grid = device_grid(Layout(), (8, 4), slices())
    places = np.array([[device.coords for device in row] for row in grid])
    assert (np.abs(np.diff(places, axis=1)).sum(-1) == 1).all()
    assert (np.abs(np.diff(places[:4], axis=0)).sum(-1) == 1).all()


def test_stages_are_what_crosses_where_a_replica_is_several_hosts():
    layout = Layout(split=ModelSplit(model=8), pipeline=PipelineSplit(stages=2, micro_batches=4))
    places = replicas_of(layout, (1, 2), hosts(4)).reshape(2, 2, 8)  # replica, stage, model
    np.testing.assert_array_equal(places, np.arange(4).reshape(2, 2, 1) * np.ones(8, int))


def test_gpus_that_are_not_used_alike_need_no_grid():
    places = replicas_of(Layout(), (3, 5), hosts())
    assert places[:, 0].tolist() == [0] * 8 + [1] * 7
    assert replicas_of(model(4), (1, 3), hosts())[:, 0].tolist() == [0, 0, 1]


def test_one_island_is_as_jax_orders_it():
    assert [device.id for device in device_grid(Layout(), (2, 4), hosts(1)[::-1]).flat] == list(range(8))
    assert [len(one) for one in islands_of(slices(3, 2))] == [4, 4, 4]


@pytest.mark.parametrize(
    ("layout", "shape", "devices", "message"),
    [
        (model(3), (1, 5), hosts(), "on 2 hosts of 7 and 8 devices: a replica of 3 would take a part of one"),
        (model(16), (1, 1), hosts(2, 6), "a replica of 16 would take a part of one and a part of another"),
        (Layout(), (3, 8), slices(), "on 2 slices of 8 and 16 devices: they are not used alike. Use all of their"),
        (Layout(), (2, 5), slices(1), "10 TPU v5 lite devices do not lie in a grid of 2x5 on their wires"),
        (Layout(), (1, 16), slices(1), ""),
    ],
)
def test_what_cannot_be_is_refused(layout, shape, devices, message):
    if not message:
        assert device_grid(layout, shape, devices).shape == shape
        return
    with pytest.raises(LayoutError, match=message):
        device_grid(layout, shape, devices)
