"""Batch norm over the published tiles on 64 devices, against NumPy; prints each tile that is right."""

from multipod import runtime

runtime.prepare(64)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from multipod.layout.layout import Layout  # noqa: E402
from multipod.layout.mesh import batch_spec, make_mesh  # noqa: E402
from multipod.nn.images.batch_norm import TileBatchNorm  # noqa: E402
from multipod.step.specs import over_data  # noqa: E402

TILES = [(2, 2), (2, 4), (4, 4), (4, 8)]
SIZES = 4, 16
X = np.random.default_rng(0).normal(3, 2, (64, 3)).astype(np.float32)  # one example on each device


def local(x):
    """What each tile makes of its examples."""
    return [TileBatchNorm(3, tile=tile, rngs=nnx.Rngs(0))(x) for tile in TILES]


MESH = make_mesh(Layout(SIZES))
split = batch_spec(MESH)
found = jax.jit(over_data(local, MESH, (split,), [split] * len(TILES)))(X)
for (height, width), y in zip(TILES, found, strict=True):
    tiled = X.astype(float).reshape(4 // height, height, 16 // width, width, 3)
    mean, var = tiled.mean((1, 3), keepdims=True), tiled.var((1, 3), keepdims=True)
    expected = ((tiled - mean) / np.sqrt(var + 1e-5)).reshape(64, 3)
    np.testing.assert_allclose(y, expected, atol=1e-4)
    print(f"{height}x{width}")
