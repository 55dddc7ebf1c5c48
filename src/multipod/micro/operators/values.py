"""Parts of what operators compute, in plain JAX."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from multipod.micro.graph import Op
from multipod.micro.operators.operator import Evaluate

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "NONE": lambda x: x,
    "RELU": lambda x: jnp.maximum(x, 0),
    "RELU6": lambda x: jnp.clip(x, 0, 6),
    "RELU_N1_TO_1": lambda x: jnp.clip(x, -1, 1),
    "TANH": jnp.tanh,
}


def apply_activation(op: Op, y: Any) -> Any:
    """Applies the activation that is fused into an operator to its result."""
    return ACTIVATIONS[op.options.get("fused_activation_function", "NONE")](y)


def elementwise(function: Callable[..., Any]) -> Evaluate:
    """Computes `function` of the inputs, then the fused activation."""
    return lambda op, xs: apply_activation(op, function(*xs))
