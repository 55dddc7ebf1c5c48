"""Embedding bags from a table in tensor-train form: forward and backward touch only the rows in the batch.

Two ways to the same values: the JAX form (`jax_bag`), the reference, which runs everywhere; and on CPU a kernel in C++
(`tensor_train_native.py`), which is an order of magnitude faster. Both work once for each *distinct* id, and
compute the product of the first k cores once for all ids whose first k digits agree.

Source: Yin et al., 2021, arXiv:2101.11714 (TT-Rec), sections 3.2 and 5; the products of common prefixes are ours (they
compute a chain for every id).
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from multipod.errors import NativeError, RecipeError
from multipod.nn.tables import tensor_train_native as native
from multipod.nn.tables.bags import Mode, check_bags, divide_sums, is_concrete, pool_bags
from multipod.nn.tables.tensor_train import Cores, TensorTrain
from multipod.pytrees import Pytree

Way = Literal["auto", "jax", "native"]
Weights = jax.Array | None
"""A number for each id, float32 [ids]; None counts each once."""


def bag(
    tt: TensorTrain,
    cores: Cores,
    ids: jax.Array,
    offsets: jax.Array,
    weights: Weights = None,
    mode: Mode = "sum",
    *,
    way: Way = "auto",
    distinct: int | None = None,
    table: str = "table",
) -> jax.Array:
    """The bags [bags, features] of `multipod.nn.tables.bags`. Differentiable in `cores` and `weights`.

    Args:
      tt: the shape of the table.
      cores: its cores; the kernel takes float32 alone, others go the way of JAX.
      ids: int32 [n].
      offsets: int32 [bags + 1].
      weights: float32 [n] or None, which is all ones.
      mode: "sum", or "mean": divided by the number of ids, or by the sum of their weights.
      way: "native" is the kernel, on CPU alone; "auto" is the kernel on CPU where a C++ compiler is found, or else JAX.
      distinct: of the JAX form: the most distinct ids that a batch can have; those beyond make their bags NaN. Shapes
        must be known when compiling, so without it room is made, and work done, for n of them.
      table: its name, for errors.

    Raises:
      DataError: called outside `jax.jit` with ids or offsets that do not fit the table. Inside, see `nn.tables.bags`.
      RecipeError: cores of other shapes.
      NativeError: way="native", and the kernel cannot be compiled here.
    """
    shapes = tuple(core.shape for core in cores)
    if shapes != tt.shapes:
        raise RecipeError(
            f"{table}: the cores have shapes {shapes}, and the tensor train {tt.shapes}. Make both from one shape."
        )
    if is_concrete(ids, offsets):
        check_bags(ids, offsets, tt.rows, weights, table)
    ids, offsets = ids.astype(jnp.int32), offsets.astype(jnp.int32)
    if cores[0].dtype == jnp.float32 and _native(way):
        sums = _kernel_or_jax(tt, distinct, cores, ids, offsets, weights)
    else:
        sums = jax_bag(tt, cores, ids, offsets, weights, distinct=distinct)
    return divide_sums(sums, offsets, weights, len(ids), mode)


def jax_bag(
    tt: TensorTrain,
    cores: Cores,
    ids: jax.Array,
    offsets: jax.Array,
    weights: Weights = None,
    *,
    distinct: int | None = None,
) -> jax.Array:
    """Sums of bags, by JAX's own operations; any order of differentiation."""
    if not len(ids):
        return jnp.zeros((len(offsets) - 1, tt.features), cores[0].dtype)
    known = (ids >= 0) & (ids < tt.rows)
    room = min(len(ids), tt.padded_rows, len(ids) if distinct is None else distinct)
    keys, place = _distinct_of(jnp.where(known, ids, 0), room)
    rows = jnp.take(_rows(tt, cores, keys), place, axis=0, mode="fill")  # beyond `distinct`: NaN, as outside the table
    rows = jnp.where(known[:, None], rows, jnp.nan)
    return pool_bags(rows, offsets, weights)


def _rows(tt: TensorTrain, cores: Cores, keys: jax.Array) -> jax.Array:
    """The rows of increasing `keys`, with the products of equal prefixes computed once."""
    levels = [keys]  # the distinct prefixes of k digits, and where each of k + 1 digits finds its own
    places: list[jax.Array] = []
    for k in range(len(cores) - 1, 0, -1):
        prefixes = levels[0] // tt.row_factors[k]
        shorter, place = _runs_of(prefixes, min(len(prefixes), math.prod(tt.row_factors[:k])))
        levels.insert(0, shorter)
        places.insert(0, place)
    product = cores[0][levels[0], 0]
    for core, m, prefixes, place in zip(cores[1:], tt.row_factors[1:], levels[1:], places, strict=True):
        product = jnp.einsum("xar,xrbs->xabs", product[place], core[prefixes % m])
        product = product.reshape(len(prefixes), -1, product.shape[-1])
    return product[:, :, 0]


def _distinct_of(ids: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """The distinct ids, increasing, the last repeated to fill `room`; and the place of each id among them."""
    order = jnp.argsort(ids)
    keys, place = _runs_of(ids[order], room)
    return keys, jnp.zeros_like(place).at[order].set(place, unique_indices=True)


def _runs_of(ordered: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """What `_distinct_of` says, of ids that are in order already."""
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    place = jnp.cumsum(new, dtype=jnp.int32)
    keys = jnp.zeros(room, ordered.dtype).at[place].set(ordered, mode="drop")
    return lax.cummax(keys), place


def _native(way: Way) -> bool:
    if way == "jax":
        return False
    try:
        native.register()
    except NativeError:
        if way == "native":
            raise
        return False
    return True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel_or_jax(
    tt: TensorTrain, distinct: int | None, cores: Cores, ids: jax.Array, offsets: jax.Array, weights: Weights
) -> jax.Array:
    return _sums(tt, distinct, False, cores, ids, offsets, weights)[0]


def _sums(
    tt: TensorTrain,
    distinct: int | None,
    keep: bool,
    cores: Cores,
    ids: jax.Array,
    offsets: jax.Array,
    weights: Weights,
) -> tuple[jax.Array, jax.Array]:
    """Sums of bags, and the kernel's order of the ids, which the JAX form has no use for."""

    def by_jax(cores: Cores, ids: jax.Array, offsets: jax.Array, weights: Weights) -> tuple[jax.Array, jax.Array]:
        sums = jax_bag(tt, cores, ids, offsets, weights, distinct=distinct)
        return sums, jnp.zeros(native.order_shape(ids, keep), jnp.uint32)

    kernel = functools.partial(native.forward, tt, keep)
    return lax.platform_dependent(cores, ids, offsets, weights, cpu=kernel, default=by_jax)


def _forward(
    tt: TensorTrain, distinct: int | None, cores: Cores, ids: jax.Array, offsets: jax.Array, weights: Weights
) -> tuple[jax.Array, Pytree]:
    sums, order = _sums(tt, distinct, True, cores, ids, offsets, weights)
    return sums, (cores, ids, offsets, weights, order)


def _backward(tt: TensorTrain, distinct: int | None, saved: Pytree, gradient: jax.Array) -> tuple[Pytree, ...]:
    """Gradients; the forward pass kept only the order of ids, so products are made again (arXiv:2101.11714, 5)."""

    def by_jax(
        cores: Cores,
        ids: jax.Array,
        offsets: jax.Array,
        weights: Weights,
        order: jax.Array,
        gradient: jax.Array,
    ) -> Pytree:
        def sums(cores: Cores, weights: Weights) -> jax.Array:
            return jax_bag(tt, cores, ids, offsets, weights, distinct=distinct)

        return jax.vjp(sums, cores, weights)[1](gradient)

    kernel = functools.partial(native.backward, tt)
    cores, weights = lax.platform_dependent(*saved, gradient, cpu=kernel, default=by_jax)
    return cores, None, None, weights


_kernel_or_jax.defvjp(_forward, _backward)
