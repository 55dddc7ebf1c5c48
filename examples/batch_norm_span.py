"""Batch norm over 16 examples on 1, 2 and 8 devices gives the same outputs: python examples/batch_norm_span.py"""

from multipod import runtime

runtime.prepare(cpu_devices=8)

import jax  # noqa: E402  (what reads the environment comes after it is settled)
import numpy as np  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from multipod.nn.images.span_norm import SpanBatchNorm  # noqa: E402

x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
split = PartitionSpec("data")


def normalised(x):
    """A device's rows, behind batch norm in training."""
    return SpanBatchNorm(5, span=16, axis_name="data")(x)


found = []
for devices in (1, 2, 8):
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    found.append(np.asarray(jax.jit(jax.shard_map(normalised, mesh=mesh, in_specs=split, out_specs=split))(x)))
print(f"largest difference: {max(np.abs(one - found[0]).max() for one in found):.1e}")
