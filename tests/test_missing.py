"""Meshes of which chips are not there: where the others stand."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from multipod.errors import LayoutError
from multipod.layout.layout import Layout
from multipod.layout.mesh import by_replica, make_mesh
from multipod.layout.missing import grid_with_holes
from multipod.layout.split import ModelSplit


def chips(rows: int, columns: int, without=(), swapped: bool = False) -> list[SimpleNamespace]:
    """Chips of a slice, in an order that says nothing."""
    found = []
    for y in range(rows):
        for x in range(columns):
            if (y, x) not in without:
                coords = (y, x, 0) if swapped else (x, y, 0)
                found.append(
                    SimpleNamespace(coords=coords, core_on_chip=0, slice_index=0, process_index=0, place=(y, x))
                )
    return found[::-1]


def places(grid: np.ndarray) -> list[list]:
    return [[None if device is None else device.place for device in row] for row in grid]


@pytest.mark.parametrize("swapped", [False, True])
def test_chips_stand_where_their_coordinates_say(swapped):
    layout = Layout((2, 4), failed=((0, 1),))
    found = places(grid_with_holes(layout, (2, 4), chips(2, 4, [(0, 1)], swapped)))
    assert found == [[None if (y, x) == (0, 1) else (y, x) for x in range(4)] for y in range(2)]
    with pytest.raises(LayoutError, match=r"7 of 8 devices are there, and by where they sit .*Give --fail 1,2, too"):
        grid_with_holes(layout, (2, 4), chips(2, 4, [(1, 2)], swapped))
    with pytest.raises(LayoutError, match="do not lie in a mesh of 2x4 chips by their coordinates"):
        grid_with_holes(layout, (2, 4), chips(1, 7))


def processes(*counts: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(process_index=p, place=(p, k)) for p, count in enumerate(counts) for k in range(count)]


def test_other_devices_keep_to_the_places_of_their_process():
    layout = Layout((2, 4), failed=((0, 1), (1, 3)))
    one_gone = places(grid_with_holes(layout, (2, 4), processes(3, 4)))
    assert one_gone == [[(0, 0), None, (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2), (1, 3)]]
    assert places(grid_with_holes(layout, (2, 4), processes(3, 3)))[1] == [(1, 0), (1, 1), (1, 2), None]
    with pytest.raises(LayoutError, match=r"process 1 has 3 of its 4 .* --fail names 0 of its places 1,0 to 1,3"):
        grid_with_holes(Layout((2, 4), failed=((0, 1),)), (2, 4), processes(4, 3))
    with pytest.raises(LayoutError, match="does not divide over 3 processes"):
        grid_with_holes(layout, (2, 4), processes(2, 2, 2))


def test_seven_devices_make_the_mesh_of_eight_with_one_failed():
    devices = jax.devices()[:8]
    layout = Layout((2, 4), failed=((0, 1),))
    whole, really = make_mesh(layout, devices), make_mesh(layout, [d for d in devices if d is not devices[1]])
    assert whole == really
    with pytest.raises(LayoutError, match=r"needs 8 devices, and there are 6 .*name each by --fail"):
        make_mesh(layout, devices[:6])
    with pytest.raises(LayoutError, match="needs 8 devices, and there are 7"):
        make_mesh(Layout((2, 4)), devices[:7])


def test_replicas_of_several_chips_lose_all_of_them():
    layout = Layout((2, 2), split=ModelSplit(model=2), failed=((1, 0),))
    rows, columns = (2 * side for side in layout.replica_grid)
    gone = (rows // 2, 0)
    grid = grid_with_holes(layout, (2, 2), chips(rows, columns, [gone]))
    replicas = by_replica(grid, layout.replica_grid)
    assert [any(device is None for device in replica) for replica in replicas] == [False, False, True, False]
    with pytest.raises(LayoutError, match="Give --fail 0,1, too"):
        grid_with_holes(layout, (2, 2), chips(rows, columns, [gone, (0, columns - 1)]))
