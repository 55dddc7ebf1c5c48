"""Sums of trees against NumPy, for any shapes, dtypes and meshes."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from multipod.execute.bucketing import all_gather_tree, all_reduce_tree, reduce_scatter_tree
from multipod.execute.sums import SUMS
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout, default_shape, parse_shape
from multipod.layout.mesh import batch_spec, is_split, make_mesh
from multipod.layout.shares import update_spec
from multipod.step.specs import over_data

pytestmark = pytest.mark.jax_version

SHAPES = ((), (5,), (8,), (3, 3, 4, 16), (10, 4), (16, 3), (1,))


def tree_of(devices):
    """A tree of integers of two dtypes, different on every device: [devices, ...]."""
    rng = np.random.default_rng(0)
    floats = {str(shape): rng.integers(-9, 9, (devices, *shape)).astype(np.float32) for shape in SHAPES}
    return {"floats": floats, "ints": [rng.integers(-9, 9, (devices, 8)).astype(np.int32)], "none": None}


@pytest.mark.parametrize("mesh_shape", [(2, 4), (1, 7), (4, 1), (1, 1), (2, 2)])
@pytest.mark.parametrize("name", SUMS)
def test_scattered_or_whole_the_sum_is_numpys(name, mesh_shape):
    mesh = make_mesh(Layout(mesh_shape))
    devices, axes = mesh.size, dict(mesh.shape)
    # So that some of these tensors are packed and some are not.
    tree, total = tree_of(devices), replace(SUMS[name](DATA_AXES), alone_bytes=100)
    one = jax.tree.map(lambda leaf: leaf[0], tree)
    specs = jax.tree.map(lambda leaf: update_spec(leaf.shape, axes), one)

    def run(function, out_specs):
        local = over_data(
            lambda t: function(jax.tree.map(lambda leaf: leaf[0], t)), mesh, (batch_spec(mesh),), out_specs
        )
        return jax.jit(local)(tree)

    expected = jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), tree)
    whole = run(lambda t: all_reduce_tree(t, total, devices), PartitionSpec())
    split = run(lambda t: reduce_scatter_tree(t, specs, axes, total), specs)
    gather = over_data(lambda t: all_gather_tree(t, specs, axes, total), mesh, (specs,), PartitionSpec())
    for result in (whole, split, jax.jit(gather)(split)):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), expected)


def test_ordered_sums_are_the_direct_exchange_bit_for_bit():
    mesh = make_mesh(Layout((2, 4)))
    vectors = np.random.default_rng(0).normal(size=(8, 8 * 1000)).astype(np.float32) * np.logspace(-3, 3, 8)[:, None]
    vectors = vectors.astype(np.float32)

    def run(name):
        total = SUMS[name](DATA_AXES)
        both = lambda x: (total.all_reduce(x[0]), total.all_gather(total.reduce_scatter(x[0])))  # noqa: E731
        return jax.device_get(jax.jit(over_data(both, mesh, (batch_spec(mesh),), PartitionSpec()))(vectors))

    in_order = vectors[0]
    for vector in vectors[1:]:
        in_order = in_order + vector
    for result in (*run("direct"), *run("ordered")):
        np.testing.assert_array_equal(result, in_order)


@given(
    shape=st.lists(st.integers(1, 48), max_size=4),
    sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 8, 32]), st.sampled_from([1, 2, 4, 7, 128])),
)
@settings(max_examples=300, deadline=None)
def test_a_split_divides_and_uses_every_axis_once_or_is_no_split(shape, sizes):
    size_of = dict(zip(DATA_AXES, sizes, strict=True))
    spec = update_spec(shape, size_of)
    used = [axis for names in spec for axis in (names or ())]
    if not is_split(spec):
        assert used == []
        return
    assert sorted(used) == sorted(DATA_AXES)
    for n, names in zip(shape, spec, strict=True):
        assert n % int(np.prod([size_of[axis] for axis in names or ()], dtype=int)) == 0


@given(st.integers(1, 5000))
@settings(deadline=None)
def test_the_default_mesh_uses_every_device_and_is_wider_than_high(devices):
    rows, columns = default_shape(devices)
    assert rows * columns == devices
    assert rows <= columns


@pytest.mark.parametrize("text", ["", "2", "2x", "0x4", "-1x2", "2x4x2", "axb", "2 x 4"])
def test_a_malformed_mesh_is_refused(text):
    with pytest.raises(ValueError, match="is not of the form ROWSxCOLUMNS"):
        parse_shape(text)


def test_a_mesh_is_read_as_rows_by_columns():
    assert parse_shape("2x4") == (2, 4)
