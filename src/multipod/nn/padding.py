"""Which rows of a batch are examples, and which are padding: known to every layer without being passed through them.

A batch that does not divide over the devices is padded; a mesh with failed chips does that. The loss and
the metrics leave padding out by themselves. A layer that looks across examples must do so too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_MASK: ContextVar[jax.Array | None] = ContextVar("mask", default=None)


@contextmanager
def padding_mask(mask: jax.Array | None) -> Iterator[None]:
    """While it lasts, the rows where `mask` (bool [rows of this device]) is false are padding; None: no row is."""
    token = _MASK.set(mask)
    try:
        yield
    finally:
        _MASK.reset(token)


def example_mask() -> jax.Array | None:
    """True for the rows of this device's batch that are examples; None where all are."""
    return _MASK.get()
