"""The memory layout of images: in which order their dims lie on the devices. Programs see the same shapes.

A batch arrives with its rows one after the other. Matrix units that want other dims innermost make XLA turn the whole
batch at the start of every step; a batch that is sent in the order that the step wants is not turned again.

Source: Google's MLPerf v0.7 code sends HWNC where a core has eight images or fewer, else HWCN (arXiv:2011.03641).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from multipod.pytrees import Shapes, Shardings

MemoryLayout = Literal["", "auto", "HWNC", "HWCN"]
"""Empty: row by row. auto: as the compiler of the step wants it. The others: slowest dim first."""

_MAJOR_TO_MINOR = {"HWNC": (1, 2, 0, 3), "HWCN": (1, 2, 3, 0)}

InputFormats = Mapping[str, Format]
"""How a compiled update wants the arrays of a batch."""


def format_of(layout: MemoryLayout, leaf: jax.ShapeDtypeStruct) -> NamedSharding | Format:
    """Where an array of a batch lies and, of images [n, height, width, channels], in which memory layout."""
    sharding: Any = leaf.sharding
    if not layout or len(leaf.shape) != 4:
        return sharding
    return Format(Layout.AUTO if layout == "auto" else Layout(_MAJOR_TO_MINOR[layout]), sharding)


def lower_update(
    update: Callable[..., Any],
    state: Shapes,
    batch: Mapping[str, jax.ShapeDtypeStruct] | tuple[Shapes, ...],
    controls: Shapes,
    out_shardings: Shardings,
    layout: MemoryLayout = "",
) -> jax.stages.Lowered:
    """`update` of (state, batch, controls), which are shapes with shardings, traced; the state is given up.

    `batch` may be several, for an update that takes such; those have no `layout`.
    """
    if not layout:
        return jax.jit(update, donate_argnums=0, out_shardings=out_shardings).lower(state, batch, controls)
    assert isinstance(batch, Mapping)
    where = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state, controls)]
    images = {name: format_of(layout, leaf) for name, leaf in batch.items()}
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    jitted = jax.jit(update, donate_argnums=0, in_shardings=(where[0], images, where[1]), out_shardings=out_shardings)
    return jitted.lower(state, bare, controls)


def input_formats(compiled: Any) -> InputFormats:
    """How a compiled update of (state, batch, controls) wants the arrays of a batch."""
    return compiled.input_formats[0][1]
