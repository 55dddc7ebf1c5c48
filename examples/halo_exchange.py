"""A convolution of an image whose rows lie on eight devices: python examples/halo_exchange.py"""

from functools import partial

from multipod import runtime

runtime.prepare(cpu_devices=8)

import jax  # noqa: E402  (what reads the environment comes after it is settled)
import numpy as np  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from multipod.nn.halo import halo  # noqa: E402

rng = np.random.default_rng(0)
image, kernel = rng.normal(size=(1, 64, 64, 3)), rng.normal(size=(5, 5, 3, 8))
convolve = partial(jax.lax.conv_general_dilated, window_strides=(1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"))


def of_part(rows):
    """The rows of a device: two of each neighbour around them, none made up inside the image."""
    return convolve(halo(rows, "height", 2, dim=1), kernel, padding=((0, 0), (2, 2)))


mesh, split = jax.make_mesh((8,), ("height",), (AxisType.Auto,)), PartitionSpec(None, "height")
found = jax.jit(jax.shard_map(of_part, mesh=mesh, in_specs=split, out_specs=split))(image)
whole = convolve(image, kernel, padding=((2, 2), (2, 2)))
print(f"largest difference from the whole image: {np.abs(found - whole).max() / np.abs(whole).max():.1e}")
