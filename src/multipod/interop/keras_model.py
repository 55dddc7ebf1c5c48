"""Keras 3 models on the JAX backend: `model=from_keras(build, "image")`. Needs the extra `models`.

Keras chooses its backend when it is imported. `multipod.runtime.prepare`, which each command calls first, chooses JAX
if the user has chosen none.
"""

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import keras

from multipod.errors import RecipeError
from multipod.interop.inputs import ForeignModel, Input, as_inputs
from multipod.pytrees import Batch, Outputs, Params, Statistics


@dataclass(frozen=True, kw_only=True)
class KerasModel(ForeignModel):
    """A Keras model through `stateless_call`. Its trainable variables are the parameters, by their paths.

    Other variables are the statistics, except the states of random generators, which each update makes from its own
    key. Training begins with the weights that `build` gives; those that Keras draws itself are drawn by `seed`, so the
    seed of the run does not change them. `compile` and `fit` of the model are not used, nor are losses that its layers
    add: the recipe has objective and optimizer.

    Attributes:
      build: makes the model; it is called once in a process.
      seed: of the weights that Keras draws.
    """

    build: Callable[[], Any]
    seed: int = 0

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """The weights and statistics that `build` gives."""
        model = self._model()
        params = {variable.path: variable.value for variable in model.trainable_variables}
        return params, {variable.path: variable.value for variable in _statistics(model)}

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch` and the statistics after it; see `Model`."""
        model = self._model()
        generators = {id(one): number for number, one in enumerate(_generators(model))}
        others = [
            _bits(key, generators[id(one)]) if id(one) in generators else statistics[one.path]
            for one in model.non_trainable_variables
        ]
        trained = [params[one.path] for one in model.trainable_variables]
        outputs, after = model.stateless_call(trained, others, *self.arguments(batch), training=train)
        told = dict(zip(map(id, model.non_trainable_variables), after, strict=True))
        return outputs, {one.path: told[id(one)] for one in _statistics(model)} if train else statistics

    def _model(self) -> Any:
        return _built(self.build, self.seed, self.inputs)


@functools.lru_cache(maxsize=8)
def _built(build: Callable[[], Any], seed: int, inputs: tuple[Input, ...]) -> Any:
    """The model that `build` makes, with weights.

    Raises:
      RecipeError: Keras runs on another backend, or two variables have one path.
    """
    if keras.config.backend() != "jax":
        raise RecipeError(
            f"from_keras: Keras runs on {keras.config.backend()}, and training here is JAX. Set KERAS_BACKEND=jax, or "
            "call multipod.runtime.prepare() before Keras is imported."
        )
    keras.utils.clear_session(free_memory=False)  # numbers of layers begin anew, so that paths are the same every time
    before = random.getstate()
    random.seed(seed)  # of this Keras draws the seeds of its initializers
    try:
        with jax.ensure_compile_time_eval():  # this may be called while an update is traced
            model = build()
            if not model.built:
                model(*(one.example() for one in inputs))
    finally:
        random.setstate(before)
    paths = [one.path for one in (*model.trainable_variables, *_statistics(model))]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise RecipeError(f"from_keras: several variables are called {', '.join(twice)}. Name their layers apart.")
    return model


def _generators(model: Any) -> list[Any]:
    """The states of the random generators, uint32 [2] each."""
    return [one for one in model.non_trainable_variables if one.path.endswith("seed_generator_state")]


def _statistics(model: Any) -> list[Any]:
    drawn = set(map(id, _generators(model)))
    return [one for one in model.non_trainable_variables if id(one) not in drawn]


def _bits(key: jax.Array, number: int) -> jax.Array:
    return jax.random.bits(jax.random.fold_in(key, number), (2,), "uint32")


def from_keras(
    build: Callable[[], Any],
    *inputs: Input | str,
    seed: int = 0,
    dims: Mapping[str, tuple[str, ...]] | None = None,
) -> KerasModel:
    """What `build()` makes as a model for a recipe; see `KerasModel` and, for `dims`, `ForeignModel.dim_names`.

    Inputs need a shape only where the model is not built yet (a subclass of `keras.Model`).

    Raises:
      RecipeError: no inputs.
    """
    return KerasModel(build=build, inputs=as_inputs(inputs, shapes=False), seed=seed, dim_names=dims or {})
