"""Convolution of images, however small, or with few channels."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from multipod.nn.logical_axes import axes_of_dim

Pads = tuple[tuple[int, int], tuple[int, int]]
DIMENSIONS = ("NHWC", "HWIO", "NHWC")
ADDED_BY_FLAX = {"dimension_numbers", "feature_group_count", "lhs_dilation", "rhs_dilation"}


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

    On CPU gradients keep the channels last, unless the image is split over devices. XLA rewrites the convolutions of
    gradients into that form, but not inside of loops and conditionals, where its plain loops took 57 times as long
    (jax-ml/jax issue 12868; the same benchmark).
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
        added = {name for name, value in options.items() if value is not None} - ADDED_BY_FLAX
        split = axes_of_dim("height") or axes_of_dim("width")
        if not plain or added or split or image.dtype != kernel.dtype or min(out) < 1:
            return lax.conv_general_dilated(image, kernel, strides, padding, **options)
        (top, bottom), (left, right) = padding
        return _convolution(image, kernel, (strides[0], strides[1]), ((top, bottom), (left, right)))
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolution(image: jax.Array, kernel: jax.Array, strides: tuple[int, int], pads: Pads) -> jax.Array:
    return lax.conv_general_dilated(image, kernel, strides, pads, dimension_numbers=DIMENSIONS)


def _forward(
    image: jax.Array, kernel: jax.Array, strides: tuple[int, int], pads: Pads
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolution(image, kernel, strides, pads), (image, kernel)


def _backward(
    strides: tuple[int, int], pads: Pads, saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def by_xla(image: jax.Array, kernel: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        conv = functools.partial(
            lax.conv_general_dilated, window_strides=strides, padding=pads, dimension_numbers=DIMENSIONS
        )
        # Transposed, not differentiated: the program then holds no second convolution forward.
        (back,) = jax.linear_transpose(lambda x: conv(x, kernel), image)(grad)
        (taps,) = jax.linear_transpose(lambda w: conv(image, w), kernel)(grad)
        return back, taps

    channels_last = functools.partial(_gradients, strides=strides, pads=pads)
    return lax.platform_dependent(*saved, grad, cpu=channels_last, default=by_xla)


_convolution.defvjp(_forward, _backward)


def _gradients(
    image: jax.Array, kernel: jax.Array, grad: jax.Array, *, strides: tuple[int, int], pads: Pads
) -> tuple[jax.Array, jax.Array]:
    """Gradients to image and kernel as convolutions with channels last and no window turned around."""
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), dimension_numbers=DIMENSIONS)
    sides = list(zip(image.shape[1:3], kernel.shape[:2], grad.shape[1:3], strides, pads, strict=True))
    reached = [(out - 1) * step + size - low for _, size, out, step, (low, _) in sides]  # end of the last window
    around = [
        (size - 1 - low, side - end + size - 1)
        for (side, size, _, _, (low, _)), end in zip(sides, reached, strict=True)
    ]
    back = conv(grad, kernel[::-1, ::-1].swapaxes(2, 3), padding=around, lhs_dilation=strides)
    # The kernel's: examples are summed over as channels are, and channels stand apart as examples do.
    seen = image[:, : reached[0], : reached[1]].transpose(3, 1, 2, 0)
    edges = [(low, max(end - side, 0)) for (side, _, _, _, (low, _)), end in zip(sides, reached, strict=True)]
    taps = conv(seen, grad.transpose(1, 2, 0, 3), padding=edges, rhs_dilation=strides)
    return back, taps.transpose(1, 2, 0, 3)


def convolution_with_folded_stride(
    image: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> jax.Array:
    """A convolution with its stride folded into the channels: `space-to-depth`, for `nnx.Conv`.

    Blocks of `strides` pixels become one pixel of as many times the channels, and the kernel likewise, with zeros in
    front: 7 x 7 of stride 2 over 3 channels is 4 x 4 of stride 1 over 12. Matrix units that take 8 or 128 channels at
    a time are then four times as full. Parameters and values are those of `convolution`, but for rounding; images whose
    sides the strides do not divide go there.

    Source: the ResNet stem of MLPerf's TPU submissions (arXiv:2011.03641).
    """
    sides = image.shape[1:3]
    if any(side % step for side, step in zip(sides, strides, strict=True)) or set(strides) == {1}:
        return convolution(image, kernel, strides, padding, **options)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(sides, kernel.shape[:2], strides, padding)
    folds = [_fold(*dim) for dim in zip(sides, kernel.shape[:2], strides, padding, strict=True)]
    (rows, columns), pads = [fold.zeros for fold in folds], [fold.padding for fold in folds]
    wide = _blocks(jnp.pad(kernel, (rows, columns, (0, 0), (0, 0)))[None], strides)[0]
    return convolution(_blocks(image[..., None], strides)[..., 0], wide, (1, 1), pads, **options)


class _Fold(NamedTuple):
    """What folding does to one dim: zeros around the kernel, and padding of the folded image."""

    zeros: tuple[int, int]
    padding: tuple[int, int]


def _fold(side: int, size: int, step: int, padding: tuple[int, int]) -> _Fold:
    out = (side + sum(padding) - size) // step + 1
    front = -padding[0] % step
    taps = -(-(front + size) // step)
    before = (padding[0] + front) // step
    return _Fold((front, taps * step - front - size), (before, out + taps - 1 - before - side // step))


def _blocks(array: jax.Array, strides: Sequence[int]) -> jax.Array:
    """[n, h, w, c, f] to [n, h / y, w / x, y * x * c, f]."""
    n, h, w, c, f = array.shape
    y, x = strides
    apart = array.reshape(n, h // y, y, w // x, x, c, f).transpose(0, 1, 3, 2, 4, 5, 6)
    return apart.reshape(n, h // y, w // x, y * x * c, f)
