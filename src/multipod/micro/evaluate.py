"""Evaluates a graph in plain JAX: the readable reference, and what calibration and fine-tuning run.

Every operator works on real numbers, whatever its tensors are stored as. `evaluate` takes a hook that sees each
tensor's value and may replace it: rounding it to a grid there simulates a quantised model and can be differentiated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multipod.micro.graph import Graph, Op, Tensor, inner_graphs
from multipod.micro.operators.table import OPERATORS

Hook = Callable[[Tensor, jax.Array], jax.Array]
"""Gets a tensor and its value, and returns the value that goes on."""


def evaluate(
    graph: Graph,
    inputs: Sequence[Any],
    hook: Hook = lambda tensor, value: value,
    constants: Mapping[Tensor, Any] | None = None,
) -> dict[Tensor, Any]:
    """The value of every tensor that an operator makes, and of the inputs.

    `constants` replaces the values of some constants (weights under training). The hook sees inputs, constants that
    are float32 and outputs of operators, in that order of the run.
    """
    given = constants or {}
    values: dict[Tensor, Any] = {}

    def read(tensor: Tensor | None) -> Any:
        if tensor is None or tensor in values:
            return None if tensor is None else values[tensor]
        value = given.get(tensor, tensor.data)
        values[tensor] = hook(tensor, jnp.asarray(value)) if tensor.dtype == "float32" else value
        return values[tensor]

    values.update((tensor, hook(tensor, jnp.asarray(x))) for tensor, x in zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        arguments = [read(tensor) for tensor in op.inputs]
        outputs = _compute(op, arguments)
        for tensor, y in zip(op.outputs, outputs, strict=True):
            assert jnp.shape(y) == tensor.shape, (op.kind, jnp.shape(y), tensor.shape)
            values[tensor] = hook(tensor, y)
    values.update((tensor, read(tensor)) for tensor in graph.outputs)
    return {tensor: value for tensor, value in values.items() if not tensor.constant}


def _compute(op: Op, arguments: Sequence[Any]) -> list[Any]:
    function = OPERATORS[op.kind].evaluate
    assert function is not None, f"{op.kind} is not evaluated"
    if inner_graphs(op):
        functions = {key: partial(outputs_of, v) if isinstance(v, Graph) else v for key, v in op.options.items()}
        op = replace(op, options=functions)
    outputs = function(op, arguments)
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def outputs_of(graph: Graph, *inputs: Any) -> list[Any]:
    """The outputs of a graph, as JAX arrays."""
    values = evaluate(graph, inputs)
    return [values[tensor] for tensor in graph.outputs]


def run(graph: Graph, *inputs: Any) -> list[np.ndarray]:
    """The outputs of a graph, compiled and as NumPy arrays."""
    return [np.asarray(value) for value in jax.jit(partial(outputs_of, graph))(*inputs)]
