"""Randomness that belongs to an example: what is drawn for it is the same on whichever device it lies.

A layer that draws for each row of a batch takes the row's number in the batch as part of its key. So dropout changes
with neither the mesh, nor the parts that a batch goes through the model in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.pytrees import Batch

NUMBERS = "example_numbers"
"""The entry of a batch that holds them, uint32 [rows]; a step puts it in and takes it out again before the model."""

STREAM = "by_example"
"""The tag of random streams whose key is that of the whole batch, not the device's."""


def numbered(batch: Batch) -> Batch:
    """A batch with the number of each row, padding included, in the order of the devices."""
    rows = len(next(iter(batch.values())))
    return batch | {NUMBERS: jnp.arange(rows, dtype=jnp.uint32)}


class _Drawing(NamedTuple):
    numbers: jax.Array
    key: jax.Array


_DRAWING: ContextVar[_Drawing | None] = ContextVar("drawing", default=None)


@contextmanager
def numbered_examples(numbers: jax.Array | None, key: jax.Array) -> Iterator[jax.Array]:
    """While it lasts, rows have these numbers, and what belongs to an example is drawn from `key`, the batch's.

    numbers: uint32 [rows], rising by one; None: nothing is known of the rows.

    Yields:
      the key of everything else: one for these rows, so that other devices draw something else.
    """
    token = _DRAWING.set(None if numbers is None else _Drawing(numbers, key))
    try:
        yield key if numbers is None else jax.random.fold_in(key, numbers[0])
    finally:
        _DRAWING.reset(token)


def batch_key(own: jax.Array) -> jax.Array:
    """The key that all devices share; `own` where rows have no numbers."""
    drawing = _DRAWING.get()
    return own if drawing is None else drawing.key


def first_of(parts: int) -> jax.Array | int:
    """The number, over the whole batch, of the first of `parts` equal parts of these rows; 0 without numbers."""
    drawing = _DRAWING.get()
    return 0 if drawing is None else drawing.numbers[0] * parts // len(drawing.numbers)


def is_numbered() -> bool:
    """Whether the rows have numbers here."""
    return _DRAWING.get() is not None


def keys_of_rows(key: jax.Array, rows: int) -> jax.Array:
    """[rows] keys, each made of `key` and the row's number: its place, where rows have no numbers."""
    drawing = _DRAWING.get()
    numbers = jnp.arange(rows, dtype=jnp.uint32) if drawing is None else drawing.numbers
    return jax.vmap(partial(jax.random.fold_in, key))(numbers)


def example_stream(rngs: nnx.Rngs) -> nnx.RngStream:
    """A stream of keys of the whole batch, which `keys_of_rows` are made of."""
    return nnx.RngStream(rngs["dropout"](), tag=STREAM)


class Dropout(nnx.Dropout):
    """Flax's dropout; where rows have numbers, an example's mask depends on its number and on no layout.

    The first dim of what it is given is then that of the batch.
    """

    def __init__(self, rate: float, *, broadcast_dims: tuple[int, ...] = (), rngs: nnx.Rngs | None) -> None:
        stream = None if rngs is None else example_stream(rngs)
        super().__init__(rate, broadcast_dims=broadcast_dims, rngs=stream)

    def __call__(self, inputs: jax.Array, **given: object) -> jax.Array:
        """`inputs` [rows, ...] with a share of its elements zero and the others larger."""
        if given or self.deterministic or self.rate in (0.0, 1.0) or not is_numbered():
            return super().__call__(inputs, **given)
        kept = 1.0 - self.rate
        shape = [1 if dim in self.broadcast_dims else size for dim, size in enumerate(inputs.shape)]
        draw = partial(jax.random.bernoulli, p=kept, shape=shape[1:])
        mask = jax.vmap(draw)(keys_of_rows(self.rngs(), len(inputs)))
        return jnp.where(mask, inputs / kept, 0).astype(inputs.dtype)


def dropout_layer(share: float, rngs: nnx.Rngs) -> Dropout:
    """Dropout of that share, with a generator of its own if it is not 0."""
    return Dropout(share, rngs=rngs if share else None)
