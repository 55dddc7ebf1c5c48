"""Flax Linen modules as models: `model=from_linen(Network(), Input("image", (8, 8, 1)))`."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import flax.linen
import jax
from flax.core import meta

from multipod.interop.inputs import ForeignModel, Input, as_inputs, train_argument, train_arguments
from multipod.nn.dims import Dims
from multipod.nn.model import flat, unflat
from multipod.pytrees import Batch, Outputs, Params, Pytree, Shapes, Statistics

PARAMS = "params"


@dataclass(frozen=True, kw_only=True)
class LinenModel(ForeignModel):
    """A Linen module. Its collection `params` are the parameters, all others the statistics (`batch_stats/...`).

    The module is told whether it trains by the argument of its `__call__` that has one of the usual names
    (`multipod.interop.inputs.train_argument`). It draws by whatever name of a random stream it likes.

    Attributes:
      module: unbound; its own fields can be changed by `--set model.module.FIELD=...`.
      streams: of random numbers that the module asks for beside `params`.
    """

    module: flax.linen.Module
    streams: tuple[str, ...] = ("dropout",)

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics."""
        variables = dict(meta.unbox(self._variables(key)))
        params = variables.pop(PARAMS, {})
        return flat(params), flat(variables)

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch` and the statistics after it; see `Model`."""
        shapes = dict(self._shapes())
        shape = shapes.pop(PARAMS, {})
        variables = {PARAMS: unflat(shape, params), **unflat(shapes, statistics)}
        told = train_arguments(train_argument(type(self.module).__call__), train)
        rngs = {name: jax.random.fold_in(key, number) for number, name in enumerate(self.streams)}
        outputs, changed = self.module.apply(
            variables, *self.arguments(batch), **told, rngs=rngs, mutable=list(shapes) if train else []
        )
        return outputs, statistics | flat(changed)

    def own_dims(self) -> dict[str, Dims]:
        """Names that `flax.linen.with_partitioning` and its like have put on parameters."""
        boxed = jax.eval_shape(self._variables, jax.random.key(0)).get(PARAMS, {})
        is_box = lambda leaf: isinstance(leaf, meta.Partitioned)  # noqa: E731
        leaves = jax.tree.leaves_with_path(boxed, is_leaf=is_box)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.names)
            for path, leaf in leaves
            if is_box(leaf)
        }

    def _variables(self, key: jax.Array) -> Mapping[str, Pytree]:
        told = train_arguments(train_argument(type(self.module).__call__), False)
        rngs = {name: jax.random.fold_in(key, number) for number, name in enumerate((PARAMS, *self.streams))}
        return self.module.init(rngs, *self.examples(), **told)

    def _shapes(self) -> Mapping[str, Shapes]:
        return _shapes(self.module, self.inputs, self.streams)


@functools.lru_cache(maxsize=32)
def _shapes(module: flax.linen.Module, inputs: tuple[Input, ...], streams: tuple[str, ...]) -> Mapping[str, Shapes]:
    model = LinenModel(module=module, inputs=inputs, streams=streams)
    return meta.unbox(jax.eval_shape(model._variables, jax.random.key(0)))


def from_linen(
    module: flax.linen.Module,
    *inputs: Input | str,
    dims: Mapping[str, tuple[str, ...]] | None = None,
    streams: tuple[str, ...] = ("dropout",),
) -> LinenModel:
    """A Linen module as a model for a recipe; see `LinenModel` and, for `dims`, `ForeignModel.dim_names`.

    Raises:
      RecipeError: an input without a shape.
    """
    return LinenModel(module=module, inputs=as_inputs(inputs, shapes=True), dim_names=dims or {}, streams=streams)
