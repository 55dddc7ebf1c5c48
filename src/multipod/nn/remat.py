"""Rematerialisation: what a layer keeps for the backward pass, and what is computed again."""

from collections.abc import Callable
from typing import Literal

import jax
from flax import nnx

from multipod.pytrees import Pytree

Remat = Literal["none", "dots", "all"]
"""`none`: everything that the backward pass needs is kept. `dots`: of each layer only its inputs and the products with
weights; scores, softmax, norms and activations are computed again. `all`: only each layer's inputs; the whole forward
pass is computed again (Chen et al., 2016, arXiv:1604.06174)."""

REMATS = ("none", "dots", "all")

_POLICIES: dict[str, Callable[..., bool]] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all": jax.checkpoint_policies.nothing_saveable,
}


def call_layer(layer: nnx.Module, *inputs: Pytree, remat: Remat) -> Pytree:
    """`layer(*inputs)`, which keeps for the backward pass what `remat` says. The values are the same, dropout too."""
    if remat == "none":
        return layer(*inputs)
    return nnx.remat(lambda one, *rest: one(*rest), policy=_POLICIES[remat])(layer, *inputs)
