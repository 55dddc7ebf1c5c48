"""Pairs of pure functions as models, Haiku's among them: `model=from_functions(init, apply, "image")`.

model = from_functions(*hk.transform(forward), Input("image", (8, 8, 1)))
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from multipod.interop.inputs import ForeignModel, Input, as_inputs, train_arguments
from multipod.nn.model import flat, unflat
from multipod.pytrees import Batch, Outputs, Params, Shapes, Statistics


@dataclass(frozen=True, kw_only=True)
class FunctionModel(ForeignModel):
    """Two functions, in the argument order of `haiku.transform` and `haiku.transform_with_state`.

    `init(key, *inputs)` returns any pytree of parameters, or with `stateful` a pair of parameters and state.
    `apply(params, key, *inputs)` returns the outputs; with `stateful` it is `apply(params, state, key, *inputs)` and
    returns a pair of outputs and new state.

    Attributes:
      init_function: where no input has a shape, it is called with the key alone.
      apply_function: as above.
      stateful: whether there is a state, which becomes the statistics.
      takes_key: whether `apply` has the argument `key`.
      train_argument: the keyword by which both learn whether they train, as `is_training`; "" if none.
    """

    init_function: Callable[..., Any]
    apply_function: Callable[..., Any]
    stateful: bool = False
    takes_key: bool = True
    train_argument: str = ""

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics."""
        made = self._made(key)
        params, state = made if self.stateful else (made, {})
        return flat(params), flat(state)

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The outputs for `batch` and the statistics after it; see `Model`."""
        made = _shapes(self.init_function, self.inputs, self.train_argument)
        shapes = made if self.stateful else (made, {})
        state = [unflat(shapes[1], statistics)] if self.stateful else []
        keys = [key] if self.takes_key else []
        told = train_arguments(self.train_argument, train)
        found = self.apply_function(unflat(shapes[0], params), *state, *keys, *self.arguments(batch), **told)
        if not self.stateful:
            return found, statistics
        outputs, after = found
        return outputs, flat(after) if train else statistics

    def _made(self, key: jax.Array) -> Any:
        inputs = self.examples() if any(one.shape for one in self.inputs) else []
        return self.init_function(key, *inputs, **train_arguments(self.train_argument, True))


@functools.lru_cache(maxsize=32)
def _shapes(init: Callable[..., Any], inputs: tuple[Input, ...], train: str) -> Shapes:
    model = FunctionModel(init_function=init, apply_function=init, inputs=inputs, train_argument=train)
    return jax.eval_shape(model._made, jax.random.key(0))


def from_functions(
    init: Callable[..., Any],
    apply: Callable[..., Any],
    *inputs: Input | str,
    stateful: bool = False,
    takes_key: bool = True,
    train_argument: str = "",
    dims: Mapping[str, tuple[str, ...]] | None = None,
) -> FunctionModel:
    """Two functions as a model for a recipe; see `FunctionModel` and, for `dims`, `ForeignModel.dim_names`.

    Raises:
      RecipeError: no inputs.
    """
    return FunctionModel(
        init_function=init,
        apply_function=apply,
        inputs=as_inputs(inputs, shapes=False),
        stateful=stateful,
        takes_key=takes_key,
        train_argument=train_argument,
        dim_names=dims or {},
    )
