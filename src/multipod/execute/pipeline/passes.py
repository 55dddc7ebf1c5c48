"""A function's forward and backward pass as two functions, the weights of the backward pass being an argument.

A pipeline keeps the activations of many micro-batches, and goes back with weights that may have changed since. So what
`jax.vjp` keeps is sorted: what was made of weights alone is not kept, but made again from the weights that the backward
pass is given; what depends on activations is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multipod.pytrees import Grads, Params, Pytree, Shapes

PartFunction = Callable[[Params, Pytree, Pytree], tuple[Pytree, Pytree]]
"""(weights, x, aux) to (y, extra): differentiable in weights and x, and y is what is differentiated."""

INLINED = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that are looked into: without it, whatever comes out of them would count as an activation."""


@dataclass(frozen=True)
class TracedPasses:
    """The forward and the backward pass of a function, and the shapes of what they hand over.

    Attributes:
      forward: (weights, x, aux) to (y, extra, saved): `saved` is a tuple of arrays.
      backward: (weights, saved, dy) to (dweights, dx). Activations multiply by these `weights`; the products with
        saved activations, and the derivatives at them, are those of the forward pass.
      y, saved, extra: shapes of what `forward` returns.
    """

    forward: Callable[[Params, Pytree, Pytree], tuple[Pytree, Pytree, tuple[jax.Array, ...]]]
    backward: Callable[[Params, tuple[jax.Array, ...], Pytree], tuple[Grads, Pytree]]
    y: Shapes
    saved: tuple[jax.ShapeDtypeStruct, ...]
    extra: Shapes


def trace_passes(function: PartFunction, weights: Shapes, x: Shapes, aux: Shapes) -> TracedPasses:
    """Traces `function` once for arguments of these shapes, and splits it into its two passes.

    What a rematerialised layer keeps are its weights and its input, so it computes its activations again with the
    weights of the backward pass. An output of a loop or of a custom derivative that mixes weights and activations
    counts as an activation.
    """
    shapes = jax.eval_shape(lambda *given: given, weights, x, aux)
    pulled: list[Any] = []

    def run_vjp(weights: Params, x: Pytree, aux: Pytree) -> tuple[Pytree, Pytree, tuple[jax.Array, ...]]:
        y, pull, extra = jax.vjp(lambda w, a: function(w, a, aux), weights, x, has_aux=True)
        leaves, structure = jax.tree.flatten(pull)
        pulled[:] = [structure]
        return y, extra, tuple(leaves)

    closed, (y, extra, kept) = jax.make_jaxpr(run_vjp, return_shape=True)(*shapes)
    count = len(jax.tree.leaves(shapes[0]))
    outs = _find_dependent(closed.jaxpr, [n >= count for n in range(len(closed.jaxpr.invars))])
    moving = outs[len(outs) - len(kept) :]
    structure = pulled[0]

    outputs = closed.jaxpr.outvars[len(outs) - len(kept) :]
    # What the backward pass needs twice is kept once.
    first = {id(var): n for n, var in reversed([*enumerate(outputs)])}
    stored = [n for n, var in enumerate(outputs) if moving[n] and first[id(var)] == n]

    def run(weights: Params, x: Pytree, aux: Pytree) -> tuple[Pytree, Pytree, list[jax.Array]]:
        flat = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves((weights, x, aux)))
        head: Any = jax.tree.structure((y, extra))
        results = len(flat) - len(kept)
        return (*head.unflatten(flat[:results]), flat[results:])

    def forward(weights: Params, x: Pytree, aux: Pytree) -> tuple[Pytree, Pytree, tuple[jax.Array, ...]]:
        made, more, leaves = run(weights, x, aux)
        return made, more, tuple(leaves[n] for n in stored)

    def backward(weights: Params, saved: tuple[jax.Array, ...], dy: Pytree) -> tuple[Grads, Pytree]:
        # Of this second run only what is made of the weights is used; the compiler drops the rest.
        _, _, leaves = run(weights, *_make_zeros(shapes[1:]))
        activations = dict(zip(stored, saved, strict=True))
        return structure.unflatten(
            [activations[first[id(var)]] if moving[n] else leaves[n] for n, var in enumerate(outputs)]
        )(dy)

    return TracedPasses(forward, backward, y, tuple(kept[n] for n in stored), extra)


def _make_zeros(shapes: Shapes) -> Pytree:
    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(zeros, shapes)


def _find_dependent(jaxpr: Any, given: list[bool]) -> list[bool]:
    """Finds which outputs depend on the inputs that are `given` as true."""
    moving = {var for var, moves in zip(jaxpr.invars, given, strict=True) if moves}
    for eqn in jaxpr.eqns:
        ins = [_is_in(var, moving) for var in eqn.invars]
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in INLINED else None
        outs = _find_dependent(inner.jaxpr, ins) if inner is not None else [any(ins)] * len(eqn.outvars)
        moving |= {var for var, moves in zip(eqn.outvars, outs, strict=True) if moves}
    return [_is_in(var, moving) for var in jaxpr.outvars]


def _is_in(var: Any, variables: set[Any]) -> bool:
    return not hasattr(var, "val") and var in variables  # a literal has a value, and no hash
