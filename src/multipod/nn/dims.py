"""Logical names of the dims of parameters: what a layout needs to know of a model to split it.

A parameter carries one name for each of its dims, as the metadata `dims` of its NNX variable: `("embed", "heads",
"kv")`. The names say what a dim counts, never on which mesh axis it lies. Those in use here:

| name | counts |
|---|---|
| `vocab` | tokens of the vocabulary |
| `embed` | features between layers |
| `heads`, `kv` | heads of an attention, features of one head |
| `mlp` | hidden features of a feed-forward layer |
| `embed_out` | features between layers, in a kernel whose other dim is `embed`: no axis can split both |
| `height`, `width` | rows and columns of an image; of inputs and activations, no parameter has them |
| `gates` | the four gates of an LSTM, times its features: no axis splits them |
| `experts` | experts of a sparse layer |
| `router` | the same, in the router, which every device holds whole |
| `buckets` | distances between tokens that share a number |
| `positions`, `types`, `classes` | learnt positions, token types, outputs of a classifier |

Flax's own metadata of this kind, `out_sharding`, also *places* a variable while it is made, if a mesh is set; ours does
nothing. Modules that carry Flax's are understood too.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from multipod.nn.model import FlaxModel, Model, skeleton

Dims = tuple[str | None, ...]


@runtime_checkable
class NamesDims(Protocol):
    """A model that names the dims of its parameters itself; a `FlaxModel` has them as metadata."""

    def dims(self) -> Mapping[str, Dims]:
        """The names of a parameter's dims, by its path; parameters without names may be missing."""
        ...


@runtime_checkable
class NamesInputDims(Protocol):
    """A model that names the dims of what it reads, so that a layout can split them."""

    @property
    def input_dims(self) -> Mapping[str, Dims]:
        """The names, by the batch's entry."""
        ...


def param(init: Initializer, sizes: Sequence[int], dims: Dims, rngs: nnx.Rngs) -> nnx.Param:
    """A float32 parameter of these sizes, drawn by `init`, its dims named."""
    assert len(sizes) == len(dims), f"{dims} do not name the dims of {sizes}"
    return nnx.Param(init(rngs.params(), tuple(sizes)), dims=tuple(dims))


def constant(value: float, sizes: Sequence[int], dims: Dims) -> nnx.Param:
    """A float32 parameter that begins as `value` everywhere, its dims named."""
    # Not through `param`: NNX takes a while to draw a key, the longer the more of them a model has drawn.
    assert len(sizes) == len(dims), f"{dims} do not name the dims of {sizes}"
    return nnx.Param(jnp.full(tuple(sizes), value, jnp.float32), dims=tuple(dims))


def dims_of(model: Model) -> dict[str, Dims]:
    """The names of every parameter's dims, by the parameter's path; None for a dim without a name. Allocates nothing.

    A parameter without metadata has no entry: a layout must then name it by its path. A model that is no `FlaxModel`
    has names if it is `NamesDims`.
    """
    if not isinstance(model, FlaxModel):
        return dict(model.dims()) if isinstance(model, NamesDims) else {}
    _, shapes = skeleton(model)
    named = (("/".join(map(str, path)), _dims(variable)) for path, variable in nnx.to_flat_state(shapes[0]))
    return {path: dims for path, dims in named if dims}


def input_dims(model: Model) -> dict[str, Dims]:
    """The names of the dims of what the model reads, by the batch's entry; see `NamesInputDims`."""
    return dict(model.input_dims) if isinstance(model, NamesInputDims) else {}


def _dims(variable: nnx.Variable) -> Dims:
    metadata = variable.get_metadata()
    dims = metadata.get("dims") or metadata.get("out_sharding") or ()
    return tuple(dims.spec if isinstance(dims, jax.sharding.NamedSharding) else dims)
