"""The one form in which a model meets the trainer: two functions on plain pytrees."""

import abc
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.pytrees import Batch, KeyPath, Outputs, Params, Pytree, Shapes, Statistics


class Model(Protocol):
    """What the trainer needs. Any object with these two methods trains: see `examples/`.

    `apply` runs inside `jax.shard_map` on one device's share of the batch. In training it returns
    new statistics; floats among them are averaged over the mesh afterwards, so a layer whose
    statistics must not depend on the mesh has to average them itself (`TileBatchNorm` does). On a
    mesh with failed chips rows may be padding, which a layer that looks across examples must leave out:
    `multipod.nn.padding.example_mask` tells.
    """

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics."""
        ...

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch`, first dim examples, and the statistics after it."""
        ...


class Moved(NamedTuple):
    """Where the rows of a parameter were before its model rearranged them.

    Attributes:
      place: int32 [rows], each row's place before.
      known: bool [rows], whether it was there; rows that were not are new, and so is their optimizer state.
    """

    place: jax.Array
    known: jax.Array


class Rearranging(Protocol):
    """What a model has beside `Model` if it rearranges parameters of its own between updates (a cache of rows).

    Its parameters are a flat dictionary.
    """

    def rearranges(self) -> tuple[str, ...]:
        """The names of the parameters that `rearranged` may replace; () if it never does."""
        ...

    def is_due(self, update: jax.Array) -> jax.Array:
        """Whether to rearrange after the update of this number, the first being 1."""
        ...

    def rearranged(self, params: Params, statistics: Statistics) -> tuple[Params, Statistics, dict[str, Moved]]:
        """The named parameters and all statistics anew, and of which parameters the rows have moved."""
        ...


class ReadsRows(Protocol):
    """What a model has beside `Model` if a batch reads few rows of some parameters, which are tables of vectors.

    Its parameters are a flat dictionary. An update of touched rows gives `apply` the rows that it reads, as the
    parameter `rows_name(table)` of shape [examples, places, ...], in the place of the table.
    """

    def row_tables(self) -> tuple[str, ...]:
        """The names of these parameters."""
        ...

    def rows_read(self, table: str, batch: Batch) -> jax.Array:
        """Which rows of a table `batch` reads, int32 [examples, places]; -1 is none."""
        ...


def rows_name(table: str) -> str:
    """The name under which a model finds the rows of a table, if it is not given the table."""
    return f"{table}/rows"


class FlaxModel(abc.ABC):
    """A model written as a Flax NNX module, used functionally: split once, merged inside `jax.jit`.

    (`nnx.jit` costs about twice the step time of this form: docs/design/models.md.) Subclasses are
    frozen dataclasses whose fields are the hyper-parameters. Parameters and statistics are flat
    dictionaries from a path such as `blocks/0/conv1/kernel` to an array.
    """

    @abc.abstractmethod
    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""

    @abc.abstractmethod
    def forward(self, module: nnx.Module, batch: Batch) -> Outputs:
        """The module's outputs for a batch."""

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics."""
        _, params, _, statistics = nnx.split(self.module(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        return _flat(params), _flat(statistics)

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch` and the statistics after it; see `Model`."""
        graph, shapes = skeleton(self)
        states = unflat(shapes[0], params), with_key(shapes[1], key), unflat(shapes[2], statistics)
        module = nnx.merge(graph, *states, copy=True)
        module.train() if train else module.eval()
        outputs = self.forward(module, batch)
        return outputs, _flat(nnx.split(module, nnx.Param, nnx.RngState, ...)[3])


@functools.lru_cache(maxsize=32)
def skeleton(model: FlaxModel) -> tuple[nnx.GraphDef, tuple[Shapes, Shapes, Shapes]]:
    """The module's structure and the shapes of its parameters, random state and statistics."""
    module = nnx.eval_shape(lambda: model.module(nnx.Rngs(0)))
    graph, *shapes = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return graph, tuple(shapes)


def _flat(state: Pytree) -> dict[str, jax.Array]:
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def unflat(shapes: Shapes, values: dict[str, jax.Array]) -> Pytree:
    """The values, by their path, in the structure of `shapes`."""
    return jax.tree.map_with_path(lambda path, _: values[_name(path)], shapes)


def with_key(shapes: Shapes, key: jax.Array) -> Pytree:
    """Random state that starts from `key`, one stream for each generator of the module."""
    leaves = jax.tree.leaves(shapes)
    structure: Pytree = jax.tree.structure(shapes)
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    filled = [
        jax.random.fold_in(key, number) if is_key(leaf) else jnp.zeros(leaf.shape, leaf.dtype)
        for number, leaf in enumerate(leaves)
    ]
    return structure.unflatten(filled)


def _name(path: KeyPath) -> str:
    """`blocks/0/conv1/kernel`; the last step of the path enters NNX's variable and has no name of its own."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
