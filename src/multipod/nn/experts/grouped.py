"""Products of rows that are sorted by expert with their experts' kernels: what the fast path spends its time in.

N rows: the first `sizes[0]` belong to expert 0, the next `sizes[1]` to expert 1, and so on; the rows behind the last
expert's belong to none and give zero. `reference` is the definition; `product` takes the fastest way of the platform.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from multipod.nn.experts import native
from multipod.pytrees import Pytree

Way = Literal["auto", "native", "blocks", "ragged"]
"""How `product` is computed. `native`: a C++ kernel, for CPUs with a compiler (`native.py`). `blocks`: loops over
blocks of rows, for other CPUs. `ragged`: `jax.lax.ragged_dot`, which XLA knows on GPUs and TPUs; on a CPU it costs
as many full products as there are experts. `auto`: by the platform that the program is compiled for."""

SMALLEST, LARGEST = 32, 256
"""Rows of the blocks: as large as leaves each expert two, then small ones for the rest. On two cores of a Sapphire
Rapids (2026-11) blocks of 128 rows and more cost what a whole product does, and of 32 rows a third more."""


def reference(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """rows [N, A] times each one's kernel of [E, A, B], [N, B]: every row with every kernel, all but one dropped."""
    ends = jnp.cumsum(sizes)
    number = jnp.arange(len(rows))[:, None]
    mine = (number < ends) & (number >= ends - sizes)
    return jnp.einsum("na,eab,ne->nb", rows, kernels, mine.astype(rows.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, way: Way = "auto") -> jax.Array:
    """rows [N, A] times each one's kernel of [E, A, B], [N, B]; `sizes` int32 [E].

    Cost: 2 N A B operations and the padding of each expert's last block; nothing of size [N, E] or [E, rows of an
    expert] is made. Not checked: that the sizes add up to N at most.
    """
    return _chosen(way, native.rows_with_kernels, _rows_blocks, _rows_ragged)(rows, kernels, sizes, 1)


def _forward(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, way: Way) -> tuple[jax.Array, Pytree]:
    return product(rows, kernels, sizes, way), (rows, kernels, sizes)


def _backward(way: Way, kept: Pytree, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, sizes = kept
    back = _chosen(way, native.rows_with_kernels, _rows_blocks, _rows_ragged)(gradient, kernels, sizes, 2)
    return back, _chosen(way, native.rows_with_rows, _kernels_blocks, _kernels_ragged)(rows, gradient, sizes), None


product.defvjp(_forward, _backward)


Computes = Callable[..., jax.Array]


def _chosen(way: Way, compiled: Computes, blocks: Computes, ragged: Computes) -> Computes:
    if way == "native":
        native.register()
    if way != "auto":
        return {"native": compiled, "blocks": blocks, "ragged": ragged}[way]
    on_cpu = compiled if native.available() else blocks
    return lambda *arguments: lax.platform_dependent(
        *arguments[:3], cpu=lambda *a: on_cpu(*a, *arguments[3:]), default=lambda *a: ragged(*a, *arguments[3:])
    )


def _rows_ragged(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    kernels = kernels if contracted == 1 else jnp.swapaxes(kernels, 1, 2)
    return lax.ragged_dot(rows, kernels, sizes)


def _kernels_ragged(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
    return lax.ragged_dot_general(rows, gradient, sizes, dims)


def _rows_blocks(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    """`product`, with kernels [E, A, B] whose dim `contracted` meets the rows."""
    count, blocks = len(rows), _blocks(len(rows), len(sizes))
    dims = (((1,), (contracted - 1,)), ((), ()))
    rows = jnp.pad(rows, ((0, blocks[0]), (0, 0)))

    def one_expert(expert: jax.Array, y: jax.Array) -> jax.Array:
        kernel = lax.dynamic_index_in_dim(kernels, expert, 0, keepdims=False)

        def one_block(size: int, begin: jax.Array, _: jax.Array, y: jax.Array) -> jax.Array:
            made = lax.dot_general(lax.dynamic_slice_in_dim(rows, begin, size), kernel, dims)
            return lax.dynamic_update_slice_in_dim(y, made, begin, 0)

        return _over_blocks(blocks, begins[expert], sizes[expert], one_block, y)

    # An expert's last block reaches into the rows of the next expert, which then writes over them; what reaches behind
    # the last expert's rows is set to zero in the end.
    ends = jnp.cumsum(sizes)
    begins = ends - sizes
    y = jnp.zeros((count + blocks[0], kernels.shape[3 - contracted]), rows.dtype)
    y = lax.fori_loop(0, len(sizes), one_expert, y)[:count]
    return jnp.where(jnp.arange(count)[:, None] < ends[-1], y, 0)


def _kernels_blocks(rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each expert the product of its rows, transposed, and their gradients: [E, A, B]."""
    blocks = _blocks(len(rows), len(sizes))
    begins = jnp.cumsum(sizes) - sizes
    rows, gradient = (jnp.pad(array, ((0, blocks[0]), (0, 0))) for array in (rows, gradient))

    def one_expert(expert: jax.Array, made: jax.Array) -> jax.Array:
        def one_block(size: int, begin: jax.Array, left: jax.Array, total: jax.Array) -> jax.Array:
            mine = lax.dynamic_slice_in_dim(rows, begin, size)
            mine = jnp.where(jnp.arange(size)[:, None] < left, mine, 0)
            outer = lax.dot_general(
                mine,
                lax.dynamic_slice_in_dim(gradient, begin, size),
                (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            return total + outer

        total = jnp.zeros(made.shape[1:], jnp.float32)
        total = _over_blocks(blocks, begins[expert], sizes[expert], one_block, total)
        return lax.dynamic_update_index_in_dim(made, total.astype(made.dtype), expert, 0)

    made = jnp.zeros((len(sizes), rows.shape[1], gradient.shape[1]), rows.dtype)
    return lax.fori_loop(0, len(sizes), one_expert, made)


def _blocks(rows: int, experts: int) -> tuple[int, ...]:
    """Rows of the large and the small blocks, from the mean rows of an expert."""
    large = LARGEST
    while large > SMALLEST and large > rows / (2 * experts):
        large //= 2
    return (large, SMALLEST) if large > SMALLEST else (SMALLEST,)


def _over_blocks(
    blocks: tuple[int, ...],
    begin: jax.Array,
    count: jax.Array,
    each: Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array],
    value: jax.Array,
) -> jax.Array:
    """`each(size, begin, rows left, value)` over the blocks of `count` rows from `begin`: large ones, then small."""
    done: jax.Array = jnp.zeros_like(count)
    for size in blocks:
        several = (count - done + size - 1) // size if size == blocks[-1] else (count - done) // size

        def step(number: jax.Array, value: jax.Array, size: int = size, done: jax.Array = done) -> jax.Array:
            past = done + number * size
            return each(size, begin + past, count - past, value)

        value = lax.fori_loop(0, several, step, value)
        done += several * size
    return value
