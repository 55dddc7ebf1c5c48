"""The C++ kernel `grouped.cc` as JAX operations on CPU. Compiled at first use for this machine (`multipod.nn.ffi`)."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from multipod.errors import NativeError
from multipod.nn import ffi

ROWS, KERNELS = "multipod_rows_with_kernels", "multipod_rows_with_rows"


@functools.cache
def available() -> bool:
    """Whether the kernel can be used here; compiles it at the first call."""
    try:
        register()
    except NativeError:
        return False
    return True


@functools.cache
def register() -> None:
    """Compiles the kernel if need be and tells JAX of it; later calls do nothing.

    Raises:
      NativeError: it cannot be compiled here.
    """
    ffi.register("multipod-experts", Path(__file__).with_name("grouped.cc"), (ROWS, KERNELS))


def rows_with_kernels(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    """Rows [N, A] times kernels whose dim `contracted` meets them, [N, B]; other types than float32 are converted."""
    shape = jax.ShapeDtypeStruct((len(rows), kernels.shape[3 - contracted]), jnp.float32)
    call = jax.ffi.ffi_call(ROWS, shape, vmap_method="sequential")
    made = call(rows.astype(jnp.float32), kernels.astype(jnp.float32), sizes, turned=contracted == 2)
    return made.astype(rows.dtype)


def rows_with_rows(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each expert the product of its rows, transposed, and their gradients: [E, A, B]."""
    shape = jax.ShapeDtypeStruct((len(sizes), rows.shape[1], gradient.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call(KERNELS, shape, vmap_method="sequential")
    return call(rows.astype(jnp.float32), gradient.astype(jnp.float32), sizes).astype(rows.dtype)
