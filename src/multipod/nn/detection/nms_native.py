"""The C++ kernel `nms.cc` as a JAX operation on CPU: non-maximum suppression of sorted boxes, on one core."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from multipod.nn import ffi

TARGET = "multipod_nms"


@functools.cache
def register() -> None:
    """Compiles the kernel if need be and tells JAX of it; later calls do nothing.

    Raises:
      NativeError: it cannot be compiled here.
    """
    ffi.register("multipod-nms", Path(__file__).with_name("nms.cc"), (TARGET,))


def suppress_sorted(
    boxes: jax.Array, valid: jax.Array, groups: jax.Array, threshold: float, count: int, inclusive: bool
) -> jax.Array:
    """Which of boxes [n, 4], float32, sorted by falling score, stay: int32 [count], -1 behind the last.

    The other arguments are those of `multipod.nn.detection.nms.nms`, in the order of the boxes.
    """
    found = jax.ShapeDtypeStruct((count,), jnp.int32)
    call = jax.ffi.ffi_call(TARGET, found, vmap_method="broadcast_all")
    return call(boxes, valid, groups.astype(jnp.int32), threshold=np.float32(threshold), inclusive=inclusive)
