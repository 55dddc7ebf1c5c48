"""Equinox modules as models: `model=from_equinox(build, "image")`. Needs the package `equinox`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox
import jax

from multipod.interop.inputs import ForeignModel, Input, as_inputs
from multipod.nn.model import flat, unflat
from multipod.pytrees import Batch, Outputs, Params, Pytree, Statistics

AXIS = "batch"


@dataclass(frozen=True, kw_only=True)
class EquinoxModel(ForeignModel):
    """An Equinox module, which is called for one example and mapped over the batch.

    Its floating arrays are the parameters. A module with state (`equinox.nn.make_with_state`) has its floating arrays
    as statistics; it is mapped over an axis `batch`, and called with the state behind the inputs. A module whose
    `__call__` takes `key` gets one for each example. Evaluation is in `equinox.nn.inference_mode`.

    Attributes:
      build: from a random key to the module, or to the pair of module and state.
    """

    build: Callable[[jax.Array], Any]

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics."""
        module, state = self._built(key)
        return flat(_floats(module)), flat(_floats(state))

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch` and the statistics after it; see `Model`."""
        # Of these only the structure is used, and arrays that are not floating: XLA leaves out what nobody reads.
        module, state = (
            equinox.combine(unflat(_floats(one), values), one)
            for one, values in zip(self._built(jax.random.key(0)), (params, statistics), strict=True)
        )
        module = equinox.nn.inference_mode(module, value=not train)
        arguments = self.arguments(batch)
        keys = None
        if "key" in inspect.signature(type(module).__call__).parameters:
            keys = jax.random.split(key, len(arguments[0]))
        if state is None:
            return _mapped(lambda key, *x: module(*x, **_keyed(key)), keys, arguments), statistics
        outputs, after = jax.vmap(
            lambda key, *x: module(*x, state, **_keyed(key)),
            in_axes=(None if keys is None else 0, *[0] * len(arguments)),
            out_axes=(0, None),
            axis_name=AXIS,
        )(keys, *arguments)
        return outputs, flat(_floats(after)) if train else statistics

    def _built(self, key: jax.Array) -> tuple[Pytree, Pytree]:
        made = self.build(key)
        return made if isinstance(made, tuple) else (made, None)


def _floats(tree: Pytree) -> Pytree:
    return equinox.filter(tree, equinox.is_inexact_array)


def _keyed(key: jax.Array | None) -> dict[str, jax.Array]:
    return {} if key is None else {"key": key}


def _mapped(function: Callable[..., Any], keys: jax.Array | None, arguments: list[jax.Array]) -> Any:
    return jax.vmap(function, in_axes=(None if keys is None else 0, *[0] * len(arguments)))(keys, *arguments)


def from_equinox(
    build: Callable[[jax.Array], Any],
    *inputs: Input | str,
    dims: Mapping[str, tuple[str, ...]] | None = None,
) -> EquinoxModel:
    """What `build(key)` makes as a model for a recipe; see `EquinoxModel` and, for `dims`, `ForeignModel.dim_names`.

    Raises:
      RecipeError: no inputs.
    """
    return EquinoxModel(build=build, inputs=as_inputs(inputs, shapes=False), dim_names=dims or {})
