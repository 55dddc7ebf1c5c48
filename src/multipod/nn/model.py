"""The one form in which a model meets the trainer: two functions on plain pytrees."""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from multipod.nn.by_example import STREAM, batch_key
from multipod.pytrees import Batch, IdRange, KeyPath, Outputs, Params, Pytree, Shapes, Statistics


class Model(Protocol):
    """What the trainer needs. Any object with these two methods trains: see `examples/`.

    `apply` runs inside `jax.shard_map` on one device's share of the batch. In training it returns
    new statistics; floats among them are averaged over the mesh afterwards, so a layer whose
    statistics must not depend on the mesh has to average them itself (`TileBatchNorm` does). On a
    mesh with failed chips rows may be padding, which a layer that looks across examples must leave out:
    `multipod.nn.padding.example_mask` tells.

    More methods are optional, one for each protocol: here `HasClasses`, `TakesIds`, `ChecksBatches`, `WritesNotes`,
    `ShowsFigures`, `Generates`, `ReadsRows`, `Rearranging`; `Layered` in `nn/layered.py`, `NamesDims` and
    `NamesInputDims` in `nn/dims.py`.
    """

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics."""
        ...

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch`, first dim examples, and the statistics after it."""
        ...


@runtime_checkable
class HasClasses(Protocol):
    """A model of classes: labels outside of them are refused before they reach a device."""

    @property
    def classes(self) -> int:
        """How many; labels are 0 to `classes` - 1. 0: not known."""
        ...


@runtime_checkable
class TakesIds(Protocol):
    """A model with tables: data whose ids would lie outside of them are refused before anything is compiled."""

    def ids_taken(self) -> Mapping[str, IdRange]:
        """How many ids the entries of a batch may have, by the entry; a label is one where it is looked up."""
        ...


@runtime_checkable
class ChecksBatches(Protocol):
    """A model that can tell of a batch, while it is on the host, that it cannot be read."""

    def check_batch(self, host: Mapping[str, np.ndarray]) -> None:
        """Refuses what would be out of range; a device would read on without a word.

        Raises:
          DataError: an id outside its table, for example.
        """
        ...


@runtime_checkable
class WritesNotes(Protocol):
    """A model that says something of itself at the end of a run."""

    def notes(self, statistics: Statistics) -> dict[str, str]:
        """What a report shows, by name."""
        ...


@runtime_checkable
class ShowsFigures(Protocol):
    """A model with sizes that its tensors do not tell, for `multipod show`."""

    def figures(self) -> dict[str, str]:
        """What is shown, by name."""
        ...


@runtime_checkable
class Generates(Protocol):
    """A model that answers a text with a text."""

    def generate(self, params: Params, batch: Batch, *, start: int, end: int, length: int) -> jax.Array:
        """The likeliest token at each place behind those before it, int32 [examples, length]; 0 behind `end`."""
        ...


class Moved(NamedTuple):
    """Where the rows of a parameter were before its model rearranged them.

    Attributes:
      place: int32 [rows], each row's place before.
      known: bool [rows], whether it was there; rows that were not are new, and so is their optimizer state.
    """

    place: jax.Array
    known: jax.Array


@runtime_checkable
class Rearranging(Protocol):
    """What a model has beside `Model` if it rearranged_params parameters of its own between updates (a cache of rows).

    Its parameters are a flat dictionary.
    """

    def rearranged_params(self) -> tuple[str, ...]:
        """The names of the parameters that `rearrange` may replace; () if it never does."""
        ...

    def is_due(self, update: jax.Array) -> jax.Array:
        """Whether to rearrange after the update of this number, the first being 1."""
        ...

    def rearrange(self, params: Params, statistics: Statistics) -> tuple[Params, Statistics, dict[str, Moved]]:
        """The named parameters and all statistics anew, and of which parameters the rows have moved."""
        ...


@runtime_checkable
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
        return flat(params), flat(statistics)

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch` and the statistics after it; see `Model`."""
        graph, shapes = skeleton(self)
        states = unflat(shapes[0], params), with_key(shapes[1], key), unflat(shapes[2], statistics)
        module = nnx.merge(graph, *states, copy=True)
        module.train() if train else module.eval()
        outputs = self.forward(module, batch)
        return outputs, flat(nnx.split(module, nnx.Param, nnx.RngState, ...)[3])


def nested_models(model: Model) -> Iterator[tuple[str, Any]]:
    """The model and what it wraps in turn, as `Normalized` does, each with its name for `--set`."""
    value, name = model, "model"
    while dataclasses.is_dataclass(value):
        yield name, value
        value, name = getattr(value, "model", None), f"{name}.model"


@functools.lru_cache(maxsize=32)
def skeleton(model: FlaxModel) -> tuple[nnx.GraphDef, tuple[Shapes, Shapes, Shapes]]:
    """The module's structure and the shapes of its parameters, random state and statistics."""
    module = nnx.eval_shape(lambda: model.module(nnx.Rngs(0)))
    graph, *shapes = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return graph, tuple(shapes)


def flat(state: Pytree) -> dict[str, jax.Array]:
    """The leaves by their path: `blocks/0/conv1/kernel`."""
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def unflat(shapes: Shapes, values: dict[str, jax.Array]) -> Pytree:
    """The values, by their path, in the structure of `shapes`."""
    return jax.tree.map_with_path(lambda path, _: values[_name(path)], shapes)


def with_key(shapes: Shapes, key: jax.Array) -> Pytree:
    """Random state that starts from `key`, one stream for each generator of the module.

    Those for what belongs to an example start from the key of the whole batch (`multipod.nn.by_example`).
    """
    variables = jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, nnx.Variable))
    structure: Pytree = jax.tree.structure(shapes)

    def filled(number: int, variable: nnx.Variable) -> jax.Array:
        (leaf,) = jax.tree.leaves(variable)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jax.random.fold_in(batch_key(key) if variable.tag == STREAM else key, number)

    return structure.unflatten(filled(number, variable) for number, variable in enumerate(variables))


def _name(path: KeyPath) -> str:
    """`blocks/0/conv1/kernel`; the last step of the path enters NNX's variable and has no name of its own."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
