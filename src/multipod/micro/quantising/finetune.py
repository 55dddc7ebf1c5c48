"""Quantisation-aware fine-tuning: the weights learn to be rounded. It needs examples, but no labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from multipod.micro.evaluate import evaluate
from multipod.micro.graph import Graph, Tensor
from multipod.micro.operators.table import weights_of
from multipod.micro.quantising.quantise import Quantised


@dataclass(frozen=True)
class Tuning:
    """How to fine-tune.

    Attributes:
      steps: updates; some hundred.
      batch: examples of each.
      rate: of Adam, as a share of each tensor's root mean square; it falls to zero along a cosine.
      seed: of the order of the examples.
    """

    steps: int = 300
    batch: int = 32
    rate: float = 0.003
    seed: int = 0


def fine_tune(
    quantised: Quantised,
    teacher: Graph,
    arrays: Sequence[np.ndarray],
    tuning: Tuning = Tuning(),
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Quantised:
    """The quantised model with weights and biases that bring its outputs near those of the float graph `teacher`.

    Minimises the mean squared error of the float outputs, over their variance, with every weight and activation
    rounded to its grid in the forward pass and the gradient passed straight through. The grids of activations stay;
    those of weights follow the weights. `arrays` are examples (`ranges.check_calibration`); `report` gets each step's
    loss.

    Source: distillation as in arXiv:1503.02531, straight-through rounding as in arXiv:1712.05877, section 3.
    """
    graph, hook = quantised.graph, quantised.rounding()
    order = _learnt(graph)
    sizes = [max(float(np.sqrt(np.mean(np.square(tensor.values)))), 1e-3) for tensor in order]
    targets = _outputs(teacher, arrays)
    spreads = [max(float(np.var(target)), 1e-12) for target in targets]
    schedule = optax.cosine_decay_schedule(tuning.rate, tuning.steps)
    optimizer = optax.adam(schedule)

    def loss(values: list[jax.Array], inputs: Any, wanted: Any) -> jax.Array:
        constants = {tensor: value * size for tensor, value, size in zip(order, values, sizes, strict=True)}

        def outputs_of(*example: Any) -> list[jax.Array]:
            computed = evaluate(graph, example, hook, constants)
            return [computed[tensor] for tensor in graph.outputs]

        outputs = jax.vmap(outputs_of)(*inputs)
        errors = [jnp.mean(jnp.square(y - t)) / s for y, t, s in zip(outputs, wanted, spreads, strict=True)]
        return sum(errors, jnp.zeros(()))

    @jax.jit
    def update(values: list[jax.Array], state: Any, inputs: Any, wanted: Any) -> tuple[Any, Any, jax.Array]:
        cost, gradients = jax.value_and_grad(loss)(values, inputs, wanted)
        changes, state = optimizer.update(gradients, state)
        return optax.apply_updates(values, changes), state, cost

    values: Any = [jnp.asarray(tensor.values / size) for tensor, size in zip(order, sizes, strict=True)]
    state = optimizer.init(values)
    rng = np.random.default_rng(tuning.seed)
    for step in range(tuning.steps):
        rows = rng.integers(0, len(arrays[0]), tuning.batch)
        values, state, cost = update(values, state, [a[rows] for a in arrays], [t[rows] for t in targets])
        report(step, float(cost))
    learnt = {tensor: np.asarray(value) * size for tensor, value, size in zip(order, values, sizes, strict=True)}
    return _set_values(quantised, learnt)


def _learnt(graph: Graph) -> list[Tensor]:
    """The weights and biases of a graph."""
    learnt: list[Tensor] = []
    for op in graph.ops:
        if kernel := weights_of(op):
            learnt += [op.input(kernel.weights), op.input(kernel.bias)]
    return [tensor for tensor in dict.fromkeys(learnt) if tensor.constant]


def _outputs(graph: Graph, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    def outputs_of(*example: Any) -> list[jax.Array]:
        computed = evaluate(graph, example)
        return [computed[tensor] for tensor in graph.outputs]

    return [np.asarray(y) for y in jax.jit(jax.vmap(outputs_of))(*arrays)]


def _set_values(quantised: Quantised, values: dict[Tensor, np.ndarray]) -> Quantised:
    new = {tensor: replace(tensor, data=np.asarray(value, np.float32)) for tensor, value in values.items()}
    ops = tuple(
        replace(op, inputs=tuple(None if t is None else new.get(t, t) for t in op.inputs)) for op in quantised.graph.ops
    )
    return replace(quantised, graph=replace(quantised.graph, ops=ops))
