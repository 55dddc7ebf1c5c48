"""Norms of whole tensors, or of each slice of a stack of layers, and the layer-wise rate made of them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from multipod.optim.tensors import TensorRules, name_of


def tensor_norm(x: jax.Array, stacked: bool = False) -> jax.Array:
    """The Euclidean norm of `x` in float32, or of each x[i] if stacked; dims are kept, with size 1.

    Under a split weight update `x` is whole in name: XLA adds the partial sums of squares, one number
    for each tensor (or slice).
    """
    dims = tuple(range(1 if stacked else 0, x.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=dims, keepdims=True))


def trust_ratio(
    w: jax.Array,
    g: jax.Array,
    *,
    coefficient: float = 1.0,
    weight_decay: float = 0.0,
    eps: float = 0.0,
    stacked: bool = False,
) -> jax.Array:
    """coefficient * |w| / (|g| + weight_decay * |w| + eps), and 1 where |w| or |g| is 0 or no number.

    Float32, with dims of size 1 (but for the layers of a stack). A gradient with NaN in it keeps them.

    Source: LARS, You et al., 2017, arXiv:1708.03888, eq. 6; eps and the rule for 0 from the MLPerf code.
    """
    w_norm, g_norm = tensor_norm(w, stacked), tensor_norm(g, stacked)
    usable = (w_norm > 0) & (g_norm > 0)
    below = jnp.where(usable, g_norm + weight_decay * w_norm + eps, 1.0)
    return jnp.where(usable, coefficient * w_norm / below, 1.0)


def scale_by_trust_ratio(rules: TensorRules) -> optax.GradientTransformation:
    """Scale the updates of adapted tensors by |w| / |update|: the layer-wise part of LAMB.

    Unlike Optax's transformation of this name it leaves biases and normalisations alone, takes a norm of
    each slice of stacked layers, and computes norms in float32 for parameters of any dtype.

    Source: You et al., 2019, arXiv:1904.00962, algorithm 2 with the identity for phi; skip rules and slices
    from Google's MLPerf v0.7 BERT.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(path: Any, u: jax.Array, w: jax.Array) -> jax.Array:
            name = name_of(path)
            if not rules.is_adapted(name, w.ndim):
                return u
            return (u * trust_ratio(w, u, stacked=rules.is_stacked(name))).astype(u.dtype)

        return jax.tree.map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)
