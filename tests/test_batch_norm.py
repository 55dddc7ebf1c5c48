"""Batch norm over tiles, against Flax's own on the examples of one tile."""

import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from processes import clean_environment

from multipod.errors import LayoutError
from multipod.execute import sums
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_spec, make_mesh
from multipod.models.resnet import SmallResNet
from multipod.nn.images.batch_norm import TileBatchNorm, example_tile, spanned_examples, tile_groups
from multipod.nn.padding import padding_mask
from multipod.step.specs import over_data

pytestmark = pytest.mark.jax_version

SIZES = (2, 4)
TILES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 4), "all"]
X = np.random.default_rng(0).normal(3, 2, (16, 3, 3, 5)).astype(np.float32)  # two examples on each of 8 devices
X[:4] += 5  # so that tiles differ


def groups(tile):
    """The examples of each tile."""
    numbers = tile_groups(SIZES, SIZES if tile == "all" else tile)
    return [np.concatenate([[2 * device, 2 * device + 1] for device in group]) for group in numbers]


def on_mesh(tile, weight, x=X, sizes=SIZES, mask=None, **options):
    """Outputs, moving statistics and the gradient of sum(weight * y^2), all on a mesh; padding where not `mask`."""
    graph, params, stats = nnx.split(TileBatchNorm(5, tile=tile, rngs=nnx.Rngs(0), **options), nnx.Param, nnx.BatchStat)

    def local(x, weight, mask=None):
        def loss(x):
            norm = nnx.merge(graph, params, stats, copy=True)
            with padding_mask(mask):
                y = norm(x)
            return (weight * y**2).sum(), (y, norm.mean[...], norm.var[...])

        gradient, (y, mean, var) = jax.grad(loss, has_aux=True)(x)
        return y, gradient, mean, var

    mesh = make_mesh(Layout(sizes))
    split, whole = batch_spec(mesh), PartitionSpec()
    inputs = (x, weight) if mask is None else (x, weight, mask)
    function = over_data(local, mesh, (split,) * len(inputs), (split, split, whole, whole))
    return jax.jit(function)(*inputs)


def flax(x, weight):
    """What Flax's batch norm makes of it on one device."""
    norm = nnx.BatchNorm(5, momentum=0.9, epsilon=1e-5, use_running_average=False, rngs=nnx.Rngs(0))

    @partial(nnx.grad, argnums=1, has_aux=True)
    def gradient(norm, x):
        y = norm(x)
        return (weight * y**2).sum(), y

    g, y = gradient(norm, jnp.asarray(x))
    return np.asarray(y), np.asarray(g)


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_each_tile_is_normalised_and_differentiated_like_flax_on_its_examples(tile):
    weight = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    y, gradient, _, _ = on_mesh(tile, weight)
    for examples in groups(tile):
        expected_y, expected_gradient = flax(X[examples], weight[examples])
        np.testing.assert_allclose(y[examples], expected_y, atol=2e-5)
        np.testing.assert_allclose(gradient[examples], expected_gradient, atol=2e-4)


@pytest.mark.parametrize("tile", [(2, 2), "all"], ids=str)
def test_large_tiles_are_averaged_by_xla_to_the_same(tile, monkeypatch):
    weight = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    gathered = on_mesh(tile, weight)
    monkeypatch.setattr(sums, "IN_ORDER", 1)
    for one, other in zip(on_mesh(tile, weight), gathered, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_moving_variance_is_the_pooled_one_whatever_the_tile(tile):
    _, _, mean, var = on_mesh(tile, np.ones_like(X))
    tiles = [X[examples].astype(np.float64).reshape(-1, 5) for examples in groups(tile)]
    means, variances = np.stack([t.mean(0) for t in tiles]), np.stack([t.var(0) for t in tiles])
    pooled = (variances + means**2).mean(0) - means.mean(0) ** 2
    np.testing.assert_allclose(pooled, X.reshape(-1, 5).astype(np.float64).var(0), rtol=1e-9)
    np.testing.assert_allclose(mean, 0.1 * means.mean(0), rtol=1e-5)
    np.testing.assert_allclose(var, 0.9 + 0.1 * pooled, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(1, 1), (1, 2), "all"], ids=str)
def test_padding_counts_nowhere_and_each_example_once(tile):
    sizes, rows = (1, 6), 18  # the last of six devices, and with it a tile of one, holds nothing but padding
    mask = np.arange(rows) < len(X) - 1
    x, weight = np.full((rows, *X.shape[1:]), np.nan, np.float32), np.zeros((rows, *X.shape[1:]), np.float32)
    x[mask], weight[mask] = X[:-1], np.random.default_rng(1).normal(size=X[:-1].shape)
    y, gradient, mean, var = on_mesh(tile, weight, x, sizes, mask)
    for group in tile_groups(sizes, sizes if tile == "all" else tile):
        examples = np.concatenate([np.arange(3 * device, 3 * device + 3) for device in group])
        examples = examples[mask[examples]]
        if len(examples):
            expected_y, expected_gradient = flax(x[examples], weight[examples])
            np.testing.assert_allclose(y[examples], expected_y, atol=2e-5)
            np.testing.assert_allclose(gradient[examples], expected_gradient, atol=2e-4)
    everything = X[:-1].astype(np.float64).reshape(-1, 5)
    np.testing.assert_allclose(mean, 0.1 * everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(var, 0.9 + 0.1 * everything.var(0), rtol=1e-5)


def test_a_layer_that_hides_the_examples_from_batch_norm_is_refused():
    norm = TileBatchNorm(5, rngs=nnx.Rngs(0))
    with (
        padding_mask(jnp.ones(7, bool)),
        pytest.raises(LayoutError, match=r"x \(16, 3, 3, 5\): the first dim is not that of"),
    ):
        norm(jnp.asarray(X))


@pytest.mark.slow
def test_a_constant_channel_has_no_negative_variance():
    norm = TileBatchNorm(1, rngs=nnx.Rngs(0))
    y = norm(jnp.full((7, 1), 1234.567))
    assert np.isfinite(y).all()
    assert float(norm.var[0]) >= 0.9 - 1e-6


def test_evaluation_uses_the_moving_statistics():
    norm = TileBatchNorm(5, rngs=nnx.Rngs(0))
    norm.eval()
    np.testing.assert_allclose(norm(jnp.asarray(X)), X / np.sqrt(1 + 1e-5), rtol=1e-5)


@pytest.mark.parametrize("tile", [(2, 3), (3, 1), (4, 4), (0, 1)], ids=str)
def test_a_tile_that_does_not_divide_the_mesh_is_refused(tile):
    with pytest.raises(LayoutError, match=f"batch-norm tile {tile[0]}x{tile[1]} does not divide mesh 2x4"):
        tile_groups(SIZES, tile)


def test_half_precision_comes_out_as_it_went_in():
    y = TileBatchNorm(5, rngs=nnx.Rngs(0))(jnp.asarray(X, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16


def moments_of_tiles(tile):
    """[tiles, channels]: mean and variance of each tile, float64."""
    tiles = [X[examples].astype(np.float64).reshape(-1, 5) for examples in groups(tile)]
    return np.stack([t.mean(0) for t in tiles]), np.stack([t.var(0) for t in tiles])


def test_averaged_moments_lose_the_variance_between_tiles():
    _, _, mean, var = on_mesh((1, 2), np.ones_like(X), moving="averaged")
    means, variances = moments_of_tiles((1, 2))
    np.testing.assert_allclose(mean, 0.1 * means.mean(0), rtol=1e-5)
    np.testing.assert_allclose(var, 0.9 + 0.1 * variances.mean(0), rtol=1e-5)


def test_kept_moments_are_pooled_in_the_evaluation():
    _, _, mean, var = on_mesh((1, 2), np.ones_like(X), moving="kept", tiles=4)
    means, variances = moments_of_tiles((1, 2))
    np.testing.assert_allclose(mean, 0.1 * means, rtol=1e-5)
    np.testing.assert_allclose(var, 0.9 + 0.1 * variances, rtol=1e-5)
    norm = TileBatchNorm(5, moving="kept", tiles=4, rngs=nnx.Rngs(0))
    norm.mean[...], norm.var[...] = mean, var
    norm.eval()
    every = 0.1 * means
    pooled = (0.9 + 0.1 * variances + every**2).mean(0) - every.mean(0) ** 2
    np.testing.assert_allclose(norm(jnp.asarray(X)), (X - every.mean(0)) / np.sqrt(pooled + 1e-5), atol=1e-5)


def test_moments_are_kept_for_the_tiles_that_there_are():
    with pytest.raises(LayoutError, match=r"keeps the moments of 3 tiles, and the mesh holds 4\. Give tiles=4"):
        on_mesh((1, 2), np.ones_like(X), moving="kept", tiles=3)


PUBLISHED = [(2, 2), (2, 4), (4, 4), (4, 8)]


@pytest.mark.parametrize("tile", PUBLISHED, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_tiles_are_rectangles_of_neighbours_that_fill_the_mesh(tile, parts):
    sizes = 32, 64
    tiles = tile_groups(sizes, tile, parts)
    assert sorted(np.ravel(tiles)) == list(range(32 * 64))
    for group in tiles:
        places = np.stack(np.divmod(group, sizes[1]))
        assert tuple(np.ptp(places, axis=1) + 1) == (tile[0], tile[1] * parts)

        assert all(np.abs(a - b).sum() == 1 for a, b in pairwise(places.T))


def test_a_tile_of_two_rows_is_a_ring():
    assert tile_groups((2, 4), (2, 4)) == [[0, 1, 2, 3, 7, 6, 5, 4]]


def test_a_tile_of_split_images_must_fit():
    with pytest.raises(LayoutError, match="tile 2x4 of images in 2 parts, 2x8 devices, does not divide mesh 2x4"):
        tile_groups(SIZES, (2, 4), parts=2)


@pytest.mark.slow
def test_the_published_tiles_on_64_devices():
    command = [sys.executable, Path(__file__).with_name("batch_norm_tiles.py")]
    told = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == ["2x2", "2x4", "4x4", "4x8"]


@pytest.mark.parametrize(("moving", "kept"), [("pooled", (4,)), ("averaged", (4,)), ("kept", (2, 4))])
def test_models_take_each_kind_of_moving_statistics(moving, kept):
    spec = SmallResNet(width=4, blocks=(1,), batch_norm_tile=(1, 2), batch_norm_moving=moving, batch_norm_tiles=2)
    batch = {"image": np.random.default_rng(0).normal(size=(8, 4, 4, 1)).astype(np.float32)}
    params, statistics = spec.init(jax.random.key(0))

    def local(params, statistics, batch):
        return spec.apply(params, statistics, batch, train=True, key=jax.random.key(0))[1]

    mesh = make_mesh(Layout((1, 4)))
    function = over_data(local, mesh, (PartitionSpec(), PartitionSpec(), batch_spec(mesh)), PartitionSpec())
    moved = jax.jit(function)(params, statistics, batch)
    assert {leaf.shape for leaf in jax.tree.leaves(moved)} == {kept}
    outputs, _ = spec.apply(params, jax.device_get(moved), batch, train=False, key=jax.random.key(0))
    assert np.isfinite(outputs).all()


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 64])
def test_so_many_examples_are_normalised_together_on_every_mesh(count):
    weight = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
    groups = [np.arange(first, min(first + count, len(X))) for first in range(0, len(X), count)]
    expected = [np.concatenate(parts) for parts in zip(*(flax(X[own], weight[own]) for own in groups), strict=True)]
    for sizes in ((1, 1), (1, 2), (2, 4)):
        y, gradient, mean, var = on_mesh(count, weight, sizes=sizes)
        np.testing.assert_allclose(y, expected[0], atol=2e-5)
        np.testing.assert_allclose(gradient, expected[1], atol=2e-4)
        np.testing.assert_allclose(mean, 0.1 * X.mean((0, 1, 2), np.float64), rtol=1e-5)
        np.testing.assert_allclose(var, 0.9 + 0.1 * X.reshape(-1, 5).astype(np.float64).var(0), rtol=1e-5)


def test_averaged_moments_of_examples_do_not_depend_on_the_mesh():
    x = X.reshape(4, -1, 5).astype(np.float64)
    for sizes in ((1, 1), (1, 2), (2, 4)):
        _, _, mean, var = on_mesh(4, np.ones_like(X), sizes=sizes, moving="averaged")
        np.testing.assert_allclose(mean, 0.1 * x.mean(1).mean(0), rtol=1e-5)
        np.testing.assert_allclose(var, 0.9 + 0.1 * x.var(1).mean(0), rtol=1e-5)


def test_padding_counts_in_no_group_of_a_device():
    mask = np.arange(len(X)) < 10
    x = np.where(mask[:, None, None, None], X, np.nan).astype(np.float32)
    y, *_ = on_mesh(4, np.zeros_like(X), x, (1, 2), mask)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
        np.testing.assert_allclose(y[rows], flax(X[rows], X[rows])[0], atol=2e-5)


@pytest.mark.parametrize(
    ("count", "examples", "sizes", "tile", "spanned"),
    [
        (64, 8, (32, 32), (1, 8), 64),
        (64, 1, (8, 32), (2, 32), 64),
        (64, 64, (32, 32), (1, 1), 64),
        (64, 256, (4, 4), 64, 64),
        (64, 4, (1, 8), "all", 32),
        (64, 100, (1, 1), (1, 1), 100),  # 64 do not divide 100
        (64, 9, (32, 32), (1, 8), 72),  # chips have failed, and the others hold one more
        (64, 8, (32, 12), (1, 12), 96),
    ],
)
def test_examples_are_those_of_neighbours(count, examples, sizes, tile, spanned):
    assert example_tile(count, examples, sizes) == tile
    assert spanned_examples(count, examples * sizes[0] * sizes[1], sizes) == spanned


def test_no_examples_and_kept_moments_of_examples_are_refused():
    with pytest.raises(LayoutError, match="over 0 examples"):
        TileBatchNorm(5, tile=0, rngs=nnx.Rngs(0))
    with pytest.raises(LayoutError, match="over 64 examples cannot keep"):
        TileBatchNorm(5, tile=64, moving="kept", rngs=nnx.Rngs(0))
