"""Convolution of images, however small."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def convolution(
    image: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> jax.Array:
    """`lax.conv_general_dilated` of [n, h, w, c] by [kh, kw, c, features], for `nnx.Conv`.

    Where the output has fewer pixels than the kernel it is one matrix product of the windows side by
    side with the kernel. XLA exchanges the operands of such a convolution or of its gradient, and on
    CPU has only plain loops for what comes out: six times slower on 2 x 2 images
    (`benchmarks/convolution.py`, 2 cores with AVX-512, JAX 0.10.2, 2026-11-21).
    """
    size = kernel.shape[:2]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(image.shape[1:3], size, strides, padding)
    out = [
        (n + sum(pad) - k) // step + 1 for n, k, step, pad in zip(image.shape[1:3], size, strides, padding, strict=True)
    ]
    plain = options.get("feature_group_count", 1) == 1 and all(
        set(options.get(name) or (1,)) == {1} for name in ("lhs_dilation", "rhs_dilation")
    )
    if not plain or not 0 < out[0] * out[1] < size[0] * size[1]:
        return lax.conv_general_dilated(image, kernel, strides, padding, **options)
    image = jnp.pad(image, ((0, 0), *padding, (0, 0)))
    ends = [(n - 1) * step + 1 for n, step in zip(out, strides, strict=True)]
    windows = [
        image[:, y : y + ends[0] : strides[0], x : x + ends[1] : strides[1]]
        for y in range(size[0])
        for x in range(size[1])
    ]
    kernel = kernel.reshape(-1, kernel.shape[-1])
    return jnp.matmul(
        jnp.concatenate(windows, axis=-1),
        kernel,
        precision=options.get("precision"),
        preferred_element_type=options.get("preferred_element_type"),
    )
