"""Small convolutions as one matrix product, against XLA's own convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from multipod.nn.images.convolution import convolution

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def both(image, kernel, strides, padding, **options):
    """Value and gradients to image and kernel: ours, XLA's; weighted so that every output counts differently."""

    def results(conv):
        def total(image, kernel):
            out = conv(image, kernel, strides, padding, dimension_numbers=DIMENSIONS, **options)
            return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum(), out

        (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(image, kernel)
        return out, *gradients

    return results(convolution), results(lax.conv_general_dilated)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 1), (0, 1))])
@pytest.mark.parametrize(("window", "strides"), [((3, 3), (1, 1)), ((3, 3), (2, 2)), ((2, 3), (1, 2))])
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 2), (3, 4), (4, 4)])
def test_equals_xlas_convolution(size, window, strides, padding):
    key = jax.random.key(7)
    image = jax.random.normal(key, (3, *size, 5))
    kernel = jax.random.normal(jax.random.fold_in(key, 1), (*window, 5, 4))
    for ours, theirs in zip(*both(image, kernel, strides, padding), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "window", "strides", "padding"),
    [
        ((8, 9), (3, 3), (2, 2), "SAME"),
        ((8, 9), (3, 3), (2, 2), ((1, 1), (1, 1))),
        ((9, 8), (1, 1), (2, 2), "VALID"),
        ((9, 16), (7, 7), (2, 2), ((3, 3), (3, 3))),
        ((9, 9), (3, 2), (3, 1), ((0, 4), (1, 0))),
        ((10, 7), (2, 2), (3, 3), "VALID"),
    ],
)
def test_gradients_equal_xlas_where_windows_miss_pixels(size, window, strides, padding):
    image = jax.random.normal(jax.random.key(3), (3, *size, 5))
    kernel = jax.random.normal(jax.random.key(4), (*window, 5, 4))
    for ours, theirs in zip(*both(image, kernel, strides, padding), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_in_loops_every_convolution_is_one_that_cpus_have_fast_code_for():
    """Channels last, and no kernel turned around; XLA makes others so only outside of loops."""

    def total(images, kernel):
        step = lambda image: convolution(image, kernel, (2, 2), "SAME", dimension_numbers=DIMENSIONS)  # noqa: E731
        return (jax.lax.map(step, images) ** 2).sum()

    arguments = jnp.ones((4, 2, 16, 16, 8)), jnp.ones((3, 3, 8, 8))
    program = jax.jit(jax.grad(total, (0, 1))).lower(*arguments).compile().as_text()
    convolutions = [line for line in program.splitlines() if " convolution(" in line]
    assert len(convolutions) == 3, program
    for line in convolutions:
        assert "dim_labels=b01f_01io->b01f" in line
        assert "rhs_reversal" not in line


@pytest.mark.parametrize(
    ("channels", "options"), [(2, {"feature_group_count": 2}), (4, {"rhs_dilation": (2, 2)}), (4, {})]
)
def test_groups_and_dilation_are_left_to_xla(channels, options):
    image = jax.random.normal(jax.random.key(1), (2, 2, 2, 4))
    kernel = jax.random.normal(jax.random.key(2), (3, 3, channels, 6))
    for ours, theirs in zip(*both(image, kernel, (1, 1), ((2, 2), (2, 2)), **options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_product_is_summed_in_the_type_that_is_asked_for():
    image, kernel = jnp.full((1, 2, 2, 300), 1, jnp.bfloat16), jnp.full((3, 3, 300, 1), 1, jnp.bfloat16)
    out = convolution(image, kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS, preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, 1200)
