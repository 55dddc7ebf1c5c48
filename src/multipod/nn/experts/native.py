"""The C++ kernel `grouped.cc` as JAX operations on CPU. Compiled at first use for this machine (`multipod.nn.ffi`)."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from multipod.errors import NativeError
from multipod.nn import ffi

ROWS, KERNELS = "multipod_rows_with_kernels", "multipod_rows_with_rows"
TYPES = ("float32", "bfloat16")


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
    here = Path(__file__).parent
    targets = [f"{name}_{kind}" for name in (ROWS, KERNELS) for kind in TYPES]
    ffi.register("multipod-experts", here / "grouped.cc", targets, headers=[here / "tiles.h"])


def rows_with_kernels(
    rows: jax.Array, kernels: jax.Array, sizes: jax.Array, contracted: int, *, tiles: bool = True
) -> jax.Array:
    """Rows [N, A] times kernels whose dim `contracted` meets them, [N, B], of the type of the rows.

    float32 and bfloat16, others by way of float32. bfloat16 is summed in float32 and rounded once, on the processor's
    tiles (AMX) where it has them; without `tiles` it takes the way of other processors.
    """
    kind, rows, kernels, back = _alike(rows, kernels)
    shape = jax.ShapeDtypeStruct((len(rows), kernels.shape[3 - contracted]), rows.dtype)
    call = jax.ffi.ffi_call(f"{ROWS}_{kind}", shape, vmap_method="sequential")
    return call(rows, kernels, sizes, turned=contracted == 2, tiles=tiles).astype(back)


def rows_with_rows(rows: jax.Array, gradient: jax.Array, sizes: jax.Array, *, tiles: bool = True) -> jax.Array:
    """For each expert the product of its rows, transposed, and their gradients: [E, A, B]; types as above."""
    kind, rows, gradient, back = _alike(rows, gradient)
    shape = jax.ShapeDtypeStruct((len(sizes), rows.shape[1], gradient.shape[1]), rows.dtype)
    call = jax.ffi.ffi_call(f"{KERNELS}_{kind}", shape, vmap_method="sequential")
    return call(rows, gradient, sizes, tiles=tiles).astype(back)


def _alike(rows: jax.Array, others: jax.Array) -> tuple[str, jax.Array, jax.Array, jnp.dtype]:
    """The type that the kernel takes, both arrays in it, and the type of the result."""
    kind = "bfloat16" if rows.dtype == others.dtype == jnp.bfloat16 else "float32"
    return kind, rows.astype(kind), others.astype(kind), rows.dtype
