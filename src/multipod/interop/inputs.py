"""What models of other libraries share: which entries of a batch they read, and names for dims of their parameters."""

import abc
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from multipod.errors import LayoutError, RecipeError
from multipod.nn.dims import Dims
from multipod.pytrees import Batch, Params, Statistics

TRAINS = ("train", "training", "is_training")
EVALUATES = ("deterministic", "inference", "use_running_average")
"""Arguments by which a module learns whether it trains: true in training, or true in evaluation."""


@dataclass(frozen=True)
class Input:
    """An entry of a batch that a model reads as an argument.

    Attributes:
      name: of the entry, as `image`.
      shape: of one example, without the batch; libraries that make parameters from an example need it.
      dtype: of its numbers.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"

    def example(self) -> jax.Array:
        """Zeros for a batch of one."""
        return jnp.zeros((1, *self.shape), self.dtype)


@dataclass(frozen=True, kw_only=True)
class ForeignModel(abc.ABC):
    """A model of another library: it meets `multipod.nn.model.Model` and `multipod.nn.dims.NamesDims`.

    Parameters and statistics are flat dictionaries from a path such as `dense_0/kernel` to an array.

    Attributes:
      inputs: what of a batch becomes the model's arguments, in their order.
      dim_names: names for dims of parameters by their path: `{"kernel$": ("embed", "mlp")}`. The first pattern
        (`re.search`) that is found in a path counts; "" is a dim without a name.
    """

    inputs: tuple[Input, ...]
    dim_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @abc.abstractmethod
    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics."""

    def dims(self) -> dict[str, Dims]:
        """The names of the dims of parameters, by their path; see `NamesDims`.

        Raises:
          LayoutError: patterns that fit no parameter, or name another number of dims than the tensor has; all of them.
        """
        shapes = {path: leaf.shape for path, leaf in jax.eval_shape(self.init, jax.random.key(0))[0].items()}
        return self.own_dims() | named_by_pattern(self.dim_names, shapes)

    def own_dims(self) -> dict[str, Dims]:
        """Names that the library's own metadata give."""
        return {}

    def examples(self) -> list[jax.Array]:
        """A batch of one, all zeros, to make parameters from."""
        return [one.example() for one in self.inputs]

    def arguments(self, batch: Batch) -> list[jax.Array]:
        """What the model is called with for `batch`."""
        return [batch[one.name] for one in self.inputs]


def named_by_pattern(patterns: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Dims]:
    """The names of dims, by path, that `patterns` give to tensors of `shapes`.

    Raises:
      LayoutError: see `ForeignModel.dims`.
    """
    found: dict[str, Dims] = {}
    wrong, idle = [], dict.fromkeys(patterns)
    for path, shape in shapes.items():
        pattern = next((pattern for pattern in patterns if re.search(pattern, path)), None)
        if pattern is None:
            continue
        idle.pop(pattern, None)
        if len(patterns[pattern]) == len(shape):
            found[path] = tuple(name or None for name in patterns[pattern])
        else:
            wrong.append(f"{pattern!r} names {len(patterns[pattern])} dims, and {path} is {list(shape)}")
    # A pattern behind another that takes all of its tensors is no mistake.
    lost = [p for p in idle if not any(re.search(p, path) for path in shapes)]
    wrong += [f"{pattern!r} is found in none of the parameters {', '.join(shapes)}" for pattern in lost]
    if wrong:
        raise LayoutError(f"model.dim_names: {'; '.join(wrong)}. Mend the patterns: one name for each dim.")
    return found


def as_inputs(inputs: tuple[Input | str, ...], *, shapes: bool) -> tuple[Input, ...]:
    """The inputs of a model, a text being the name of one; `shapes`: all must say theirs.

    Raises:
      RecipeError: there are none, or one without the shape that is needed.
    """
    if not inputs:
        raise RecipeError('a model reads entries of a batch. Name them in their order, as Input("image", (8, 8, 1)).')
    read = tuple(Input(one) if isinstance(one, str) else one for one in inputs)
    bare = [one.name for one, given in zip(read, inputs, strict=True) if isinstance(given, str)]
    if shapes and bare:
        raise RecipeError(
            f"the model makes its parameters from an example, and {', '.join(bare)} has no shape. "
            f'Write Input("{bare[0]}", SHAPE), the shape of one example without the batch.'
        )
    return read


def train_argument(function: Callable[..., Any]) -> str:
    """The argument by which `function` learns whether it trains: one of `TRAINS` or `EVALUATES`; "" if none does."""
    names = inspect.signature(function).parameters
    return next((name for name in (*TRAINS, *EVALUATES) if name in names), "")


def train_arguments(name: str, train: bool) -> dict[str, bool]:
    """What tells a function with that argument whether it trains."""
    return {name: train != (name in EVALUATES)} if name else {}
