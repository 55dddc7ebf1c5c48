"""Depthwise convolution of images: each channel with a filter of its own."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from multipod.pytrees import Pytree

Pads = tuple[tuple[int, int], tuple[int, int]]
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def depthwise_convolution(
    image: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> jax.Array:
    """`lax.conv_general_dilated` of [n, h, w, c] by [kh, kw, 1, c] with c groups, for `nnx.Conv`.

    On CPU it is kh kw shifted images, each times its row of the kernel, added up in float32; so is its gradient. XLA
    has only plain loops for grouped convolutions there: EfficientNet-B0's gradient takes four to five times as long
    (`benchmarks/depthwise.py`, 2 cores, JAX 0.10.2, 2026-11-21). Elsewhere it is XLA's convolution.

    Raises:
      NotImplementedError: other groups, or dilation. Forward-mode differentiation is not supported either.
    """
    size, groups = kernel.shape[:2], options.get("feature_group_count", 1)
    if not groups == image.shape[-1] == kernel.shape[-1] or any(
        set(options.get(name) or (1,)) != {1} for name in ("lhs_dilation", "rhs_dilation")
    ):
        raise NotImplementedError(
            f"depthwise convolution of {image.shape} by {kernel.shape} in {groups} groups: "
            "one group a channel and no dilation, or `multipod.nn.images.convolution`."
        )
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(image.shape[1:3], size, strides, padding)
    (top, bottom), (left, right) = padding
    return _depthwise(image, kernel, (strides[0], strides[1]), ((top, bottom), (left, right)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _depthwise(image: jax.Array, kernel: jax.Array, strides: tuple[int, int], pads: Pads) -> jax.Array:
    return lax.platform_dependent(
        image,
        kernel,
        cpu=functools.partial(_shifted, strides=strides, pads=pads),
        default=functools.partial(_by_xla, strides=strides, pads=pads),
    )


def _forward(image: jax.Array, kernel: jax.Array, strides: tuple[int, int], pads: Pads) -> tuple[jax.Array, Pytree]:
    return _depthwise(image, kernel, strides, pads), (image, kernel)


def _backward(strides: tuple[int, int], pads: Pads, saved: Pytree, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    image, kernel = saved

    def by_xla(image: jax.Array, kernel: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(functools.partial(_by_xla, strides=strides, pads=pads), image, kernel)[1](grad)

    shifted = functools.partial(_shifted_gradients, strides=strides, pads=pads)
    return lax.platform_dependent(image, kernel, grad, cpu=shifted, default=by_xla)


_depthwise.defvjp(_forward, _backward)


def _by_xla(image: jax.Array, kernel: jax.Array, *, strides: tuple[int, int], pads: Pads) -> jax.Array:
    return lax.conv_general_dilated(
        image, kernel, strides, pads, dimension_numbers=DIMENSIONS, feature_group_count=image.shape[-1]
    )


def _shifted(image: jax.Array, kernel: jax.Array, *, strides: tuple[int, int], pads: Pads) -> jax.Array:
    """y[n, i, j, c] = sum over u, v of kernel[u, v, 0, c] * image[n, i s + u - top, j s + v - left, c]."""
    padded = jnp.pad(image, ((0, 0), *pads, (0, 0))).astype(jnp.float32)
    taps = kernel.astype(jnp.float32)
    terms = (window * taps[u, v, 0] for u, v, window in _windows(padded, kernel.shape[:2], strides))
    return functools.reduce(jnp.add, terms).astype(image.dtype)


def _shifted_gradients(
    image: jax.Array, kernel: jax.Array, grad: jax.Array, *, strides: tuple[int, int], pads: Pads
) -> tuple[jax.Array, jax.Array]:
    """Gradients to image and kernel, from the gradient of the output."""
    padded = jnp.pad(image, ((0, 0), *pads, (0, 0))).astype(jnp.float32)
    wide = grad.astype(jnp.float32)
    sums = [(window * wide).sum((0, 1, 2)) for _, _, window in _windows(padded, kernel.shape[:2], strides)]
    # To the image: the output's gradient, zeros put back between its pixels, with the kernel turned around. Pixels
    # that the last stride did not reach, and padding that it cut off, come in as padding more or less.
    before = [size - 1 - low for size, (low, _) in zip(kernel.shape, pads, strict=False)]
    spread = [(n - 1) * step + 1 for n, step in zip(grad.shape[1:3], strides, strict=True)]
    after = [
        have + size - 1 - low - wide
        for have, size, low, wide in zip(image.shape[1:3], kernel.shape, before, spread, strict=False)
    ]
    edges = [(low, high, step - 1) for low, high, step in zip(before, after, strides, strict=True)]
    apart = lax.pad(grad, jnp.zeros((), grad.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    back = _shifted(apart, kernel[::-1, ::-1], strides=(1, 1), pads=((0, 0), (0, 0)))
    return back, jnp.stack(sums).reshape(kernel.shape).astype(kernel.dtype)


def _windows(padded: jax.Array, size: Sequence[int], strides: tuple[int, int]) -> Iterator[tuple[int, int, jax.Array]]:
    """For each place (u, v) in the kernel, the pixels that it meets, one for each pixel of the output."""
    ends = [(n - k) // step * step + 1 for n, k, step in zip(padded.shape[1:3], size, strides, strict=True)]
    for u in range(size[0]):
        for v in range(size[1]):
            yield u, v, padded[:, u : u + ends[0] : strides[0], v : v + ends[1] : strides[1]]
