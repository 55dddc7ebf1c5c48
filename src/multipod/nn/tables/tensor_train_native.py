"""The C++ kernel `tensor_train.cc` as JAX operations on CPU: sums of bags, and their gradients.

Compiled at first use for this machine's processor (`multipod.nn.ffi`). It runs on one core; results are the same from
call to call.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from multipod.nn import ffi
from multipod.nn.tables.tensor_train import Cores, TensorTrain
from multipod.pytrees import Pytree

HERE = Path(__file__).parent
HEADERS = [HERE / f"tensor_train_{part}.h" for part in ("ids", "math", "walk")]
FORWARD, BACKWARD = "multipod_tt_forward", "multipod_tt_backward"


@functools.cache
def register() -> None:
    """Compiles the kernel if need be and tells JAX of it; later calls do nothing.

    Raises:
      NativeError: it cannot be compiled here.
    """
    ffi.register("multipod-tensor-train", HERE / "tensor_train.cc", (FORWARD, BACKWARD), headers=HEADERS)


def forward(
    tt: TensorTrain,
    keep: bool,
    cores: Cores,
    ids: jax.Array,
    offsets: jax.Array,
    weights: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Sums of bags, [bags, features] (see `tensor_train_bag.bag`), and the ids in the kernel's order.

    The order is what `backward` takes, uint32 [ids, 2], empty unless `keep`: to sort them again takes longer than to
    keep them.
    """
    sums = jax.ShapeDtypeStruct((len(offsets) - 1, tt.features), jnp.float32)
    order = jax.ShapeDtypeStruct(order_shape(ids, keep), jnp.uint32)
    call = jax.ffi.ffi_call(FORWARD, (sums, order), vmap_method="sequential")
    found, kept = call(ids, offsets, _or_none(weights), *cores, table_rows=np.int64(tt.rows))
    return found, kept


def order_shape(ids: jax.Array, keep: bool) -> tuple[int, int]:
    """The shape of the order that `forward` gives."""
    return (len(ids) if keep else 0, 2)


def backward(
    tt: TensorTrain,
    cores: Cores,
    ids: jax.Array,
    offsets: jax.Array,
    weights: jax.Array | None,
    order: jax.Array,
    gradient: jax.Array,
) -> tuple[Cores, Pytree]:
    """Gradients of the cores, and of the weights if there are any, from that of the sums."""
    given = _or_none(weights)
    shapes = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (given, *cores)]
    call = jax.ffi.ffi_call(BACKWARD, shapes, vmap_method="sequential")
    of_weights, *of_cores = call(ids, offsets, given, order, gradient, *cores, table_rows=np.int64(tt.rows))
    return tuple(of_cores), None if weights is None else of_weights


def _or_none(weights: jax.Array | None) -> jax.Array:
    """No weights are an empty array to the kernel."""
    return jnp.zeros(0, jnp.float32) if weights is None else weights.astype(jnp.float32)
