"""In which order the dims of images lie in the devices' memory. Their shapes, as programs see them, stay the same.

A batch arrives with its rows one after the other. Matrix units that want other dims innermost make XLA turn the whole
batch at the start of every step; a batch that is sent in the order that the step wants is not turned again.

Source: Google's MLPerf v0.7 code sends HWNC where a core has eight images or fewer, else HWCN (arXiv:2011.03641).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

Order = Literal["", "auto", "HWNC", "HWCN"]
"""Empty: row by row. auto: as the compiler of the step wishes. The others: slowest dim first."""

_MAJOR_TO_MINOR = {"HWNC": (1, 2, 0, 3), "HWCN": (1, 2, 3, 0)}

Placed = NamedSharding | Format
Wishes = Mapping[str, Format]
"""How a compiled update wants the arrays of a batch."""


def placed_as(order: Order, leaf: jax.ShapeDtypeStruct) -> Placed:
    """Where an array of a batch lies and, of images [n, height, width, channels], in which order."""
    sharding: Any = leaf.sharding
    if not order or len(leaf.shape) != 4:
        return sharding
    return Format(Layout.AUTO if order == "auto" else Layout(_MAJOR_TO_MINOR[order]), sharding)


def lowered(
    update: Callable[..., Any], state: Any, batch: Any, flags: Any, out_shardings: Any, order: Order
) -> jax.stages.Lowered:
    """`update` of (state, batch, flags), which are shapes with shardings, traced; the state is given up."""
    if not order:
        return jax.jit(update, donate_argnums=0, out_shardings=out_shardings).lower(state, batch, flags)
    where = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state, flags)]
    images = {name: placed_as(order, leaf) for name, leaf in batch.items()}
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    jitted = jax.jit(update, donate_argnums=0, in_shardings=(where[0], images, where[1]), out_shardings=out_shardings)
    return jitted.lower(state, bare, flags)


def wishes_of(compiled: Any) -> Wishes:
    """How a compiled update of (state, batch, flags) wants the arrays of a batch."""
    return compiled.input_formats[0][1]
